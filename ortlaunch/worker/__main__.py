"""The process of one rank: `python ortlaunch/base/module_start.py ortlaunch.worker RUN_FOLDER`."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ortlaunch.base.errors import FileError, InputError, LaunchError, escape_control_characters
from ortlaunch.base.file_errors import explain_errors_on_run_folder_or_cache_files
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import Rank
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.allocator import (
    make_malloc_keep_memory_and_describe,
    map_pages_of_files_as_before_fork,
)
from ortlaunch.worker.engine.binding import (
    RankCoreBinding,
    bind_process_and_set_openmp_threads_unless_user_does,
    format_cpu_list,
    set_openmp_wait_policy_unless_set,
)
from ortlaunch.worker.engine.garbage import (
    collect_freeze_and_restore_threshold,
    exclude_libraries_from_collections,
    raise_garbage_threshold,
)
from ortlaunch.worker.process_group.rendezvous_port import require_free_rendezvous_port_on_rank_0
from ortlaunch.worker.supervision.progress import Progress
from ortlaunch.worker.supervision.rank_process import make_oom_killer_prefer_this_process
from ortlaunch.worker.supervision.rank_supervisor import fork_and_supervise_rank_then_end_alike
from ortlaunch.worker.supervision.stall_rules import MEETING
from ortlaunch.worker.supervision.watchdog import Watchdog

if TYPE_CHECKING:
    from ortlaunch.recipe import Recipe


def supervise_rank_of_run_folder() -> int:
    """Detect the rank of this process, and run it under its supervisor; return the exit status."""
    run = RunDir(sys.argv[1])
    run = RunDir(run.path, run.start_number)
    try:
        rank = Rank.from_environ(os.environ)
        if not run.plan.exists():
            raise LaunchError(
                f"no {run.plan} on this host; is the run folder on a disk that all hosts share?"
            )
        with explain_errors_on_run_folder_or_cache_files(run.path):
            return fork_and_supervise_rank_then_end_alike(
                rank,
                run,
                explain_errors_on_run_folder_or_cache_files(run.path)(
                    functools.partial(join_ranks_and_run_task, run, rank)
                ),
            )
    except (InputError, LaunchError, FileError) as error:
        print(f"ortlaunch: {escape_control_characters(str(error))}", file=sys.stderr)
        return error.exit_status


def silence_no_gpu_warning_on_cpu(device_type: str) -> None:
    """Silence the warning of torch's CUDA builds that there is no GPU, if the device is a CPU."""
    # Each start would print it.
    import logging

    if device_type == "cpu":
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def set_up_process_and_import_engine(
    recipe: Recipe, plan: Plan, rank: Rank
) -> tuple[RankCoreBinding, str | None]:
    """Bind this process, set the variables that libraries read when they load, and load the engine.

    Returns:
        The binding, and on a CPU what happens to freed memory, for engine.json.
    """
    map_pages_of_files_as_before_fork()
    core_binding = bind_process_and_set_openmp_threads_unless_user_does(
        recipe.launch.binding, plan, rank, os.environ
    )
    set_openmp_wait_policy_unless_set(os.environ)
    # Otherwise DeepSpeed guesses the device, and warns.
    os.environ["DS_ACCELERATOR"] = plan.device
    freed_memory_text = (
        make_malloc_keep_memory_and_describe(os.environ, plan.has_fsdp2)
        if plan.device == "cpu"
        else None
    )
    silence_no_gpu_warning_on_cpu(plan.device)
    if recipe.engine.name == "ort":
        from ortlaunch.worker.engine.ort_settings import import_ortmodule_with_settings

        # Imports ORTModule, which replaces functions. This must precede transformers, which keeps
        # references to them.
        import_ortmodule_with_settings(recipe.engine)
    return core_binding, freed_memory_text


