"""Variants of one recipe measured side by side, in turns, on the machine that trains them.

Every variant is a job of its own, started as `train` starts it. They take turns, A B C A B C ...,
so that a busy moment of the machine affects all of them; between its turns a job sleeps. The
control side never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from ortlaunch.base import machine
from ortlaunch.base.errors import InputError, LaunchError, OrtlaunchError, PlanError
from ortlaunch.base.json_types import Json
from ortlaunch.base.process import signals_to_handle
from ortlaunch.base.units import human_bytes
from ortlaunch.bench.report import shorten_reason, variant_result_rows_with_ratio_and_mfu
from ortlaunch.bench.variant_job import OnReady, VariantFailedError, VariantJob
from ortlaunch.bench.variants import (
    Variant,
    resolve_variant_or_record_refusal,
    variants_of_engines_and_varied_keys,
)
from ortlaunch.resolve import provenance
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run_folder.folder import RunDir

# Load average for each core above which the machine counts as busy.
_BUSY_LOAD_PER_CORE = 0.5
# Share of its waiting time that a job may spend on a processor.
_SPINNING_SHARE = 0.2
PrintLine = Callable[[str], None]


class MeasurementLength(NamedTuple):
    """Length of a measurement: `rounds` turns of each variant, of `steps` optimizer steps."""

    rounds: int = 5
    steps: int = 4
    one_at_a_time: bool = False


class BenchStopped(OrtlaunchError):
    """The user stopped the bench with a signal."""

    def __init__(self, signal_number: int) -> None:
        # The shell's convention for a process that a signal ended.
        super().__init__(f"stopped by {signal.Signals(signal_number).name}", 128 + signal_number)


def resolve_variants_or_refuse_if_none_can_run(
    resolved_run: ResolvedRun, engine_names: Sequence[str], vary_options: Sequence[str]
) -> list[Variant]:
    """Return every variant, resolved or refused.

    Raises:
        InputError: all of them are refused.
    """
    if resolved_run.world.enclosing_rank is not None:
        raise PlanError(
            "bench starts its own ranks, and this process is already a rank of a launcher; "
            "start it outside, with the --launcher, --nproc-per-node or --hostfile of the "
            "training"
        )
    if resolved_run.recipe_file.recipe.batch.micro_size == "auto":
        raise PlanError(
            "batch.micro_size is auto, but variants are compared with one batch size; add "
            "batch.micro_size=NUMBER"
        )
    resolved_variants = [
        resolve_variant_or_record_refusal(variant, resolved_run)
        for variant in variants_of_engines_and_varied_keys(engine_names, vary_options)
    ]
    if all(variant.resolved_run is None for variant in resolved_variants):
        raise InputError(
            "\n".join(f"{variant.name}: {variant.refusal}" for variant in resolved_variants)
        )
    return resolved_variants


def create_or_reuse_bench_folder(requested_folder: Path | None, bench_name: str) -> Path:
    """Create `requested_folder`, which must be new or of an unfinished bench, or else bench/<name>-<time>."""
    folder = requested_folder or Path("bench") / f"{bench_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Two benches may begin in the same second.
    for path in (
        folder,
        *(
            Path(f"{folder}-{suffix_number}")
            for suffix_number in range(2, 1000)
            if requested_folder is None
        ),
    ):
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    # Empty, or of a bench that was cut short: bench.json is its last file.
    if folder.is_dir() and all(
        path.is_dir() and RunDir(path).has_only_run_files_and_no_checkpoints()
        for path in folder.iterdir()
    ):
        return folder
    raise PlanError(f"{folder}: exists already; give --out a new folder")


def measure_variants_and_build_report(
    resolved_run: ResolvedRun,
    prepared_variants: Sequence[Variant],
    measurement_length: MeasurementLength,
    bench_folder: Path,
    print_line: PrintLine,
    on_first_warm_up: OnReady = lambda _: None,
) -> Json:
    """Run the bench and return bench.json as plain values.

    Args:
        on_first_warm_up: called with each variant's job when it has warmed up for the first time; what it
            raises ends the bench.

    Raises:
        BenchStopped: by SIGINT, SIGTERM, SIGHUP or SIGUSR1; no job is left.
    """
    start_time = time.time()
    load_before = os.getloadavg()
    _watch_and_warn_of_busy_machine(print_line, load_before)
    variant_jobs = [
        VariantJob(
            bench_variant, RunDir(bench_folder / bench_variant.folder_name), on_first_warm_up
        )
        for bench_variant in prepared_variants
        if bench_variant.resolved_run is not None
    ]
    measurement_length = _measurement_length_one_at_a_time_if_memory_lacks(
        measurement_length, variant_jobs, print_line
    )
    for variant in prepared_variants:
        if variant.resolved_run is None:
            print_line(f"{variant.name}: refused: {shorten_reason(variant.refusal)}")
    with _raise_bench_stopped_on_signal():
        try:
            run_interleaved_rounds_then_compare_and_end(
                variant_jobs, measurement_length, print_line
            )
        finally:
            for variant_job in variant_jobs:
                variant_job.cancel_job()
    _warn_of_jobs_busy_while_waiting(variant_jobs, print_line)
    world = resolved_run.world
    return {
        "format": 1,
        "name": resolved_run.recipe_file.recipe.name,
        "recipe": str(resolved_run.command.recipe_path),
        "overrides": list(resolved_run.recipe_file.overrides),
        "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(start_time)),
        "seconds": round(time.time() - start_time, 1),
        **measurement_length._asdict(),
        "launcher": world.launcher,
        "device": world.device,
        "nodes": [list(node) for node in world.nodes],
        "hardware": machine.hardware_record(),
        "load": {"before": load_before, "after": os.getloadavg()},
        "environment": provenance.package_and_machine_versions_record(),
        "variants": variant_result_rows_with_ratio_and_mfu(prepared_variants, variant_jobs),
    }


def run_interleaved_rounds_then_compare_and_end(
    variant_jobs: Sequence[VariantJob], measurement_length: MeasurementLength, print_line: PrintLine
) -> None:
    """Warm all variants up, give each a turn `rounds` times, then compare; a failed one stays out."""
    for variant_job in variant_jobs if not measurement_length.one_at_a_time else ():
        _run_action_or_exclude_variant(
            variant_job, print_line, partial(_start_variant, variant_job, print_line)
        )
    for round_number in range(1, measurement_length.rounds + 1):
        for variant_job in variant_jobs:
            _run_action_or_exclude_variant(
                variant_job,
                print_line,
                partial(
                    _start_if_needed_and_train_one_measured_round,
                    variant_job,
                    measurement_length,
                    round_number == measurement_length.rounds,
                    print_line,
                ),
            )
        seconds_texts = (
            f"{job.variant.name} {sum(job.turns[-1]['seconds']) / measurement_length.steps:.4g}"
            for job in variant_jobs
            if job.is_measured
        )
        if text := ", ".join(seconds_texts):
            print_line(f"round {round_number}/{measurement_length.rounds}, s/step: {text}")
    for variant_job in variant_jobs if not measurement_length.one_at_a_time else ():
        _run_action_or_exclude_variant(
            variant_job, print_line, partial(_compare_and_end, variant_job)
        )


def _start_variant(variant_job: VariantJob, print_line: PrintLine) -> None:
    variant_job.start_job_await_warm_up_and_keep_first_answer()
    print_line(
        f"{variant_job.variant.name}: first step {variant_job.ready_answer['first_step']['since_launch']:.1f} s "
        "after its launch"
    )


def _start_if_needed_and_train_one_measured_round(
    variant_job: VariantJob,
    measurement_length: MeasurementLength,
    is_last_round: bool,
    print_line: PrintLine,
) -> None:
    if not variant_job.is_running:
        _start_variant(variant_job, print_line)
    variant_job.train_measured_steps(measurement_length.steps)
    # Only one job is in memory, so it is compared in its last turn and not at the end.
    if measurement_length.one_at_a_time and is_last_round:
        _compare_and_end(variant_job)
    elif measurement_length.one_at_a_time:
        variant_job.request_end_and_cancel_if_late()


def _compare_and_end(variant_job: VariantJob) -> None:
    variant_job.compare_with_pytorch()
    variant_job.request_end_and_cancel_if_late()


def _run_action_or_exclude_variant(
    variant_job: VariantJob, print_line: PrintLine, run_action: Callable[[], None]
) -> None:
    """Run an action of a variant; one that fails stays out from then on, and the others continue."""
    if variant_job.failure_text:
        return
    try:
        run_action()
    except (VariantFailedError, LaunchError) as error:
        variant_job.failure_text = str(error)
        print_line(f"{variant_job.variant.name}: failed: {shorten_reason(str(error))}")


@contextlib.contextmanager
def _raise_bench_stopped_on_signal() -> Iterator[None]:
    """Turn signals that end this process into BenchStopped, so that the jobs are ended first.

    Later signals are ignored until then.
    """
    signal_numbers = signals_to_handle(
        (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    )

    def raise_bench_stopped(signal_number: int, frame: FrameType | None) -> None:
        for other_signal in signal_numbers:
            # A second signal must not interrupt the end of the jobs.
            signal.signal(other_signal, signal.SIG_IGN)
        raise BenchStopped(signal_number)

    handlers_before = {
        signal_number: signal.signal(signal_number, raise_bench_stopped)
        for signal_number in signal_numbers
    }
    try:
        yield
    finally:
        for signal_number, handler in handlers_before.items():
            signal.signal(signal_number, handler)


def _measurement_length_one_at_a_time_if_memory_lacks(
    measurement_length: MeasurementLength, variant_jobs: Sequence[VariantJob], print_line: PrintLine
) -> MeasurementLength:
    """Return the length, with one variant at a time if this host cannot hold all of them.

    All variants stay in memory between their turns.
    """
    plans = [
        variant_job.variant.resolved_run.plan
        for variant_job in variant_jobs
        if variant_job.variant.resolved_run
    ]
    if measurement_length.one_at_a_time or any(
        variant_plan.memory is None or variant_plan.device != "cpu" for variant_plan in plans
    ):
        return measurement_length
    needed_bytes = 0
    # The least of the machine's free memory and the limits of its control groups.
    free_bytes = machine.memory_limit_with_least_free().free_bytes
    for plan in plans:
        assert plan.memory is not None
        slot_count = plan.nodes[0].slots
        stage_bytes = dict(plan.memory.by_stage)[plan.memory.chosen]
        needed_bytes += (
            plan.memory.process.bytes_of_ranks(slot_count) + slot_count * stage_bytes.total
        )
    if needed_bytes <= free_bytes:
        return measurement_length
    print_line(
        f"{len(plans)} variants would take {human_bytes(needed_bytes)} at once, and {human_bytes(free_bytes)} is free: "
        "running one at a time, restarted in every round (--one-at-a-time)"
    )
    return measurement_length._replace(one_at_a_time=True)


def _watch_and_warn_of_busy_machine(print_line: PrintLine, load_averages: Sequence[float]) -> None:
    """Warn if other processes make the figures noisy."""
    busy_processes = machine.watch_and_describe_other_busy_processes()
    core_count = machine.hardware_record()["cores"] or 1
    if busy_processes or load_averages[0] > _BUSY_LOAD_PER_CORE * core_count:
        print_line(
            f"WARNING: this machine is busy (load {load_averages[0]:.1f} on {core_count} cores), so times are "
            f"noisy\n  busy: {', '.join(busy_processes[:3]) or 'none at this moment'}"
        )


def _warn_of_jobs_busy_while_waiting(
    variant_jobs: Sequence[VariantJob], print_line: PrintLine
) -> None:
    """Warn of a job that works while it waits: it takes time from the others."""
    for variant_job in variant_jobs:
        wait_records = [turn["waited"] for turn in variant_job.turns]
        waited_seconds, processor_seconds = (
            sum(wait[key] for wait in wait_records) for key in ("seconds", "processor_seconds")
        )
        # Shorter waits, in seconds, are too short to judge.
        if waited_seconds > 1 and processor_seconds > _SPINNING_SHARE * waited_seconds:
            print_line(
                f"WARNING: {variant_job.variant.name} used {processor_seconds:.1f} s of processor time in "
                f"{waited_seconds:.1f} s of waiting, which slowed the others; is OMP_WAIT_POLICY=active, "
                "or a thread of your model's at work?"
            )
