"""`ortlaunch plan --predict`: predict seconds and memory of a step, into the cache.

One process builds the model as a rank does, on engine eager, counts its work and measures the rates
of this machine, if they are not known yet.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from ortlaunch.launch_plan import Plan
from ortlaunch.recipe import parse_resolved_recipe
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.tables.tasks import PredictionRequest
from ortlaunch.user_modules import append_factory_folders_to_sys_path
from ortlaunch.worker.allocator import make_malloc_keep_memory_and_describe


def run(request: PredictionRequest) -> None:
    """Predict, and write the result into the cache.

    Raises:
        InputError: the model cannot be built, or cannot be counted.
    """
    recipe = parse_resolved_recipe(request.recipe)
    plan = Plan.from_plan_json_text(request.plan)
    append_factory_folders_to_sys_path(recipe, Path(plan.modules))
    if plan.device == "cpu":
        # As a rank does before it loads torch: the rates include the allocation of results.
        make_malloc_keep_memory_and_describe(os.environ)
    import torch

    from ortlaunch.base.errors import InputError, first_message_line
    from ortlaunch.rank import Rank
    from ortlaunch.worker.process_group.distributed import DistributedContext
    from ortlaunch.worker.session import load_data_and_build_session
    from ortlaunch.worker.supervision.progress import Progress
    from ortlaunch.worker.tasks.engine_predictions import count_measure_and_cache_prediction

    group = DistributedContext(Rank(0, 1, 0, 1), torch.device(plan.device))
    engine = recipe.engine.model_copy(update={"name": "eager"})
    eager_recipe = recipe.model_copy(update={"engine": engine, "zero": None})
    with tempfile.TemporaryDirectory() as folder:
        session = load_data_and_build_session(
            eager_recipe, replace(plan, deepspeed=None), RunDir(folder), group, Progress(rank=1)
        )
    batch = session.engine.loss_weight.batch_without_weight_key_with_counted_label(
        session.batches.read_micro_batch_and_count_tokens(0, 0, 0)
    )
    try:
        count_measure_and_cache_prediction(recipe, plan, session.model, batch)
    # The user's own model may do anything.
    except Exception as error:
        raise InputError(
            f"model: its work cannot be counted: {first_message_line(error)}"
        ) from error
