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

from ortlaunch.errors import EngineError, InputError
from ortlaunch.recipe import Recipe, to_yaml
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.recipe.fields.recipe import Batch as BatchSizes
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.run_folder.export_records import DeviceArtifacts, DeviceParameter
from ortlaunch.run_folder.folder import write_json_atomically, write_text_atomically
from ortlaunch.run_folder.records import as_json
from ortlaunch.user_modules import recipe_factories
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.device import graph
from ortlaunch.worker.device.device import Device, require
from ortlaunch.worker.device.graph import Batch, Forward
from ortlaunch.worker.model.model import LossModule, give_back_cache
from ortlaunch.worker.onnx.onnx_export import largest
from ortlaunch.worker.supervision.module_copies import own_modules
from ortlaunch.worker.supervision.module_copies import place as beside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The largest allowed difference of the loss, or of a logit, from PyTorch's.
LIMIT = 1e-4
# Bytes of a graph while its gradient is made: protobuf's 2 GiB, less some room.
_MOST = 2**31 - 2**20


def ondevice(
    recipe: Recipe, folder: Path, trained: LossModule, data: LoadedData
) -> DeviceArtifacts:
    """Write everything that `ortlaunch device` needs into an existing folder.

    Args:
        recipe: the recipe, changed by `as_on_a_device`.
        folder: the folder to write to.
        trained: the model with its weights.
        data: the data of the run.

    Returns:
        The description that is also written into the folder.

    Raises:
        EngineError: the model does not export, or ONNX Runtime's results differ from PyTorch's.
        InputError: the model is too large, or keeps state that a device cannot update.
        MissingDependency: onnxruntime-training is not installed.
    """
    made = require()
    whole = trained.float()
    place = DeviceFolder(folder)
    size = sum(parameter.numel() * parameter.element_size() for parameter in whole.parameters())
    if size > _MOST:
        raise InputError(
            f"--format ondevice: the weights take {size:,} bytes; "
            "ONNX Runtime derives graphs below 2 GiB"
        )
    batches = graph.labelled_batches(recipe, whole, data)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        forward = graph.export(whole, batches, Path(scratch) / "forward.onnx")
        _generate(made, recipe, forward, folder)
    with _naming_operators():
        device = Device(place, place.checkpoint)
    worst = largest(
        _difference(device, graph.WithLoss(whole.model, tuple(batch)), batch) for batch in batches
    )
    # `not <=` also refuses nan.
    if not worst <= LIMIT:
        raise EngineError(
            f"ONNX Runtime's outputs differ from PyTorch's by {worst:.3g}; the limit is {LIMIT:g}"
        )
    told = _description(recipe, forward, worst)
    write_json_atomically(place.description, as_json(told))
    write_text_atomically(place.recipe, to_yaml(recipe))
    _save_surroundings(whole, folder, data.tokenizer)
    # A recipe with factories needs the user's own modules where the artifacts are used.
    for module in own_modules() if dict(recipe_factories(recipe)) else ():
        (folder / beside(module)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(module.__file__), folder / beside(module))
    return told


def as_on_a_device(recipe: Recipe, micro_samples: int) -> Recipe:
    """Return the recipe of the artifacts: each step is one pass, and nothing is sharded."""
    alone = dict[str, object](gradient_checkpointing=False)
    # ONNX Runtime derives the gradient of eager attention, which consists of basic operators.
    if not recipe.model.traits.is_own:
        alone["attention"] = "eager"
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=alone),
            "batch": BatchSizes(global_size=None, micro_size=micro_samples, accumulation_steps=1),
            "engine": Engine(name="eager"),
            "zero": None,
            "precision": "fp32",
        }
    )


def _generate(made: Any, recipe: Recipe, forward: Forward, folder: Path) -> None:
    import onnx

    with _quiet(), _naming_operators():
        made.generate_artifacts(
            onnx.load(str(forward.path)), requires_grad=forward.trained, frozen_params=forward.frozen or None,
            optimizer=_optimizer(recipe), artifact_directory=str(folder),
        )  # fmt: skip
    path = DeviceFolder(folder).optimizer
    model = onnx.load(str(path))
    for node in model.graph.node:
        for attribute in node.attribute:
            # Mode 0 is torch.optim.AdamW's: weights decay before the step.
            if attribute.name == "adam_mode":
                attribute.i = 0
    onnx.save(model, str(path))


def _optimizer(recipe: Recipe) -> object:
    """Return the recipe's optimizer, as far as ONNX Runtime supports it on devices."""
    from onnxruntime.training.onnxblock import optim

    chosen = recipe.optimizer
    norm = recipe.train.max_grad_norm
    clip = None if norm is None else optim.ClipGradNorm(norm)
    if chosen.traits.on_device == "SGD":
        return optim.SGD(clip_grad=clip)
    return optim.AdamW(
        betas=tuple(chosen.betas),
        eps=chosen.epsilon,
        weight_decay=chosen.weight_decay,
        clip_grad=clip,
    )


def _notes(recipe: Recipe, forward: Forward) -> Iterator[str]:
    """Yield notes on the recipe's settings that a device does not follow."""
    chosen = recipe.optimizer
    if chosen.traits.on_device_note:
        yield chosen.traits.on_device_note
    decays = chosen.traits.on_device == "AdamW"
    if not decays and (chosen.momentum or chosen.weight_decay):
        yield ("optimizer: ONNX Runtime's SGD for devices has no momentum and no weight_decay")
    if decays and chosen.weight_decay and chosen.no_decay:
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
def _difference(device: Device, module: graph.WithLoss, batch: Batch) -> float:
    """Return the largest difference of loss and logits from PyTorch's, without dropout."""
    expected = module.eval()(*batch.values())
    found = device.evaluate(batch)
    return largest(
        float((torch.from_numpy(one) - other).abs().max())
        for one, other in zip(found.values(), expected)
    )


def _description(recipe: Recipe, forward: Forward, worst: float) -> DeviceArtifacts:
    named = dict.fromkeys(forward.trained, True) | dict.fromkeys(forward.frozen, False)
    # The operators of ONNX Runtime's optimizer graphs.
    used = {"SGD": "SGDOptimizerV2", "AdamW": "AdamWOptimizer"}[recipe.optimizer.traits.on_device]
    return DeviceArtifacts(
        opset=graph.OPSET,
        inputs=list(forward.inputs),
        outputs=list(forward.outputs),
        parameters=[
            DeviceParameter(name, forward.shapes[name], trained) for name, trained in named.items()
        ],
        optimizer=used,
        largest_difference=worst,
        limit=LIMIT,
        notes=[*_notes(recipe, forward)],
    )


def _save_surroundings(whole: LossModule, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model: Any = whole.model
    if hasattr(model, "config"):
        # Training switches the cache off; the saved config has the model's own setting.
        give_back_cache(model, whole.generates_with_cache)
        model.config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _naming_operators() -> Iterator[None]:
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
def _quiet() -> Iterator[None]:
    """Discard the messages of ONNX Runtime's graph transformers while the context is open."""
    # No logging option reaches them, so that the file descriptor of stderr is redirected.
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # Native code writes to the descriptor, not to sys.stderr.
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
