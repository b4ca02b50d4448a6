"""One variant of `ortlaunch bench`: built as `train` builds it, then it takes its turns and sleeps in between.

Orders come from the run folder and results go back there, a JSON line each, by rank 0. Every rank reads the orders
itself: waiting in a collective would run into its timeout, and on a GPU keep the card busy.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from ortlaunch.json_types import Json
from ortlaunch.run_folder.folder import RunDir, json_text, read_json, write_json
from ortlaunch.worker.engine.comparison import compare_with_draws
from ortlaunch.worker.engine.differences import LEAST_LOSS, Comparison
from ortlaunch.worker.engine.flops import measured_peak_flops, wait_for
from ortlaunch.worker.engine.memory_limits import status
from ortlaunch.worker.model.matmul_precision import matmul_precision
from ortlaunch.worker.model.own_numbers import loss_in
from ortlaunch.worker.model.precision import dtype_of
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.session import Session
from ortlaunch.worker.tasks.train import TrainState, train_step
from ortlaunch.worker.training.parity_steps import is_plain
from ortlaunch.worker.training.summary import plan_lines

_POLL_SECONDS = 0.02


def run(session: Session) -> None:
    """Warm up, then obey orders until the one to leave."""
    with session.reading_ahead():
        _live(session)


def _live(session: Session) -> None:
    folder = session.run
    group = session.group
    engine = session.engine
    asked = read_json(folder.bench)
    if group.rank == 0:
        print(*plan_lines(engine.report()), *engine.notes, sep="\n", flush=True)
    life = MeasuredTraining(session)
    life.steps(1)
    first = {
        "since_launch": time.time() - asked["launched"],
        "since_model": time.perf_counter() - session.model_built_at,
    }
    life.steps(asked["warm_up_steps"])
    life.zero_learning_rate()
    _write(folder, group, {"order": "ready", "first_step": first, **_facts(session)})
    slept = time.perf_counter(), time.process_time()
    for order in _orders(folder):
        waited = {
            "seconds": time.perf_counter() - slept[0],
            "processor_seconds": time.process_time() - slept[1],
        }
        if order["do"] == "compare":
            found: Json = {"parity": {**parity(life.session), **loss_from_highest(life.session)}}
        else:
            found = life.turn(order["steps"])
        # Gathered, so that rank 0 tells of no order that another rank has not carried out.
        memory = [int(text) for text in group.gather(str(peak_memory(group.device)))]
        _write(
            folder, group, {"order": order["number"], "waited": waited, "memory": memory, **found}
        )
        slept = time.perf_counter(), time.process_time()
    if group.rank == 0:
        write_json(folder.engine, engine.report().to_json())


class MeasuredTraining:
    """The training that is measured: the same steps as `train` takes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.state = TrainState()

    def steps(self, count: int) -> list[float]:
        """Wall-clock of each of `count` optimizer steps, to the end of what the device does."""
        took = []
        for _ in range(count):
            begun = time.perf_counter()
            train_step(self.session, self.state)
            wait_for(self.session.group.device)
            took.append(time.perf_counter() - begun)
            # A bench may be longer than the training, whose schedule ends.
            self.state.step = (self.state.step + 1) % self.session.recipe.train.steps
        return took

    def zero_learning_rate(self) -> None:
        """From now on the same work with learning rate 0.

        Weights stay near where training begins, however long the bench: a model that has learned its few batches by
        heart has gradients of rounding errors, which no two engines share.
        """
        still = self.session.recipe.optimizer.model_copy(update={"learning_rate": 0.0})
        self.session = replace(
            self.session, recipe=self.session.recipe.model_copy(update={"optimizer": still})
        )

    def turn(self, count: int) -> Json:
        """`count` measured steps, after one that brings this variant back into the caches."""
        self.steps(1)
        self.session.group.barrier()
        begun = time.time()
        took = self.steps(count)
        return {"begun": begun, "ended": time.time(), "seconds": took}


