"""`ortlaunch export --format ondevice`: the training artifacts of ONNX Runtime.

They are graphs for training, evaluation and the optimizer, and a first checkpoint, made by
onnxruntime.training.artifacts. An export succeeds only if onnxruntime.training.api runs them with
the same results as PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ortlaunch.base.errors import EngineError, InputError
from ortlaunch.recipe import Recipe, dump_recipe_yaml
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.recipe.fields.recipe import Batch as BatchSizes
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.run_folder.export_records import DeviceArtifacts, DeviceParameter
from ortlaunch.run_folder.folder import write_json_atomically, write_text_atomically
from ortlaunch.run_folder.records import json_values_of_record
from ortlaunch.user_modules import key_and_factory_pairs
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.device import graph
from ortlaunch.worker.device.device import Device, import_ort_training_artifacts_or_refuse
from ortlaunch.worker.device.graph import ForwardGraph
from ortlaunch.worker.model.model import LossModule, restore_cache_setting
from ortlaunch.worker.onnx.onnx_export import largest_or_nan
from ortlaunch.worker.supervision.module_copies import imported_user_modules
from ortlaunch.worker.supervision.module_copies import relative_module_path as beside
from ortlaunch.worker.tensor_batch import TensorBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The largest allowed difference of the loss, or of a logit, from PyTorch's.
DIFFERENCE_LIMIT = 1e-4
# Bytes of a graph while its gradient is made: protobuf's 2 GiB, less some room.
_MAX_GRAPH_BYTES = 2**31 - 2**20


def write_and_check_device_artifacts(
    recipe: Recipe, artifacts_folder: Path, trained_module: LossModule, data: LoadedData
) -> DeviceArtifacts:
    """Write everything that `ortlaunch device` needs into an existing folder.

    Args:
        recipe: the recipe, changed by `unsharded_one_pass_recipe_for_device`.
        artifacts_folder: the folder to write to.
        trained_module: the model with its weights.
        data: the data of the run.

    Returns:
        The description that is also written into the folder.

    Raises:
        EngineError: the model does not export, or ONNX Runtime's results differ from PyTorch's.
        InputError: the model is too large, or keeps state that a device cannot update.
        MissingDependency: onnxruntime-training is not installed.
    """
    artifacts_module = import_ort_training_artifacts_or_refuse()
    loss_module = trained_module.float()
    device_folder = DeviceFolder(artifacts_folder)
    size = sum(
        parameter.numel() * parameter.element_size() for parameter in loss_module.parameters()
    )
    if size > _MAX_GRAPH_BYTES:
        raise InputError(
            f"--format ondevice: the weights take {size:,} bytes; "
            "ONNX Runtime derives graphs below 2 GiB"
        )
    batches = graph.labelled_batches_in_forward_order(recipe, loss_module, data)
    with tempfile.TemporaryDirectory(dir=artifacts_folder) as scratch:
        forward = graph.export_loss_graph_and_sort_weights(
            loss_module, batches, Path(scratch) / "forward.onnx"
        )
        _generate_training_graphs_and_set_adamw_mode(
            artifacts_module, recipe, forward, artifacts_folder
        )
    with _translate_untrainable_operator_error():
        device = Device(device_folder, device_folder.checkpoint)
    largest_found = largest_or_nan(
        _largest_loss_or_logit_difference_from_pytorch(
            device, graph.ModelWithLoss(loss_module.model, tuple(batch)), batch
        )
        for batch in batches
    )
    # `not <=` also refuses nan.
    if not largest_found <= DIFFERENCE_LIMIT:
        raise EngineError(
            f"ONNX Runtime's outputs differ from PyTorch's by {largest_found:.3g}; the limit is {DIFFERENCE_LIMIT:g}"
        )
    record = _artifacts_record(recipe, forward, largest_found)
    write_json_atomically(device_folder.description, json_values_of_record(record))
    write_text_atomically(device_folder.recipe, dump_recipe_yaml(recipe))
    _save_config_and_tokenizer_if_present(loss_module, artifacts_folder, data.tokenizer)
    # A recipe with factories needs the user's own modules where the artifacts are used.
    if dict(key_and_factory_pairs(recipe)):
        for module in imported_user_modules():
            (artifacts_folder / beside(module)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(module.__file__), artifacts_folder / beside(module))
    return record


def unsharded_one_pass_recipe_for_device(recipe: Recipe, micro_samples: int) -> Recipe:
    """Return the recipe of the artifacts: each step is one pass, and nothing is sharded."""
    model_changes = dict[str, object](gradient_checkpointing=False)
    # ONNX Runtime derives the gradient of eager attention, which consists of basic operators.
    if not recipe.model.traits.is_own:
        model_changes["attention"] = "eager"
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=model_changes),
            "batch": BatchSizes(global_size=None, micro_size=micro_samples, accumulation_steps=1),
            "engine": Engine(name="eager"),
            "zero": None,
            "precision": "fp32",
        }
    )


def _generate_training_graphs_and_set_adamw_mode(
    artifacts_module: Any, recipe: Recipe, forward: ForwardGraph, artifacts_folder: Path
) -> None:
    import onnx

    with _discard_stderr(), _translate_untrainable_operator_error():
        artifacts_module.generate_artifacts(
            onnx.load(str(forward.path)), requires_grad=forward.trained, frozen_params=forward.frozen or None,
            optimizer=_ort_device_sgd_or_adamw(recipe), artifact_directory=str(artifacts_folder),
        )  # fmt: skip
    path = DeviceFolder(artifacts_folder).optimizer
    model = onnx.load(str(path))
    for node in model.graph.node:
        for attribute in node.attribute:
            # Mode 0 is torch.optim.AdamW's: weights decay before the step.
            if attribute.name == "adam_mode":
                attribute.i = 0
    onnx.save(model, str(path))


def _ort_device_sgd_or_adamw(recipe: Recipe) -> object:
    """Return the recipe's optimizer, as far as ONNX Runtime supports it on devices."""
    from onnxruntime.training.onnxblock import optim

    optimizer_settings = recipe.optimizer
    norm = recipe.train.max_grad_norm
    clip = None if norm is None else optim.ClipGradNorm(norm)
    if optimizer_settings.traits.on_device == "SGD":
        return optim.SGD(clip_grad=clip)
    return optim.AdamW(
        betas=tuple(optimizer_settings.betas),
        eps=optimizer_settings.epsilon,
        weight_decay=optimizer_settings.weight_decay,
        clip_grad=clip,
    )


