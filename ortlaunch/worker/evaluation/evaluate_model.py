"""`ortlaunch evaluate MODEL`: a model in its final form on the evaluation corpus.

It runs in one process on the CPU: onnxruntime runs a model.onnx, and plain PyTorch runs a folder of
transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ortlaunch.base.cache import take_cache_notes
from ortlaunch.launch_plan import BatchPlan
from ortlaunch.recipe import Recipe, parse_resolved_recipe
from ortlaunch.recipe.rules.best_rules import evaluates_with_scores
from ortlaunch.run_folder.folder import json_text
from ortlaunch.run_folder.records import Evaluation
from ortlaunch.tables.tasks import ModelEvaluationRequest


def run(request: ModelEvaluationRequest) -> None:
    """Evaluate the model and print the result."""
    evaluation = load_and_evaluate_model_file(
        parse_resolved_recipe(request.recipe), Path(request.model), Path(request.modules)
    )
    if request.json:
        print(json_text(evaluation.to_json(), indent=2))
    else:
        from ortlaunch.worker.evaluation.record import evaluation_lines

        print(*evaluation_lines(evaluation), sep="\n")


def load_and_evaluate_model_file(
    recipe: Recipe, model_path: Path, modules_folder: Path
) -> Evaluation:
    """Evaluate a model.

    Args:
        recipe: the recipe of the evaluation.
        model_path: a model.onnx, or a folder of transformers.
        modules_folder: the folder of the user's own modules.
    """
    import torch
    from transformers import AutoConfig

    from ortlaunch.rank import Rank
    from ortlaunch.user_modules import append_factory_folders_to_sys_path
    from ortlaunch.worker.data import load_data_and_print_notes
    from ortlaunch.worker.data.vocabulary import vocabulary_of_transformers_config
    from ortlaunch.worker.model.model import (
        LossModule,
        loss_module_of_model,
        refuse_data_exceeding_model_sizes,
        seed_and_build_loss_module_on_cpu,
    )
    from ortlaunch.worker.onnx.onnx_model import OnnxModel, OnnxTextEncoder
    from ortlaunch.worker.process_group.distributed import DistributedContext

    append_factory_folders_to_sys_path(recipe, modules_folder)
    group = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    folder = model_path if model_path.is_dir() else model_path.parent
    config = AutoConfig.from_pretrained(folder) if (folder / "config.json").exists() else None
    data = load_data_and_print_notes(
        recipe, group, vocabulary=vocabulary_of_transformers_config(config, recipe.model.task)
    )
    assert data.evaluation is not None, "the control side has looked for data.evaluation"
    # The samples are read only now. The result in JSON is alone on stdout.
    for note in take_cache_notes():
        print(note, file=sys.stderr)
    if config is not None:
        refuse_data_exceeding_model_sizes(recipe, data, config)
    if model_path.suffix == ".onnx":
        onnx_model = OnnxModel(model_path, recipe.model.task, config)
        loss_module = (
            loss_module_of_model(onnx_model, recipe).with_engine_of(
                lambda _: OnnxTextEncoder(onnx_model)
            )
            if recipe.model.traits.loss_module
            else LossModule(onnx_model)
        )
    else:
        loss_module = seed_and_build_loss_module_on_cpu(recipe, data)
    return evaluate_loss_module(recipe, loss_module, data.evaluation, group)


def evaluate_loss_module(
    recipe: Recipe, loss_module: Any, samples: Any, group: Any, evaluated_step: int | None = None
) -> Evaluation:
    """Evaluate a LossModule on these samples."""
    from ortlaunch.worker.data import Batches, collate_function_of_recipe
    from ortlaunch.worker.evaluation.evaluated_model import EvaluatedModel
    from ortlaunch.worker.evaluation.evaluation import seed_and_evaluate_model_unless_stopped
    from ortlaunch.worker.evaluation.record import build_evaluation_record
    from ortlaunch.worker.model.loss_weight import LossWeight

    loss_module.evaluates_with_scores = evaluates_with_scores(recipe)
    loss_weight = LossWeight(recipe, loss_module)
    # An ONNX graph has no class name from which `shifts` could read this.
    loss_weight.shifted = recipe.model.traits.predicts == "next"
    # The size may be `auto`, which is resolved for training only.
    micro_size = recipe.batch.micro_size if isinstance(recipe.batch.micro_size, int) else 8
    batches = Batches(
        samples,
        BatchPlan(micro_size, micro_size, 1, 1, None),
        recipe.seed,
        recipe.data.padding_bucket_or_multiple_of_8_lengths,
        collate_function_of_recipe(recipe),
    )
    evaluated_model = EvaluatedModel(
        recipe=recipe,
        group=group,
        batches=batches,
        engine_name="eager",
        module=loss_module,
        plain=loss_module,
        loss_weight=loss_weight,
        to_device=loss_weight.batch_without_weight_key_with_counted_label,
        samples=samples,
    )
    metrics = seed_and_evaluate_model_unless_stopped(evaluated_model)
    assert metrics is not None, "nobody was asked to stop"
    return build_evaluation_record(evaluated_step, len(samples), metrics)
