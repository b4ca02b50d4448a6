"""One variant of `ortlaunch bench`: built as by `train`, it runs its turns and sleeps in between.

Orders are in the run folder, and rank 0 writes results there, one JSON line each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from ortlaunch.json_types import Json
from ortlaunch.run_folder.folder import RunDir, json_text, read_own_json, write_json_atomically
from ortlaunch.worker.engine.comparison import compare_with_draws
from ortlaunch.worker.engine.differences import LEAST_LOSS, Comparison
from ortlaunch.worker.engine.flops import measured_peak_flops, wait_for
from ortlaunch.worker.model.matmul_precision import matmul_precision
from ortlaunch.worker.model.own_numbers import loss_in
from ortlaunch.worker.model.precision import dtype_of
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.progress import print_wrapped
from ortlaunch.worker.tasks.train import TrainState, train_step
from ortlaunch.worker.training.parity_steps import is_plain
from ortlaunch.worker.training.profile import StepProfiler
from ortlaunch.worker.training.summary import plan_lines

# The pause between two reads of the order.
_POLL_SECONDS = 0.02


def run(session: Session) -> None:
    """Warm up, then execute orders until the order to leave."""
    with session.reading_ahead():
        _live(session)


def _live(session: Session) -> None:
    folder = session.run
    group = session.group
    engine = session.engine
    asked = read_own_json(folder.bench)
    assert engine.memory is not None
    if group.rank == 0:
        print_wrapped(*plan_lines(engine.report()), *engine.notes)
    life = MeasuredTraining(session)
    life.steps(1)
    first = {
        # The control side wrote the time of the launch.
        "since_launch": time.time() - asked["launched"],
        "since_model": time.perf_counter() - session.model_built_at,
    }
    warm_up = life.steps(asked["warm_up_steps"])
    life.zero_learning_rate()
    ready = {"order": "ready", "first_step": first, "step": min(warm_up)}
    _write(folder, group, {**ready, **_facts(session)})
    slept = time.perf_counter(), time.process_time()
    for order in _orders(folder):
        waited = {
            "seconds": time.perf_counter() - slept[0],
            "processor_seconds": time.process_time() - slept[1],
        }
        if order["do"] == "compare":
            found: Json = {"parity": {**parity(life.session), **loss_from_highest(life.session)}}
            # At the end, because the profiler costs time and memory.
            profiler = StepProfiler(session, 1)
            for number in profiler.steps:
                with profiler.step(number):
                    life.steps(1)
        else:
            found = life.turn(order["steps"])
        # Gathered, so that rank 0 reports an order only after all ranks have executed it.
        memory = group.gather(engine.memory.peak())
        _write(
            folder, group, {"order": order["number"], "waited": waited, "memory": memory, **found}
        )
        slept = time.perf_counter(), time.process_time()
    if group.rank == 0:
        write_json_atomically(folder.engine, engine.report().to_json())


class MeasuredTraining:
    """The training that is measured, with the same steps as `train`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.state = TrainState()

    def steps(self, count: int) -> list[float]:
        """Run `count` optimizer steps; return the seconds of each, with all work of the device."""
        took = []
        for _ in range(count):
            begun = time.perf_counter()
            train_step(self.session, self.state)
            wait_for(self.session.group.device)
            took.append(time.perf_counter() - begun)
            # A bench may be longer than the training, whose schedule ends: start again then.
            self.state.step = (self.state.step + 1) % self.session.recipe.train.steps
        return took

    def zero_learning_rate(self) -> None:
        """Use a learning rate of 0 from now on, with the same work per step."""
        # The weights must stay near their start in a bench of any length. A model that has learned
        # its few batches by heart has gradients of rounding errors, which differ between engines.
        still = self.session.recipe.optimizer.model_copy(update={"learning_rate": 0.0})
        self.session = replace(
            self.session, recipe=self.session.recipe.model_copy(update={"optimizer": still})
        )

    def turn(self, count: int) -> Json:
        """Measure `count` steps; return start, end, seconds, and tokens and padding of all ranks."""
        # One step without measurement, which fills the caches again.
        self.steps(1)
        self.session.group.barrier()
        begun = time.time()
        before = self.session.batches.tokens
        took = self.steps(count)
        ended = time.time()
        mine = self.session.batches.tokens.since(before)
        tokens = [int(sum(each)) for each in zip(*self.session.group.gather_numbers([*mine]))]
        return {"begun": begun, "ended": ended, "seconds": took, "tokens": tokens}


