"""One variant of `ortlaunch bench`: built as by `train`, it runs its turns and sleeps in between.

Orders are in the run folder, and rank 0 writes results there, one JSON line each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from ortlaunch.base.json_types import Json
from ortlaunch.run_folder.folder import (
    RunDir,
    json_text,
    read_json_or_raise_damaged,
    write_json_atomically,
)
from ortlaunch.worker.engine.comparison import compare_passes_replaying_random_numbers_if_drawn
from ortlaunch.worker.engine.differences import LEAST_LOSS, Comparison
from ortlaunch.worker.engine.flops import (
    measure_peak_flops_per_second,
    vendor_flops_per_second_or_none,
    wait_for_device,
)
from ortlaunch.worker.model.matmul_precision import use_matmul_precision
from ortlaunch.worker.model.precision import dtype_of
from ortlaunch.worker.model.returned_values import loss_of_engine_output
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.session import Session
from ortlaunch.worker.supervision.progress import print_wrapped_to_terminal_width
from ortlaunch.worker.tasks.train import TrainState, train_step
from ortlaunch.worker.training.parity_steps import is_plain_pytorch
from ortlaunch.worker.training.profile import StepProfiler
from ortlaunch.worker.training.summary import engine_plan_lines

# The pause between two reads of the order.
_POLL_SECONDS = 0.02


def run(session: Session) -> None:
    """Warm up, then execute orders until the order to leave."""
    with session.read_batches_ahead():
        _warm_up_and_execute_bench_orders(session)


def _warm_up_and_execute_bench_orders(session: Session) -> None:
    folder = session.run
    group = session.group
    engine = session.engine
    bench_request = read_json_or_raise_damaged(folder.bench)
    assert engine.memory_use is not None
    if group.rank == 0:
        print_wrapped_to_terminal_width(
            *engine_plan_lines(engine.engine_report_so_far()), *engine.notes
        )
    measured_training = MeasuredTraining(session)
    measured_training.train_steps_and_time_each(1)
    first_step = {
        # The control side wrote the time of the launch.
        "since_launch": time.time() - bench_request["launched"],
        "since_model": time.perf_counter() - session.model_built_at,
    }
    warm_up = measured_training.train_steps_and_time_each(bench_request["warm_up_steps"])
    measured_training.set_zero_learning_rate()
    ready = {"order": "ready", "first_step": first_step, "step": min(warm_up)}
    _append_result_on_rank_0(
        folder, group, {**ready, **_reset_peak_memory_and_report_engine_and_flops(session)}
    )
    sleep_start = time.perf_counter(), time.process_time()
    for order in _poll_new_orders_until_leave(folder):
        time_waited = {
            "seconds": time.perf_counter() - sleep_start[0],
            "processor_seconds": time.process_time() - sleep_start[1],
        }
        if order["do"] == "compare":
            order_result: Json = {
                "parity": {
                    **compare_and_gather_worst_parity_verdict_json(measured_training.session),
                    **loss_change_from_highest_matmul_precision(measured_training.session),
                }
            }
            # At the end, because the profiler costs time and memory.
            profiler = StepProfiler(session, 1)
            for step in profiler.steps:
                with profiler.time_or_profile_step(step):
                    measured_training.train_steps_and_time_each(1)
        else:
            order_result = measured_training.train_and_measure_seconds_and_tokens_of_steps(
                order["steps"]
            )
        # Gathered, so that rank 0 reports an order only after all ranks have executed it.
        memory = group.gather(engine.memory_use.peak_bytes())
        _append_result_on_rank_0(
            folder,
            group,
            {"order": order["number"], "waited": time_waited, "memory": memory, **order_result},
        )
        sleep_start = time.perf_counter(), time.process_time()
    if group.rank == 0:
        write_json_atomically(folder.engine, engine.engine_report_so_far().to_json())


class MeasuredTraining:
    """The training that is measured, with the same steps as `train`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.state = TrainState()

    def train_steps_and_time_each(self, step_count: int) -> list[float]:
        """Run `step_count` optimizer steps; return the seconds of each, with all work of the device."""
        step_seconds = []
        for _ in range(step_count):
            step_start = time.perf_counter()
            train_step(self.session, self.state)
            wait_for_device(self.session.group.device)
            step_seconds.append(time.perf_counter() - step_start)
            # A bench may be longer than the training, whose schedule ends: start again then.
            self.state.step = (self.state.step + 1) % self.session.recipe.train.steps
        return step_seconds

    def set_zero_learning_rate(self) -> None:
        """Use a learning rate of 0 from now on, with the same work per step."""
        # The weights must stay near their start in a bench of any length. A model that has learned
        # its few batches by heart has gradients of rounding errors, which differ between engines.
        zero_rate_optimizer = self.session.recipe.optimizer.model_copy(
            update={"learning_rate": 0.0}
        )
        self.session = replace(
            self.session,
            recipe=self.session.recipe.model_copy(update={"optimizer": zero_rate_optimizer}),
        )

    def train_and_measure_seconds_and_tokens_of_steps(self, step_count: int) -> Json:
        """Measure `step_count` steps; return start, end, seconds, and tokens and padding of all ranks."""
        # One step without measurement, which fills the caches again.
        self.train_steps_and_time_each(1)
        self.session.group.barrier()
        start_time = time.time()
        tokens_before = self.session.batches.tokens
        step_seconds = self.train_steps_and_time_each(step_count)
        end_time = time.time()
        rank_tokens = self.session.batches.tokens.difference_from_earlier(tokens_before)
        tokens = [
            int(sum(rank_counts))
            for rank_counts in zip(*self.session.group.data_parallel.gather_numbers([*rank_tokens]))
        ]
        return {"begun": start_time, "ended": end_time, "seconds": step_seconds, "tokens": tokens}


