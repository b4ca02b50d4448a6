"""`ortlaunch evaluate MODEL`: a model in its final form on the evaluation corpus.

One process on the CPU: model.onnx by onnxruntime, transformers' folder by plain PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ortlaunch.plan import BatchPlan
from ortlaunch.recipe import Recipe, parse_resolved
from ortlaunch.recipe.rules.best_rules import evaluates_with_scores
from ortlaunch.run_folder.folder import json_text
from ortlaunch.run_folder.records import Evaluation
from ortlaunch.tasks import ModelEvaluationRequest


def run(request: ModelEvaluationRequest) -> None:
    """Measure and print."""
    found = evaluated(parse_resolved(request.recipe), Path(request.model), Path(request.modules))
    if request.json:
        print(json_text(found.to_json(), indent=2))
    else:
        from ortlaunch.worker.evaluation.record import table

        print(*table(found), sep="\n")


def evaluated(recipe: Recipe, model: Path, modules: Path) -> Evaluation:
    """model: a model.onnx, or a folder of transformers'; modules: where the user's own may lie."""
    import torch
    from transformers import AutoConfig

    from ortlaunch.rank import Rank
    from ortlaunch.user_modules import make_importable
    from ortlaunch.worker.data import load_data
    from ortlaunch.worker.data.vocabulary import of_config
    from ortlaunch.worker.model.model import LossModule, build_model, refuse_too_small
    from ortlaunch.worker.onnx.onnx_model import OnnxModel
    from ortlaunch.worker.process_group.distributed import DistributedContext

    make_importable(recipe, modules)
    group = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    folder = model if model.is_dir() else model.parent
    config = AutoConfig.from_pretrained(folder) if (folder / "config.json").exists() else None
    data = load_data(recipe, group, vocabulary=of_config(config, recipe.model.task))
    assert data.evaluation is not None, "the control side has looked for data.evaluation"
    if config is not None:
        refuse_too_small(recipe, data, config)
    if model.suffix == ".onnx":
        whole = LossModule(OnnxModel(model, recipe.model.task, config))
    else:
        whole = build_model(recipe, data)
    return measured(recipe, whole, data.evaluation, group)


def measured(
    recipe: Recipe, whole: Any, samples: Any, group: Any, step: int | None = None
) -> Evaluation:
    """The numbers of a LossModule on these samples."""
    from ortlaunch.worker.data import Batches, stack_of
    from ortlaunch.worker.evaluation.evaluation import evaluate
    from ortlaunch.worker.evaluation.record import record_of
    from ortlaunch.worker.model.loss_weight import LossWeight
    from ortlaunch.worker.supervision.progress import Progress

    whole.evaluates_with_scores = evaluates_with_scores(recipe)
    weight = LossWeight(recipe, whole)
    weight.shifted = recipe.model.traits.predicts == "next"  # which a graph does not say
    engine = SimpleNamespace(
        eval_module=whole,
        plain=whole,
        device=group.device,
        loss_weight=weight,
        take=weight.prepared,
        record=SimpleNamespace(engine=SimpleNamespace(used="eager")),  # it returns more than a loss
    )
    micro = recipe.batch.micro_size if isinstance(recipe.batch.micro_size, int) else 8
    batches = Batches(
        samples,
        BatchPlan(micro, micro, 1, 1, None),
        recipe.seed,
        recipe.data.lengths,
        stack_of(recipe),
    )
    plan = SimpleNamespace(batch=batches.batch)
    session: Any = SimpleNamespace(
        recipe=recipe,
        plan=plan,
        group=group,
        engine=engine,
        batches=batches,
        progress=Progress(rank=1),
    )
    found = evaluate(session, samples)
    assert found is not None, "nobody was asked to stop"
    return record_of(step, len(samples), found)
