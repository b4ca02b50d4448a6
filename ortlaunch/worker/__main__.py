"""The process of one rank: `python ortlaunch/start.py ortlaunch.worker RUN_FOLDER`."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace
from pathlib import Path

from ortlaunch.errors import FileError, InputError, LaunchError, escape_control_characters
from ortlaunch.file_errors import explain_errors_of_own_files
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import Rank
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.engine.allocator import keep_freed_memory
from ortlaunch.worker.engine.binding import (
    bind_process_to_cores,
    format_cpu_list,
    let_waiting_threads_sleep,
)
from ortlaunch.worker.engine.garbage import collect_as_usual, collect_rarely
from ortlaunch.worker.process_group.meeting_port import require_free_port
from ortlaunch.worker.supervision.child import raise_oom_score
from ortlaunch.worker.supervision.progress import Progress
from ortlaunch.worker.supervision.rank_supervisor import supervise_rank
from ortlaunch.worker.supervision.stall_rules import MEETING
from ortlaunch.worker.supervision.watchdog import Watchdog


def main() -> int:
    """Detect the rank of this process, and run it under its supervisor; return the exit status."""
    run = RunDir(sys.argv[1])
    run = RunDir(run.path, run.start_number)
    try:
        rank = Rank.from_environ(os.environ)
        if not run.plan.exists():
            raise LaunchError(
                f"no {run.plan} on this host; is the run folder on a disk that all hosts share?"
            )
        with explain_errors_of_own_files(run.path):
            return supervise_rank(
                rank,
                run,
                explain_errors_of_own_files(run.path)(functools.partial(run_rank, run, rank)),
            )
    except (InputError, LaunchError, FileError) as error:
        print(f"ortlaunch: {escape_control_characters(str(error))}", file=sys.stderr)
        return error.exit_status


def silence_no_gpu_warning(device: str) -> None:
    """Silence the warning of torch's CUDA builds that there is no GPU, if the device is a CPU."""
    # Each start would print it.
    import logging

    if device == "cpu":
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def run_rank(run: RunDir, rank: Rank, watchdog: Watchdog) -> int:
    """Read recipe and plan, join the world, build the session, run the task; return its status."""
    progress = Progress(rank.rank, watchdog.pulse)
    progress.show_activity("loading libraries")
    collect_rarely()

    # Here, so that supervisor and logs exist before pydantic is loaded.
    from ortlaunch.recipe import parse_resolved
    from ortlaunch.user_modules import add_factory_folders_to_path

    file_texts = [path.read_text(encoding="utf-8") for path in (run.recipe, run.plan)]
    recipe = parse_resolved(file_texts[0])
    plan = Plan.from_json(file_texts[1])
    add_factory_folders_to_path(recipe, Path(plan.modules))
    watchdog.apply_stall_seconds(recipe.train.stall_seconds)
    # ortlaunch's own torchrun has no such port.
    if not plan.started_by.is_ours:
        require_free_port(rank, os.environ)
    core_binding = bind_process_to_cores(recipe.launch.binding, plan, rank, os.environ)
    plan = replace(plan, threads=core_binding.threads or plan.threads)
    let_waiting_threads_sleep(os.environ)
    # Otherwise DeepSpeed guesses the device, and warns.
    os.environ["DS_ACCELERATOR"] = plan.device
    freed_memory_text = keep_freed_memory(os.environ) if plan.device == "cpu" else None
    silence_no_gpu_warning(plan.device)
    if plan.traits.may_exhaust_memory:
        raise_oom_score()
    if recipe.engine.name == "ort":
        from ortlaunch.worker.engine.ort_settings import prepare_ortmodule

        # Imports ORTModule, which replaces functions. This must precede transformers, which keeps
        # references to them.
        prepare_ortmodule(recipe.engine)

    from ortlaunch.worker import tasks
    from ortlaunch.worker.data import LoadedData
    from ortlaunch.worker.data.own import load_user_function, seed_generators
    from ortlaunch.worker.data.vocabulary import vocabulary_of_checkpoint
    from ortlaunch.worker.data_audit import require_no_severe_findings
    from ortlaunch.worker.model.matmul_precision import use_matmul_precision
    from ortlaunch.worker.model.model import build_model_config
    from ortlaunch.worker.process_group import distributed
    from ortlaunch.worker.process_group.meeting import exchange_heartbeats
    from ortlaunch.worker.session import build_session

    # The user's modules may draw random numbers while they are imported.
    seed_generators(recipe.seed)
    for field, name in (
        ("train.metric", recipe.train.metric),
        ("data.collate", recipe.data.collate),
        ("engine.postprocess", recipe.engine.postprocess),
    ):
        if name:
            # A missing function must fail before training.
            load_user_function(field, name)
    data = None
    # The user's own data function may need the group: it is called later.
    if not recipe.data.is_custom:
        # Before the group exists: reading may take any time, and may fail while no rank waits.
        progress.show_activity("reading data")
        data = LoadedData(
            recipe, progress.show_detail, vocabulary_of_checkpoint(run, recipe), run.stream
        )
        data.read_parts_for(plan.traits)
        if plan.traits.saves:
            require_no_severe_findings(data, streams=False)
        if not recipe.model.traits.is_own:
            # Only for its checks: tokenizer and labels must fit the model.
            build_model_config(recipe, data)
    if rank.world_size > 1:
        progress.show_activity(MEETING)
    with (
        distributed.join_process_group(plan, rank, run) as group,
        use_matmul_precision(recipe.engine.matmul_precision),
    ):
        distributed.require_same_files(group, run, file_texts)
        with exchange_heartbeats(group, watchdog):
            session = build_session(recipe, plan, run, group, progress, data)
            session.engine.record.freed_memory = freed_memory_text
            session.engine.record.binding = core_binding.binding_record(
                group.gather(format_cpu_list(core_binding.cpus)), group.gather(core_binding.used)
            )
            collect_as_usual()
            return tasks.run(session)


if __name__ == "__main__":
    sys.exit(main())
