"""A run's first steps also in plain PyTorch: each rank compares its own batch, all ranks stop together.

Owns parity.jsonl and what engine.json says under `parity`. The comparison itself is in comparison.py.
"""

from __future__ import annotations

import json
import time
from typing import Any

from ortlaunch.errors import EngineError, ParityError
from ortlaunch.json_types import Json
from ortlaunch.recipe.rules.parity import Compared, compared_steps
from ortlaunch.run_folder.engine_report import Parity
from ortlaunch.run_folder.folder import RunDir, json_text, write_json, write_text
from ortlaunch.run_folder.records import ParityLine, as_json
from ortlaunch.worker.engine.comparison import compare_with_draws, dropouts
from ortlaunch.worker.engine.differences import Comparison, Difference
from ortlaunch.worker.engine.engine import TrainingEngine
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.session import Session

Record = Json
_SHOWN = 5  # parameters that are named
_ADVICE = (
    "Nothing is trained further. Where this is an error of the engine: engine.name=inductor or eager; where it is "
    "rounding: a larger engine.parity_tolerance"
)
_OFF = "; engine.parity_steps=0 trains without a comparison"


class ParitySteps:
    """The steps of a run that are compared, from 0 on; `with_table`: also printed at the end."""

    def __init__(self, session: Session, first_step: int, with_table: bool = False) -> None:
        recipe = session.recipe
        run = session.run
        group = session.group
        engine = session.engine
        self.recipe = recipe
        self.run = run
        self.group = group
        self.engine = engine
        self.batches = session.batches
        self.with_table = with_table
        steps, self.why = chosen(session)
        self.end = min(steps, recipe.train.steps)
        self.tolerance = recipe.engine.parity_tolerance or recipe.format.tolerance
        self.dropouts = len(dropouts(engine.plain))
        self.lowered = recipe.engine.matmul_precision != "highest"
        self.module: Any = None
        self.replayed: Any = None
        self.records = _records_until(run, first_step)
        if is_plain(engine):  # an allowed fallback
            self._leave_out("plain PyTorch itself runs")
        elif self.records:
            engine.record.parity = self._summary()

    def check(self, step: int) -> None:
        """Compare the first micro batch of `step` (from 0) if it is one of those to compare (collective).

        Raises:
            ParityError: a rank is above the tolerance; every rank raises the same.
            EngineError: a rank could not compare.
        """
        if step >= self.end:
            return
        began = time.perf_counter()
        records = [json.loads(text) for text in self.group.gather(json.dumps(self.compared(step)))]
        failed = next((record for record in records if "error" in record), None)
        if failed and self.why:  # nobody asked for it
            self._leave_out(failed["error"])
            return
        if failed:
            raise EngineError(
                f"engine.parity_steps: rank {failed['rank']} could not compare with plain PyTorch: {failed['error']}"
                f"{'; leave engine.parity_steps out' if failed.get('random') else ''}"
            )
        record = {**_worst(records), "seconds": round(time.perf_counter() - began, 3)}
        self.records.append(record)
        self.engine.record.parity = self._summary()
        if self.group.rank == 0:
            write_text(self.run.parity, "".join(json_text(each) + "\n" for each in self.records))
            write_json(self.run.engine, self.engine.report().to_json())
        if not record["passed"]:
            raise ParityError(self._told(record))
        _say(self.group, self._automatic(record) if self.why else _line(record))
        if step + 1 == self.end:
            self.module = self.replayed = None  # graphs of their own with their memory
            if not self.why:
                _say(self.group, self._verdict())

    def _leave_out(self, why: str) -> None:
        self.end = 0
        self.module = None
        self.engine.record.parity = Parity("not compared", why)
        _say(self.group, f"parity: not compared: {why}")

    def compared(self, step: int) -> Record:
        """This rank's record of the step, or why there is none."""
        try:
            batch = self.engine.take(self.batches.micro_batch(step, 0, self.group.rank))
            with self.engine.uncounted(compiled=bool(self.dropouts) or self.lowered):
                found = compare_with_draws(
                    self.engine.plain,
                    self._module(),
                    batch,
                    self._replaying if self.engine.record.engine.used == "ort" else None,
                    precision=self.recipe.precision,
                    autocast=self.recipe.zero is None,
                    tolerance=self.tolerance,
                )
        except Exception as error:  # whatever a pass raises; the other ranks are waiting
            told = str(error) or type(error).__name__
            random = isinstance(error, EngineError)
            return {"rank": self.group.rank, "error": told, "random": random}
        return self._record(step + 1, found)

    def _module(self) -> Any:
        """The engine's module without dropout: the run's own where it has none, else one that is exported anew."""
        if self.module is None:
            self.module = self.engine.to_compare()
        return self.module

    def _replaying(self, model: Any) -> Any:
        """The same of a model that is given its random numbers, exported once."""
        if self.replayed is None:
            self.replayed = self.engine.another(model)
        return self.replayed

    def _record(self, step: int, found: Comparison) -> Record:
        line = ParityLine(
            step=step,
            rank=self.group.rank,
            loss=found.loss,
            reference_loss=found.reference_loss,
            loss_difference=found.loss_difference,
            gradient_difference=found.gradient_difference,
            state_difference=found.state_difference,
            worst=[[_name(each.name), *each[1:4]] for each in _largest_of(found, self.tolerance)],
            rounding=[_name(name) for name in found.rounding] or None,
            draws=found.draws or None,
            not_judged=found.not_judged or None,
            parameters=len(found.gradients),
            tolerance=self.tolerance,
            passed=found.largest <= self.tolerance,
        )
        return dict(as_json(line))

    def _summary(self) -> Parity:
        """What engine.json says; the worst step's parameters."""
        worst = _worst(self.records)
        return Parity(
            steps=[record["step"] for record in self.records],
            loss_difference=max(record["loss_difference"] for record in self.records),
            gradient_difference=max(record["gradient_difference"] for record in self.records),
            state_difference=max(record.get("state_difference", 0.0) for record in self.records),
            rounding=sorted(
                {name for record in self.records for name in record.get("rounding", ())}
            )
            or None,
            worst=[[name, value] for name, value, *_ in worst["worst"]],
            tolerance=self.tolerance,
            dropouts_switched_off=self.dropouts,
            matmul_precision="highest",
            seconds=round(sum(record.get("seconds", 0.0) for record in self.records), 3),
            why=self.why or None,
            verdict="passed" if all(record["passed"] for record in self.records) else "failed",
        )

    def _told(self, record: Record) -> str:
        used = self.engine.record.engine.used
        return (
            f"engine {used} and plain PyTorch differ by more than {self.tolerance:g} in step {record['step']}, on the "
            f"same weights and batch (rank {record['rank']})\n"
            f"loss: {record['loss']:.6g} on {used}, {record['reference_loss']:.6g} in PyTorch\n"
            f"{table(record, used)}{_not_judged(record)}\n{_ADVICE}{_OFF if self.why else ''}"
        )

    def _automatic(self, record: Record) -> str:
        """One line for a comparison that nobody asked for."""
        return (
            f"parity: step 1 in plain PyTorch: loss within {record['loss_difference']:.2g}, gradients within "
            f"{record['gradient_difference']:.2g}; took {record['seconds']:.1f} s, once{_rounding(record)}"
        )

    def _verdict(self) -> str:
        """The last line of a comparison that passed, under the worst step's table if that is wanted."""
        worst = _worst(self.records)
        used = self.engine.record.engine.used
        shown = f"{table(worst, used)}\n" if self.with_table else ""
        how = ", both compared at matmul_precision highest" if self.lowered else ""
        return f"{shown}parity: passed: {len(self.records)} steps within {self.tolerance:g}{how}; see {self.run.parity}"