def _poll_new_orders_until_leave(run: RunDir) -> Iterator[Json]:
    # Every rank polls the file itself. Waiting in a collective would run into its timeout, and
    # would keep a GPU busy.
    last_number = 0
    while True:
        order = read_json_or_raise_damaged(run.order) if run.order.exists() else {"number": 0}
        if order["number"] <= last_number:
            time.sleep(_POLL_SECONDS)
            continue
        if order["do"] == "leave":
            return
        last_number = order["number"]
        yield order


def _append_result_on_rank_0(run: RunDir, group: DistributedContext, result_record: Json) -> None:
    if group.rank == 0:
        with run.results.open("a", encoding="utf-8") as file:
            file.write(json_text(result_record) + "\n")


def _reset_peak_memory_and_report_engine_and_flops(session: Session) -> Json:
    group = session.group
    engine = session.engine
    dtype = dtype_of(session.recipe.precision)
    peak = None
    # The rate of a CPU changes with every other process, so that it is not measured.
    if group.device.type == "cuda":
        peak = (
            measure_peak_flops_per_second(group.device, dtype) if engine.flops_per_token else None
        )
        # The matrices of the measurement are large, and do not belong to the variant.
        torch.cuda.reset_peak_memory_stats(group.device)
    return {
        "engine": engine.engine_report_so_far().to_json(),
        "flops_per_token": engine.flops_per_token,
        "peak_flops": peak,
        "vendor_peak_flops": vendor_flops_per_second_or_none(group.device, dtype),
    }


def compare_and_gather_worst_parity_verdict_json(session: Session) -> Json:
    """Compare loss and gradients with plain PyTorch; return the worst verdict (collective)."""
    if is_plain_pytorch(session.engine):
        return {"verdict": "reference"}
    if session.group.mesh is not None:
        return {
            "verdict": "not compared",
            "why": "with parallel no rank has all weights for the comparison",
        }
    try:
        rank_verdict = _loss_and_gradient_parity_json(
            _compare_first_micro_batch_with_pytorch(session),
            session.recipe.engine.parity_tolerance or session.recipe.format.tolerance,
        )
    # An engine may raise any exception: this is a verdict, too.
    except Exception as error:
        rank_verdict = {"verdict": "not compared", "why": f"{type(error).__name__}: {error}"}
    return max(session.group.gather(rank_verdict), key=_largest_difference_or_infinity)


def loss_change_from_highest_matmul_precision(session: Session) -> dict[str, float]:
    """Return the relative change of a loss by matmul_precision, without dropout (collective).

    It is the largest of all ranks. At precision highest the result is empty.
    """
    engine = session.engine
    if session.recipe.engine.matmul_precision == "highest":
        return {}
    batch = engine.to_device(
        session.batches.read_micro_batch_and_count_tokens(0, 0, session.group.data_parallel.rank)
    )
    module = engine.eval_module.eval()
    with engine.exclude_passes_from_counts(with_compilations=True), torch.no_grad():
        loss = float(loss_of_engine_output(module(**batch)))
        with use_matmul_precision("highest"):
            exact_loss = float(
                loss_of_engine_output(
                    (engine.plain if engine.keeps_build_precision else module)(**batch)
                )
            )
    module.train()
    relative_change = abs(loss - exact_loss) / max(abs(exact_loss), LEAST_LOSS)
    return {"loss_from_highest": max(session.group.gather(relative_change))}


def _largest_difference_or_infinity(verdict: Json) -> float:
    # A verdict without a figure is the worst: not compared, or not finite.
    largest = verdict.get("largest")
    return math.inf if largest is None else float(largest)


def _compare_first_micro_batch_with_pytorch(session: Session) -> Comparison:
    engine = session.engine
    batch = engine.to_device(
        session.batches.read_micro_batch_and_count_tokens(0, 0, session.group.data_parallel.rank)
    )
    with engine.exclude_passes_from_counts(with_compilations=True):
        module = engine.module_without_dropout_for_comparison()
        autocast = session.plan.deepspeed is None
        return compare_passes_replaying_random_numbers_if_drawn(
            engine.plain,
            module,
            batch,
            engine.wrap_another_model if engine.record.engine.used == "ort" else None,
            precision=session.recipe.precision,
            uses_autocast=autocast,
            tolerance=session.recipe.engine.parity_tolerance,
        )


def _loss_and_gradient_parity_json(comparison: Comparison, tolerance: float) -> Json:
    verdict = {
        "verdict": "passes" if comparison.largest_difference <= tolerance else "differs",
        # null if a value is not finite, because JSON has no name for such values.
        "largest": comparison.largest_difference
        if math.isfinite(comparison.largest_difference)
        else None,
        "loss": comparison.loss_difference if math.isfinite(comparison.loss_difference) else None,
        "gradient": comparison.gradient_difference
        if math.isfinite(comparison.gradient_difference)
        else None,
        "parameter": comparison.gradients[0].name.removeprefix("model.")
        if comparison.gradients
        else None,
        "tolerance": tolerance,
    }
    if comparison.largest_difference > tolerance:
        verdict["why"] = (
            f"loss {comparison.loss:.6g} against {comparison.reference_loss:.6g}, largest difference of a "
            f"gradient {comparison.gradient_difference:.1e} at {verdict['parameter']}; "
            f"{tolerance:g} is allowed"
        )
    return verdict
