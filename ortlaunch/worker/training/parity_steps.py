"""Comparison of a run's first steps with plain PyTorch, on each rank's own batch.

All ranks stop together. This module writes parity.jsonl and the field `parity` of engine.json; the
comparison itself is in comparison.py.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from ortlaunch.errors import EngineError, ParityError
from ortlaunch.json_types import Json
from ortlaunch.recipe.rules.parity import Compared, compared_steps
from ortlaunch.run_folder.engine_report import Parity
from ortlaunch.run_folder.folder import (
    RunDir,
    json_text,
    write_json_atomically,
    write_text_atomically,
)
from ortlaunch.run_folder.lines import read_json_lines
from ortlaunch.run_folder.records import ParityLine, as_json
from ortlaunch.worker.engine.allocator import give_back_freed_memory
from ortlaunch.worker.engine.comparison import compare_evaluation, compare_with_draws, dropouts
from ortlaunch.worker.engine.differences import Comparison, Difference
from ortlaunch.worker.engine.engine import TrainingEngine
from ortlaunch.worker.model.precision import narrow_dtype_of
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.session import Session

Record = Json
# Parameters that are named at most.
_SHOWN = 5
# What a line of an earlier start must have, to count in the summary.
_COMPARED = ("step", "loss_difference", "gradient_difference", "worst", "passed")
_ADVICE = (
    "Training ends here. If the engine is wrong, use engine.name=inductor or eager; if this is "
    "rounding, raise engine.parity_tolerance"
)
_OFF = "; engine.parity_steps=0 trains without a comparison"


class ParitySteps:
    """The compared steps of a run, from step 0 on; `with_table` also prints a table at the end."""

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
        # `why` is set if the comparison was not requested, but chosen by `auto`.
        steps, self.why = chosen(session)
        self.end = min(steps, recipe.train.steps)
        self.tolerance = recipe.engine.parity_tolerance or recipe.format.tolerance
        self.dropouts = len(dropouts(engine.plain))
        self.lowered = recipe.engine.matmul_precision != "highest"
        self.module: Any = None
        self.replayed: Any = None
        self.records = _records_until(run, first_step, session.group)
        # The requested engine fell back to eager, which the recipe allows.
        if is_plain(engine):
            self._leave_out("plain PyTorch itself runs")
        elif self.records:
            engine.record.parity = self._summary()

    def check(self, step: int) -> None:
        """Compare the first micro batch of `step` (from 0), if the step is chosen (collective).

        Raises:
            ParityError: a rank is above the tolerance; every rank raises the same.
            EngineError: a rank could not compare.
        """
        if step >= self.end:
            return
        began = time.perf_counter()
        records = self.group.gather(self.compared(step))
        failed = next((record for record in records if "error" in record), None)
        # An automatic comparison that fails does not end the run.
        if failed and self.why:
            self._leave_out(failed["error"])
            return
        if failed:
            raise EngineError(
                f"engine.parity_steps: rank {failed['rank']} could not compare with plain PyTorch: "
                f"{failed['error']}"
                f"{'; leave engine.parity_steps out' if failed.get('random') else ''}"
            )
        record = {**_worst(records), "seconds": round(time.perf_counter() - began, 3)}
        self.records.append(record)
        self.engine.record.parity = self._summary()
        if self.group.rank == 0:
            # Rewritten whole: lines of steps after the resumed checkpoint disappear.
            write_text_atomically(
                self.run.parity, "".join(json_text(each) + "\n" for each in self.records)
            )
            write_json_atomically(self.run.engine, self.engine.report().to_json())
        if not record["passed"]:
            raise ParityError(self._described(record))
        if record.get("not_judged"):
            line = f"parity, step {record['step']}: not judged: {record['not_judged']}"
        else:
            line = self._automatic(record) if self.why else _line(record)
        self.group.print_once(line)
        if step + 1 == self.end:
            self._release()
            if not self.why:
                self.group.print_once(self._verdict())

    def _leave_out(self, why: str) -> None:
        self.end = 0
        self._release()
        self.engine.record.parity = Parity("not compared", why)
        self.group.print_once(f"parity: not compared: {why}")

    def _release(self) -> None:
        """Free the graphs of the comparison, which training does not use."""
        self.module = self.replayed = None
        # An ORTModule is part of reference cycles.
        gc.collect()
        give_back_freed_memory()

    def compared(self, step: int) -> Record:
        """Return this rank's record of the step, or the error that prevented it."""
        engine = self.engine
        recipe = self.recipe
        try:
            batch = engine.to_device(self.batches.micro_batch(step, 0, self.group.rank))
            # The comparison's passes and compilations do not belong in the counts of engine.json.
            with engine.uncounted(compiled=bool(self.dropouts) or self.lowered):
                found = compare_with_draws(
                    engine.plain,
                    self._module(),
                    batch,
                    self._replaying if engine.record.engine.used == "ort" else None,
                    precision=recipe.precision,
                    autocast=recipe.zero is None,
                    tolerance=self.tolerance,
                )
                if step + 1 == self.end and self._evaluates():
                    dtype = narrow_dtype_of(recipe.precision) if recipe.zero is None else None
                    losses = compare_evaluation(engine.plain, engine.eval_module, batch, dtype)
                    found = found._replace(evaluation=losses)
        # Any exception is gathered, because the other ranks are waiting.
        except Exception as error:
            told = str(error) or type(error).__name__
            random = isinstance(error, EngineError)
            return {"rank": self.group.rank, "error": told, "random": random}
        return self._record(step + 1, found)

    def _evaluates(self) -> bool:
        """Return whether the run evaluates on the engine, in the precision of the comparison."""
        own = self.recipe.model.traits.wrapper or self.lowered
        return self.recipe.data.evaluation is not None and not own

    def _module(self) -> Any:
        """Return the engine's module without dropout.

        It is the run's own module if that has no dropout, else one that is exported for the
        comparison.
        """
        if self.module is None:
            self.module = self.engine.to_compare()
        return self.module

    def _replaying(self, model: Any) -> Any:
        """Return the engine's module of a model with given random numbers; it is exported once."""
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
            evaluation_difference=found.evaluation_difference if found.evaluation else None,
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
        """Return the record for engine.json; its parameters are those of the worst step."""
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
            verdict="failed"
            if not all(record["passed"] for record in self.records)
            else "passed"
            if _judged(self.records)
            else "not compared",
        )

    def _described(self, record: Record) -> str:
        used = self.engine.record.engine.used
        return (
            f"engine {used} and plain PyTorch differ by more than {self.tolerance:g} "
            f"in step {record['step']}, on the same weights and batch (rank {record['rank']})\n"
            f"loss: {record['loss']:.6g} on {used}, {record['reference_loss']:.6g} in PyTorch\n"
            f"{_of_evaluation(record)}"
            f"{table(record, used)}{_not_judged(record)}\n{self._suspect()}{_ADVICE}"
            f"{_OFF if self.why else ''}"
        )

    def _suspect(self) -> str:
        """Return a line that names the user's function on the graph, if there is one."""
        function = self.recipe.engine.postprocess
        return (
            f"engine.postprocess={function} changed the graph that ran, and plain PyTorch has no "
            "such change; correct the function, or leave it out\n"
            if function
            else ""
        )

    def _automatic(self, record: Record) -> str:
        """Return the line for a comparison that was not requested."""
        return (
            f"parity: step 1 in plain PyTorch: loss within {record['loss_difference']:.2g}, "
            f"gradients within {record['gradient_difference']:.2g}; "
            f"took {record['seconds']:.1f} s, once{_rounding(record)}"
        )

    def _verdict(self) -> str:
        """Return the last line of a passed comparison, after a table if requested."""
        worst = _worst(self.records)
        shown = f"{table(worst, self.engine.record.engine.used)}\n" if self.with_table else ""
        how = ", both compared at matmul_precision highest" if self.lowered else ""
        judged = len(_judged(self.records))
        if not judged:
            text = f"parity: no step could be judged; see {self.run.parity}"
            if self.with_table:
                raise EngineError(text)
            return text
        return (
            f"{shown}parity: passed: {judged} steps within {self.tolerance:g}{how}; "
            f"see {self.run.parity}"
        )