def _orders(run: RunDir) -> Iterator[Json]:
    """Each order once; ends with the one to leave. Between two looks the rank sleeps."""
    last = 0
    while True:
        order = read_json(run.order) if run.order.exists() else {"number": 0}
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
    recipe = session.recipe
    group = session.group
    engine = session.engine
    dtype = dtype_of(recipe.precision)
    peak = None
    if group.device.type == "cuda":  # a CPU's changes with every other process
        peak = measured_peak_flops(group.device, dtype) if engine.flops_per_token else None
        torch.cuda.reset_peak_memory_stats(group.device)  # the product's own matrices are large
    return {
        "engine": engine.report().to_json(),
        "flops_per_token": engine.flops_per_token,
        "peak_flops": peak,
    }


def peak_memory(device: torch.device) -> int:
    """Most bytes that this rank has held: of the GPU by torch's allocator, else resident of the whole process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return status("VmHWM")


def parity(session: Session) -> Json:
    """The verdict on this variant, the worst of its ranks: loss and gradients against plain PyTorch (collective)."""
    if is_plain(session.engine):
        return {"verdict": "reference"}
    try:
        mine = _told(
            _compared(session),
            session.recipe.engine.parity_tolerance or session.recipe.format.tolerance,
        )
    except Exception as error:  # whatever an engine raises is a verdict too
        mine = {"verdict": "not compared", "why": f"{type(error).__name__}: {error}"}
    verdicts = [json.loads(text) for text in session.group.gather(json.dumps(mine))]
    return max(verdicts, key=_badness)


def loss_from_highest(session: Session) -> dict[str, float]:
    """How far matmul_precision moves the loss of a batch without dropout, relative; the worst rank's (collective)."""
    engine = session.engine
    if session.recipe.engine.matmul_precision == "highest":
        return {}
    batch = engine.take(session.batches.micro_batch(0, 0, session.group.rank))
    module = engine.eval_module.eval()
    with engine.uncounted(compiled=True), torch.no_grad():
        ours = float(loss_in(module(**batch)))
        with matmul_precision("highest"):
            exact = float(loss_in((engine.plain if engine.own_precision else module)(**batch)))
    module.train()
    mine = abs(ours - exact) / max(abs(exact), LEAST_LOSS)
    return {"loss_from_highest": max(map(float, session.group.gather(str(mine))))}


def _badness(verdict: Json) -> float:
    largest = verdict.get("largest")
    return math.inf if largest is None else float(largest)


def _compared(session: Session) -> Comparison:
    recipe = session.recipe
    engine = session.engine
    batch = engine.take(session.batches.micro_batch(0, 0, session.group.rank))
    with engine.uncounted(compiled=True):
        module = engine.to_compare()
        autocast = session.plan.deepspeed is None
        return compare_with_draws(
            engine.plain,
            module,
            batch,
            engine.another if engine.record.engine.used == "ort" else None,
            precision=recipe.precision,
            autocast=autocast,
            tolerance=recipe.engine.parity_tolerance,
        )


def _told(found: Comparison, tolerance: float) -> Json:
    told = {
        "verdict": "passes" if found.largest <= tolerance else "differs",
        # null where a number is not finite, for which JSON has no name
        "largest": found.largest if math.isfinite(found.largest) else None,
        "loss": found.loss_difference if math.isfinite(found.loss_difference) else None,
        "gradient": found.gradient_difference if math.isfinite(found.gradient_difference) else None,
        "parameter": found.gradients[0].name.removeprefix("model.") if found.gradients else None,
        "tolerance": tolerance,
    }
    if found.largest > tolerance:
        told["why"] = (
            f"loss {found.loss:.6g} against {found.reference_loss:.6g}, largest difference of a gradient "
            f"{found.gradient_difference:.1e} at {told['parameter']}; {tolerance:g} is allowed"
        )
    return told
