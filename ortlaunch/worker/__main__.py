"""The life of one rank: `python ortlaunch/start.py ortlaunch.worker RUN_FOLDER`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ortlaunch.errors import InputError, LaunchError
from ortlaunch.file_errors import of_ours
from ortlaunch.plan import Plan
from ortlaunch.rank import Rank
from ortlaunch.run.folder import RunDir, read_json
from ortlaunch.worker.allocator import give_back_freed_memory, keep_freed_memory
from ortlaunch.worker.progress import Progress
from ortlaunch.worker.rank_supervisor import watch


def main(work: Callable[..., None] | None = None) -> int:
    """Find out which rank this is, and watch over its life; `work` in place of training (see trial.py)."""
    run = RunDir(sys.argv[1])
    try:
        rank = Rank.from_environ(os.environ)
        if not run.plan.exists():
            raise LaunchError(f"no {run.plan} on this host; is the run folder on a disk that all hosts share?")
        return watch(rank, run, of_ours(run.path)(functools.partial(live, run, rank, work)))
    except (InputError, LaunchError) as error:
        print(f"ortlaunch: {error}", file=sys.stderr)
        return error.exit_status


def live(run: RunDir, rank: Rank, work: Callable[..., None] | None = None) -> None:
    """Join the world, build, train, leave."""
    progress = Progress(rank.rank)
    progress.doing("loading libraries")
    from ortlaunch.recipe import parse_resolved  # here, so that guardian and logs are there before pydantic is loaded
    from ortlaunch.user_modules import make_importable

    texts = [path.read_text(encoding="utf-8") for path in (run.recipe, run.plan)]
    recipe, plan = parse_resolved(texts[0]), Plan.from_json(texts[1])
    make_importable(recipe, Path(plan.modules))
    os.environ["DS_ACCELERATOR"] = plan.device  # else DeepSpeed guesses, and warns
    freed = keep_freed_memory(os.environ) if plan.device == "cpu" else None
    if recipe.engine.name == "ort":
        from ortlaunch.ortmodule.options import prepare

        prepare(recipe.engine)  # imports ORTModule: before transformers, which keeps the functions that it replaces

    from ortlaunch.worker import distributed
    from ortlaunch.worker.data import Batches, load_data
    from ortlaunch.worker.engine import build_engine
    from ortlaunch.worker.finish import finish
    from ortlaunch.worker.length import with_steps
    from ortlaunch.worker.matmul_precision import matmul_precision
    from ortlaunch.worker.memory_use import MemoryUse
    from ortlaunch.worker.model import build_model
    from ortlaunch.worker.summary import announce
    from ortlaunch.worker.tasks.train import train

    with distributed.group(plan, rank, run) as group, matmul_precision(recipe.engine.matmul_precision):
        distributed.agree_on_files(group, run, texts)
        progress.doing("reading data")
        data = load_data(recipe, group)
        progress.doing("building the model")
        model = build_model(recipe, data)
        memory = MemoryUse(group.device, model)
        batches = Batches(data.train, plan.batch, recipe.seed)
        recipe = with_steps(recipe, plan.batch, run, group, len(data.train))
        if run.bench.exists():
            from ortlaunch.worker.tasks.bench import bench

            bench(recipe, plan, run, group, model, batches)
            return
        progress.doing("exporting to ONNX Runtime" if recipe.engine.name == "ort" else "building the engine")
        engine = build_engine(recipe, plan, model, group, batches.micro_batch(0, 0, group.rank))
        engine.memory = memory
        engine.report["freed_memory"] = freed
        give_back_freed_memory()  # an export's copies of the model
        if work is not None:
            work(recipe, plan, run, group, engine, batches)
            return
        if run.choice.exists():
            engine.report["engine"].update(read_json(run.choice))
        announce(recipe, plan, run, group, engine, len(data.train))
        train(recipe, plan, run, group, engine, batches, data.evaluation)
        finish(recipe, plan, run, group, engine, model, data)


if __name__ == "__main__":
    sys.exit(main())