def is_plain(engine: TrainingEngine) -> bool:
    """Return whether plain PyTorch itself runs, so that there is nothing to compare."""
    return engine.record.engine.used == "eager" and not engine.record.chunked_loss.rows


def parity_steps(session: Session, first_step: int) -> ParitySteps | None:
    """Return the comparison of a training's first steps, or None.

    engine.json has the reason if `auto` leaves the comparison out.
    """
    steps, why = chosen(session)
    if steps:
        return ParitySteps(session, first_step)
    if why:
        session.engine.record.parity = Parity("not compared", why)
    return None


def chosen(session: Session) -> Compared:
    """Return how many steps are compared, by the recipe and the built model's own config."""
    config = getattr(getattr(session.engine.plain, "model", None), "config", None)
    return compared_steps(session.recipe, getattr(config, "model_type", None))


def table(record: Record, used: str) -> str:
    """Return lines with the gradients that differ most."""
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
        f"parity, step {record['step']}: loss within {record['loss_difference']:.2g}, "
        f"gradients within {record['gradient_difference']:.2g} ({name}); "
        f"tolerance {record['tolerance']:g}{_rounding(record)}"
    )


def _worst(records: list[Record]) -> Record:
    def badness(record: Record) -> tuple[bool, float]:
        differences = (
            record["loss_difference"],
            record["gradient_difference"],
            record.get("state_difference", 0.0),
            record.get("evaluation_difference") or 0.0,
        )
        # A failed comparison is worse than any passed one, whatever its differences are.
        return not record["passed"], max(map(float, differences))

    return max(records, key=badness)


def _largest_of(found: Comparison, tolerance: float) -> list[Difference]:
    """Return the gradients that differ most.

    Weights and buffers that a pass changed come first, if the difference is no rounding.
    """
    state = [
        each._replace(name=f"{each.name} (changed by the pass)")
        for each in found.state
        if each.value > tolerance and not each.rounding
    ]
    return [*state[:_SHOWN], *(each for each in found.gradients if not each.rounding)][:_SHOWN]


def _of_evaluation(record: Record) -> str:
    difference = record.get("evaluation_difference")
    if difference is None:
        return ""
    return f"loss in evaluation: a relative difference of {float(difference):.2g}\n"


def _judged(records: list[Record]) -> list[Record]:
    return [record for record in records if not record.get("not_judged")]


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
    # LossModule adds the prefix; the rest is the model's own name.
    return name.removeprefix("model.")


def _records_until(run: RunDir, step: int, group: DistributedContext) -> list[Record]:
    """Return the comparisons of earlier starts up to the checkpoint that the run resumes from."""
    lines = read_json_lines(run.parity, *_COMPARED)
    group.print_once(*lines.unreadable)
    return [record for record in lines.values if record["step"] <= step]
