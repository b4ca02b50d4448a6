"""The life of one rank: `python ortlaunch/start.py ortlaunch.worker RUN_FOLDER`."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace
from pathlib import Path

from ortlaunch.errors import InputError, LaunchError, printable
from ortlaunch.file_errors import of_ours
from ortlaunch.plan import Plan
from ortlaunch.rank import Rank
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.engine.allocator import keep_freed_memory
from ortlaunch.worker.engine.binding import bind, shown
from ortlaunch.worker.engine.garbage import look_as_usual, look_rarely
from ortlaunch.worker.process_group.meeting_port import require_free
from ortlaunch.worker.supervision.child import be_ended_first
from ortlaunch.worker.supervision.progress import Progress
from ortlaunch.worker.supervision.rank_supervisor import watch
from ortlaunch.worker.supervision.stall import MEETING
from ortlaunch.worker.supervision.watchdog import Watchdog


def main() -> int:
    """Find out which rank this is, and watch over its life."""
    run = RunDir(sys.argv[1])
    try:
        rank = Rank.from_environ(os.environ)
        if not run.plan.exists():
            raise LaunchError(
                f"no {run.plan} on this host; is the run folder on a disk that all hosts share?"
            )
        return watch(rank, run, of_ours(run.path)(functools.partial(live, run, rank)))
    except (InputError, LaunchError) as error:
        print(f"ortlaunch: {printable(str(error))}", file=sys.stderr)
        return error.exit_status


def expect_no_gpu(device: str) -> None:
    """On a CPU silence the warning of torch's CUDA builds that there is no GPU, which each start would print."""
    import logging

    if device == "cpu":
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def live(run: RunDir, rank: Rank, watchdog: Watchdog) -> int:
    """Read what to do, join the world, build, do it, leave with this exit status."""
    progress = Progress(rank.rank, watchdog.pulse)
    progress.doing("loading libraries")
    look_rarely()
    from ortlaunch.recipe import (
        parse_resolved,
    )  # here, so that guardian and logs are there before pydantic is loaded
    from ortlaunch.user_modules import make_importable

    texts = [path.read_text(encoding="utf-8") for path in (run.recipe, run.plan)]
    recipe = parse_resolved(texts[0])
    plan = Plan.from_json(texts[1])
    make_importable(recipe, Path(plan.modules))
    watchdog.take(recipe.train.stall_seconds)
    if not plan.started_by.is_ours:  # ortlaunch's own torchrun has no such port
        require_free(rank, os.environ)
    bound = bind(recipe.launch.binding, plan, rank, os.environ)
    plan = replace(plan, threads=bound.threads or plan.threads)
    os.environ["DS_ACCELERATOR"] = plan.device  # else DeepSpeed guesses, and warns
    freed = keep_freed_memory(os.environ) if plan.device == "cpu" else None
    expect_no_gpu(plan.device)
    if plan.traits.may_exhaust_memory:
        be_ended_first()
    if recipe.engine.name == "ort":
        from ortlaunch.worker.engine.ort_settings import prepare

        prepare(
            recipe.engine
        )  # imports ORTModule: before transformers, which keeps the functions that it replaces

    from ortlaunch.worker import tasks
    from ortlaunch.worker.data import LoadedData
    from ortlaunch.worker.data.own import find
    from ortlaunch.worker.data.vocabulary import goes_on_with
    from ortlaunch.worker.model.matmul_precision import matmul_precision
    from ortlaunch.worker.model.model import config_of
    from ortlaunch.worker.process_group import distributed
    from ortlaunch.worker.process_group.meeting import beating
    from ortlaunch.worker.session import build_session

    for field, name in (
        ("train.metric", recipe.train.metric),
        ("data.collate", recipe.data.collate),
    ):
        if name:
            find(field, name)  # that it is there, before anything is trained
    data = None
    if not recipe.data.is_custom:  # whose function may want the group
        progress.doing(
            "reading data"
        )  # takes as long as it takes, and fails before a group waits for it
        data = LoadedData(recipe, progress.tell, goes_on_with(run, recipe))
        data.read_for(plan.traits)
        if not recipe.model.traits.is_own:
            config_of(recipe, data)  # that tokenizer and labels fit into the model
    if rank.world_size > 1:
        progress.doing(MEETING)
    with (
        distributed.group(plan, rank, run) as group,
        matmul_precision(recipe.engine.matmul_precision),
    ):
        distributed.agree_on_files(group, run, texts)
        with beating(group, watchdog):
            session = build_session(recipe, plan, run, group, progress, data)
            session.engine.record.freed_memory = freed
            session.engine.record.binding = bound.report(
                group.gather(shown(bound.cpus)), group.gather(bound.used)
            )
            look_as_usual()
            return tasks.run(session)


if __name__ == "__main__":
    sys.exit(main())