def _orders(run: RunDir) -> Iterator[Json]:
    """Yield each order once, until the order to leave."""
    # Every rank polls the file itself. Waiting in a collective would run into its timeout, and
    # would keep a GPU busy.
    last = 0
    while True:
        order = read_own_json(run.order) if run.order.exists() else {"number": 0}
        if order["number"] <= last:
            time.sleep(_POLL_SECONDS)
            continue
        if order["do"] == "leave":
            return
        last = order["number"]
        yield order


def _write(run: RunDir, group: DistributedContext, record: Json) -> None:
    if group.rank == 0:
        with run.results.open("a", encoding="utf-8") as file:
            file.write(json_text(record) + "\n")


def _facts(session: Session) -> Json:
    group = session.group
    engine = session.engine
    dtype = dtype_of(session.recipe.precision)
    peak = None
    # The rate of a CPU changes with every other process, so that it is not measured.
    if group.device.type == "cuda":
        peak = measured_peak_flops(group.device, dtype) if engine.flops_per_token else None
        # The matrices of the measurement are large, and do not belong to the variant.
        torch.cuda.reset_peak_memory_stats(group.device)
    return {
        "engine": engine.report().to_json(),
        "flops_per_token": engine.flops_per_token,
        "peak_flops": peak,
    }


def parity(session: Session) -> Json:
    """Compare loss and gradients with plain PyTorch; return the worst verdict (collective)."""
    if is_plain(session.engine):
        return {"verdict": "reference"}
    try:
        mine = _as_json(
            _compared(session),
            session.recipe.engine.parity_tolerance or session.recipe.format.tolerance,
        )
    # An engine may raise any exception: this is a verdict, too.
    except Exception as error:
        mine = {"verdict": "not compared", "why": f"{type(error).__name__}: {error}"}
    verdicts = session.group.gather(mine)
    return max(verdicts, key=_badness)


def loss_from_highest(session: Session) -> dict[str, float]:
    """Return the relative change of a loss by matmul_precision, without dropout (collective).

    It is the largest of all ranks. At precision highest the result is empty.
    """
    engine = session.engine
    if session.recipe.engine.matmul_precision == "highest":
        return {}
    batch = engine.to_device(session.batches.micro_batch(0, 0, session.group.rank))
    module = engine.eval_module.eval()
    with engine.uncounted(compiled=True), torch.no_grad():
        ours = float(loss_in(module(**batch)))
        with matmul_precision("highest"):
            exact = float(loss_in((engine.plain if engine.own_precision else module)(**batch)))
    module.train()
    mine = abs(ours - exact) / max(abs(exact), LEAST_LOSS)
    return {"loss_from_highest": max(session.group.gather(mine))}


def _badness(verdict: Json) -> float:
    # A verdict without a figure is the worst: not compared, or not finite.
    largest = verdict.get("largest")
    return math.inf if largest is None else float(largest)


def _compared(session: Session) -> Comparison:
    engine = session.engine
    batch = engine.to_device(session.batches.micro_batch(0, 0, session.group.rank))
    with engine.uncounted(compiled=True):
        module = engine.to_compare()
        autocast = session.plan.deepspeed is None
        return compare_with_draws(
            engine.plain,
            module,
            batch,
            engine.another if engine.record.engine.used == "ort" else None,
            precision=session.recipe.precision,
            autocast=autocast,
            tolerance=session.recipe.engine.parity_tolerance,
        )


def _as_json(found: Comparison, tolerance: float) -> Json:
    told = {
        "verdict": "passes" if found.largest <= tolerance else "differs",
        # null if a value is not finite, because JSON has no name for such values.
        "largest": found.largest if math.isfinite(found.largest) else None,
        "loss": found.loss_difference if math.isfinite(found.loss_difference) else None,
        "gradient": found.gradient_difference if math.isfinite(found.gradient_difference) else None,
        "parameter": found.gradients[0].name.removeprefix("model.") if found.gradients else None,
        "tolerance": tolerance,
    }
    if found.largest > tolerance:
        told["why"] = (
            f"loss {found.loss:.6g} against {found.reference_loss:.6g}, largest difference of a "
            f"gradient {found.gradient_difference:.1e} at {told['parameter']}; "
            f"{tolerance:g} is allowed"
        )
    return told