def join_ranks_and_run_task(run: RunDir, rank: Rank, watchdog: Watchdog) -> int:
    """Read recipe and plan, join the world, build the session, run the task; return its status."""
    progress = Progress(rank.rank, watchdog.shared_progress)
    progress.begin_and_show_activity("loading libraries")
    raise_garbage_threshold()

    # Here, so that supervisor and logs exist before pydantic is loaded.
    from ortlaunch.recipe import parse_resolved_recipe
    from ortlaunch.user_modules import append_factory_folders_to_sys_path

    file_texts = [path.read_text(encoding="utf-8") for path in (run.recipe, run.plan)]
    recipe = parse_resolved_recipe(file_texts[0])
    plan = Plan.from_plan_json_text(file_texts[1])
    append_factory_folders_to_sys_path(recipe, Path(plan.modules))
    watchdog.set_stall_seconds_from_recipe(recipe.train.stall_seconds)
    # ortlaunch's own torchrun has no such port.
    if not plan.started_by.is_ours:
        require_free_rendezvous_port_on_rank_0(rank, os.environ)
    if plan.traits.may_exhaust_memory:
        make_oom_killer_prefer_this_process()
    core_binding, freed_memory_text = set_up_process_and_import_engine(recipe, plan, rank)
    plan = replace(plan, threads=core_binding.threads or plan.threads)

    from ortlaunch.worker import tasks
    from ortlaunch.worker.data import LoadedData
    from ortlaunch.worker.data.user_data import import_user_function, seed_all_random_generators
    from ortlaunch.worker.data.vocabulary import vocabulary_of_start_checkpoint_or_none
    from ortlaunch.worker.data_audit import refuse_severe_findings_not_allowed
    from ortlaunch.worker.model.matmul_precision import use_matmul_precision
    from ortlaunch.worker.model.model import build_transformers_config_fitting_data_or_refuse
    from ortlaunch.worker.process_group import distributed
    from ortlaunch.worker.process_group.heartbeat_exchange import (
        connect_supervisors_and_count_collectives,
    )
    from ortlaunch.worker.session import load_data_and_build_session

    exclude_libraries_from_collections()
    # The user's modules may draw random numbers while they are imported.
    seed_all_random_generators(recipe.seed)
    for field, name in (
        ("train.metric", recipe.train.metric),
        ("data.collate", recipe.data.collate),
        ("engine.postprocess", recipe.engine.postprocess),
    ):
        if name:
            # A missing function must fail before training.
            import_user_function(field, name)
    data = None
    # The user's own data function may need the group: it is called later.
    if not recipe.data.is_custom:
        # Before the group exists: reading may take any time, and may fail while no rank waits.
        progress.begin_and_show_activity("reading data")
        data = LoadedData(
            recipe,
            progress.show_activity_detail,
            vocabulary_of_start_checkpoint_or_none(run, recipe),
            run.stream,
        )
        data.read_samples_needed_by(plan.traits)
        if plan.traits.saves:
            refuse_severe_findings_not_allowed(data, audits_streams=False)
        if not recipe.model.traits.is_own:
            # Only for its checks: tokenizer and labels must fit the model.
            build_transformers_config_fitting_data_or_refuse(recipe, data)
    if rank.world_size > 1:
        progress.begin_and_show_activity(MEETING)
    with (
        distributed.join_process_group_until_end(plan, rank, run) as group,
        use_matmul_precision(recipe.engine.matmul_precision),
    ):
        distributed.require_same_recipe_and_plan_and_mark_ranks_met(group, run, file_texts)
        with connect_supervisors_and_count_collectives(group, watchdog):
            session = load_data_and_build_session(recipe, plan, run, group, progress, data)
            session.engine.record.freed_memory = freed_memory_text
            session.engine.record.binding = core_binding.binding_record(
                group.gather(format_cpu_list(core_binding.cpus)), group.gather(core_binding.used)
            )
            collect_freeze_and_restore_threshold()
            return tasks.run(session)


if __name__ == "__main__":
    sys.exit(supervise_rank_of_run_folder())