def _unsupported_setting_notes(recipe: Recipe, forward: ForwardGraph) -> Iterator[str]:
    """Yield notes on the recipe's settings that a device does not follow."""
    optimizer_settings = recipe.optimizer
    if optimizer_settings.traits.on_device_note:
        yield optimizer_settings.traits.on_device_note
    decays = optimizer_settings.traits.on_device == "AdamW"
    if not decays and (optimizer_settings.momentum or optimizer_settings.weight_decay):
        yield ("optimizer: ONNX Runtime's SGD for devices has no momentum and no weight_decay")
    if decays and optimizer_settings.weight_decay and optimizer_settings.no_decay:
        yield (
            "optimizer: weight_decay applies to all weights; no_decay is not supported on devices"
        )
    if recipe.data.separates_documents:
        yield (
            "data: the graphs have no document mask; use one row per document, with "
            "attention_mask, as `ortlaunch device` does"
        )
    if forward.unused:
        yield f"not trained, because the loss does not use them: {', '.join(forward.unused)}"


@torch.no_grad()
def _largest_loss_or_logit_difference_from_pytorch(
    device: Device, module: graph.ModelWithLoss, batch: TensorBatch
) -> float:
    expected = module.eval()(*batch.values())
    outputs = device.evaluate_batch(batch)
    return largest_or_nan(
        float((torch.from_numpy(device_output) - torch_output).abs().max())
        for device_output, torch_output in zip(outputs.values(), expected)
    )


def _artifacts_record(
    recipe: Recipe, forward: ForwardGraph, largest_found: float
) -> DeviceArtifacts:
    is_trained_by_name = dict.fromkeys(forward.trained, True) | dict.fromkeys(forward.frozen, False)
    # The operators of ONNX Runtime's optimizer graphs.
    optimizer_operator = {"SGD": "SGDOptimizerV2", "AdamW": "AdamWOptimizer"}[
        recipe.optimizer.traits.on_device
    ]
    return DeviceArtifacts(
        opset=graph.OPSET,
        inputs=list(forward.inputs),
        outputs=list(forward.outputs),
        parameters=[
            DeviceParameter(name, forward.shapes[name], trained)
            for name, trained in is_trained_by_name.items()
        ],
        optimizer=optimizer_operator,
        largest_difference=largest_found,
        limit=DIFFERENCE_LIMIT,
        notes=[*_unsupported_setting_notes(recipe, forward)],
    )


def _save_config_and_tokenizer_if_present(
    loss_module: LossModule, artifacts_folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    model: Any = loss_module.model
    if hasattr(model, "config"):
        # Training switches the cache off; the saved config has the model's own setting.
        restore_cache_setting(model, loss_module.generates_with_cache)
        model.config.save_pretrained(artifacts_folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(artifacts_folder)


@contextlib.contextmanager
def _translate_untrainable_operator_error() -> Iterator[None]:
    """Raise EngineError with the operator that ONNX Runtime cannot train, in one sentence."""
    try:
        yield
    except RuntimeError as error:
        # Without the C++ function, its condition and the error's number.
        reason = re.split(r" was false\. | : NOT_IMPLEMENTED : ", str(error))[-1].strip()
        raise EngineError(
            f"--format ondevice: ONNX Runtime cannot train this model: {reason}; use other layers "
            "there, or --format onnx, which does not train"
        ) from error


@contextlib.contextmanager
def _discard_stderr() -> Iterator[None]:
    """Discard the messages of ONNX Runtime's graph transformers while the context is open."""
    # No logging option reaches them, so that the file descriptor of stderr is redirected.
    former_stderr = os.dup(2)
    null_device = os.open(os.devnull, os.O_WRONLY)
    # Native code writes to the descriptor, not to sys.stderr.
    os.dup2(null_device, 2)
    try:
        yield
    finally:
        os.dup2(former_stderr, 2)
        os.close(former_stderr)
        os.close(null_device)