def is_plain(engine: TrainingEngine) -> bool:
    """Whether plain PyTorch itself runs, with nothing that could be compared with it."""
    return engine.record.engine.used == "eager" and not engine.record.chunked_loss.rows


def parity_steps(session: Session, first_step: int) -> ParitySteps | None:
    """The comparison of a training's first steps, or None; why `auto` leaves it out is in engine.json."""
    steps, why = chosen(session)
    if steps:
        return ParitySteps(session, first_step)
    if why:
        session.engine.record.parity = Parity("not compared", why)
    return None


def chosen(session: Session) -> Compared:
    """How many steps are compared; the built model's own config says what it is."""
    config = getattr(getattr(session.engine.plain, "model", None), "config", None)
    return compared_steps(session.recipe, getattr(config, "model_type", None))


def table(record: Record, used: str) -> str:
    """The gradients that differ most, a line each."""
    width = max((len(name) for name, *_ in record["worst"]), default=0)
    lines = [
        f"step {record['step']}: largest relative differences of {record['parameters']} gradients:"
    ]
    for name, value, norm, reference in record["worst"]:
        lines.append(
            f"  {name:<{width}}  {value:.2g}  (norm {norm:.4g} on {used}, {reference:.4g} in PyTorch)"
        )
    return "\n".join(lines)


def _line(record: Record) -> str:
    name = record["worst"][0][0] if record["worst"] else "none"
    return (
        f"parity, step {record['step']}: loss within {record['loss_difference']:.2g}, gradients within "
        f"{record['gradient_difference']:.2g} ({name}); tolerance {record['tolerance']:g}{_rounding(record)}"
    )


def _worst(records: list[Record]) -> Record:
    def badness(record: Record) -> tuple[bool, float]:
        differences = (
            record["loss_difference"],
            record["gradient_difference"],
            record.get("state_difference", 0.0),
        )
        return not record["passed"], max(map(float, differences))

    return max(records, key=badness)


def _largest_of(found: Comparison, tolerance: float) -> list[Difference]:
    """The gradients that differ most, after what a pass left of weights and buffers where that is no rounding."""
    state = [
        each._replace(name=f"{each.name} (changed by the pass)")
        for each in found.state
        if each.value > tolerance and not each.rounding
    ]
    return [*state[:_SHOWN], *(each for each in found.gradients if not each.rounding)][:_SHOWN]


def _rounding(record: Record) -> str:
    names = record.get("rounding")
    draws = record.get("draws")
    judged = f"\n  rounding, as float64 shows: {', '.join(names[:_SHOWN])}" if names else ""
    return judged + (
        "\n  both were given the same random numbers, which training draws itself" if draws else ""
    )


def _not_judged(record: Record) -> str:
    why = record.get("not_judged")
    return f"\nfloat64 could not show whether this is rounding: {why}" if why else ""


def _name(name: str) -> str:
    return name.removeprefix("model.")  # that of LossModule: the rest is the model's own name


def _records_until(run: RunDir, step: int) -> list[Record]:
    """What an earlier life of this run compared before the checkpoint that it goes on from."""
    if not run.parity.exists():
        return []
    records = [json.loads(line) for line in run.parity.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["step"] <= step]


def _say(group: DistributedContext, text: str) -> None:
    if group.rank == 0:
        print(text, flush=True)
