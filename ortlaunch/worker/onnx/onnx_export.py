"""A model as an ONNX graph of its outputs, for batches and texts of any size.

torch's TorchScript exporter writes the graph, as ONNX Runtime 1.19 requires. An export succeeds
only if onnxruntime on the CPU computes the same outputs as PyTorch.
"""

from __future__ import annotations

import inspect
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from ortlaunch.errors import EngineError, InputError, MissingDependency, first_message_line
from ortlaunch.ortmodule.base.torch_calls import untraced
from ortlaunch.ortmodule.torch_in_graph.operator_table import with_forms
from ortlaunch.ortmodule.tracing.tracing import with_autocasts_cache
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.export_records import OnnxCheck
from ortlaunch.worker.data import LoadedData, collate
from ortlaunch.worker.data.media.samples import load_processor
from ortlaunch.worker.data.mixture import at_hand
from ortlaunch.worker.model.model import LossModule, give_back_cache
from ortlaunch.worker.onnx.onnx_own import Exported, own_batches, own_outputs

if TYPE_CHECKING:
    pass

OPSET = 17
# The largest allowed difference of a logit from PyTorch's.
LIMIT = 1e-4
# Bytes: protobuf's 2 GiB, less room for the graph itself.
_MOST_IN_ONE_FILE = 2**31 - 2**16
# Tensors of a batch that are no inputs of the graph: labels, and the additions of packing.
_LABELS = ("labels", "next_sentence_label", "position_ids", "document_ids")

Batch = dict[str, torch.Tensor]


class Sizes(NamedTuple):
    """The variable axes of all inputs and outputs."""

    inputs: dict[str, dict[int, str]]
    """Input to its variable axes, each with the name of its size."""
    outputs: dict[str, dict[int, str]]
    """Output to its variable axes, each with the name of its size."""


class Logits(Exported):
    """A model of transformers without its loss: its logits."""

    def outputs_by_name(self, *tensors: torch.Tensor) -> Batch:
        """Return the same logits by transformers' names."""
        output = self.model(**dict(zip(self.inputs, tensors)), return_dict=True)
        found = {name: value for name, value in output.items() if name.endswith("logits")}
        if not found:
            raise InputError(f"--format onnx: {type(self.model).__name__} returns no logits")
        return found


def onnx(recipe: Recipe, folder: Path, trained: LossModule, data: LoadedData) -> OnnxCheck:
    """Write model.onnx, config and tokenizer into an existing folder.

    Weights above 2 GiB are written into a second file, model.onnx_data.

    Returns:
        The comparison with PyTorch.

    Raises:
        EngineError: the exporter cannot write the model, or the outputs differ from PyTorch's.
        InputError: the model returns nothing that could be an output.
        MissingDependency: onnx or onnxruntime is not installed.
    """
    _require()
    model: Any = trained.model.float()
    if recipe.model.lora:
        model = model.merge_and_unload(safe_merge=True)
    whole: Exported
    if recipe.model.traits.is_own:
        whole, batches = own_outputs(recipe, model, data)
    else:
        batches = media_batches(recipe, model, data) or real_batches(model, data)
        whole = Logits(model, tuple(batches[0])).eval()
    sizes = _sizes(whole, batches)
    decisions = _write(whole, batches[0], sizes, folder)
    # In transformers' models such values are sizes; the comparison shows whether they matter.
    if not recipe.model.traits.is_own:
        decisions = []
    for place in decisions:
        print(
            f"{place}: Python reads a tensor's value here: the graph always uses the value from "
            "the traced batch (for a size write x.shape[0] without int)"
        )
    inputs = _inputs_of_graph(folder / "model.onnx", [*sizes.inputs])
    worst = largest(difference(whole, batch, folder / "model.onnx") for batch in batches)
    # `not <=` also refuses nan.
    if not worst <= LIMIT:
        raise EngineError(
            f"ONNX Runtime's outputs differ from PyTorch's by {worst:.3g}; the limit is {LIMIT:g}"
        )
    _save_surroundings(trained, model, folder, (data.tokenizer, load_processor(recipe)))
    shapes = [_shape(batch, sizes) for batch in batches]
    kept = {name: sizes.inputs[name] for name in inputs}
    axes = {name: [*axes] for name, axes in {**kept, **sizes.outputs}.items()}
    beside = (folder / _BESIDE).exists()
    return OnnxCheck(
        OPSET, inputs, list(sizes.outputs), worst, LIMIT, shapes, beside, axes, decisions
    )


def _shape(batch: Batch, sizes: Sizes) -> list[int]:
    """Return the sizes of the first input's variable axes: samples and, if variable, length."""
    name, value = next(iter(batch.items()))
    return [value.size(axis) for axis in sizes.inputs[name]]


_BESIDE = "model.onnx_data"


def _require() -> None:
    try:
        for name in ("onnx", "onnxruntime"):
            import_module(name)
    except ImportError as error:
        raise MissingDependency(
            f'--format onnx needs {error.name}: pip install "ortlaunch[ort-cpu]", '
            "or onnx and onnxruntime"
        ) from None


@torch.no_grad()
def media_batches(recipe: Recipe, model: Any, data: LoadedData) -> list[Batch] | None:
    """Return three batches of images or recordings of the run's data; None for texts.

    A decoder gets the words before each label, as in training.
    """
    batches = own_batches(recipe, data)
    if "input_ids" in batches[0]:
        return None
    inputs = []
    for batch in batches:
        given = {name: value for name, value in batch.items() if name not in _LABELS}
        if model.config.is_encoder_decoder and "labels" in batch:
            # In training transformers does this inside the pass.
            words = batch["labels"].roll(1, 1)
            words[:, 0] = model.config.decoder_start_token_id
            given["decoder_input_ids"] = words.masked_fill(words < 0, model.config.pad_token_id)
        inputs.append(given)
    return inputs


def real_batches(model: nn.Module, data: LoadedData) -> list[Batch]:
    """Return three batches of the run's own data: padded, shorter, and with a single sample."""
    samples = data.evaluation or data.train
    hand = at_hand(samples)
    whole = collate([samples.sample(hand[index % len(hand)], epoch=0) for index in range(3)])
    length = whole["input_ids"].size(1)
    batch = {}
    for name in _inputs(model, whole):
        batch[name] = whole.get(
            name, torch.full_like(whole["input_ids"], int(name == "attention_mask"))
        )
    padded = {name: value.clone() for name, value in batch.items()}
    pad = getattr(data.tokenizer, "pad_token_id", None) or 0
    for row, kept in enumerate((length, length // 2 + 1, length // 4 + 1)):
        padded["attention_mask"][row, kept:] = 0
        padded["input_ids"][row, kept:] = pad
    shorter = {name: value[:2, : length // 2 + 1] for name, value in padded.items()}
    return [padded, shorter, {name: value[:1] for name, value in batch.items()}]


def _inputs(model: nn.Module, batch: Batch) -> list[str]:
    """Return the names of the graph's inputs, in the order of the parameters of forward.

    They are the batch's tensors without labels, the mask, and token types if the model has several.
    """
    taken = inspect.signature(model.forward).parameters
    if "input_ids" not in batch or "attention_mask" not in taken:
        raise InputError(
            f"--format onnx needs a text model with input_ids and attention_mask; got {[*batch]}"
        )
    wanted = {"attention_mask", *batch} - {*_LABELS}
    if (getattr(model.config, "type_vocab_size", None) or 0) > 1:
        wanted.add("token_type_ids")
    return [name for name in taken if name in wanted]


@torch.no_grad()
def _sizes(whole: Exported, batches: list[Batch]) -> Sizes:
    """Return the variable axes: axis 0, and axes whose size differs between the batches.

    Axes with equal sizes in every batch get one name.
    """
    words: dict[tuple[int, ...], str] = {}

    def axes(several: list[Batch]) -> dict[str, dict[int, str]]:
        found: dict[str, dict[int, str]] = {}
        for name in several[0]:
            found[name] = {0: "batch"}
            for axis, sizes in [*enumerate(zip(*(each[name].shape for each in several)))][1:]:
                if len({*sizes}) > 1:
                    found[name][axis] = words.setdefault(
                        sizes, f"length_{len(words) + 1}" if words else "length"
                    )
        return found

    return Sizes(axes(batches), axes([whole.outputs_by_name(*batch.values()) for batch in batches]))


def _write(whole: Exported, batch: Batch, sizes: Sizes, folder: Path) -> list[str]:
    """Write and check model.onnx, with the weights in a second file if they are too large for one.

    Returns:
        The locations in Python code that read a tensor's value, which tracing makes a constant.
    """
    import onnx

    _require_evaluation(whole)
    parts = folder / "parts"
    parts.mkdir()
    with (
        warnings.catch_warnings(record=True) as told,
        mock.patch.object(torch, "broadcast_tensors", partial(_broadcast, torch.broadcast_tensors)),
    ):
        warnings.simplefilter("ignore")
        # Tracing warns of everything that it makes a constant.
        warnings.simplefilter("always", torch.jit.TracerWarning)
        try:
            # Whisper and MultiheadAttention need these operators.
            export = with_forms(torch.onnx.export, "diff", "cumsum", "unflatten")
            with_autocasts_cache(export)(
                whole, tuple(batch.values()), str(parts / "model.onnx"), input_names=[*sizes.inputs],
                output_names=[*sizes.outputs], dynamic_axes={**sizes.inputs, **sizes.outputs}, opset_version=OPSET,
                dynamo=False,
            )  # fmt: skip
        # The exporter raises many classes of errors; each of them is reported.
        except Exception as error:
            raise EngineError(
                f"--format onnx: the model does not export: {first_message_line(error)}"
            ) from error
    # The exporter sets every module to the mode of the outermost one.
    _require_evaluation(whole)
    written = [path.stat().st_size for path in parts.iterdir()]
    # For such a model the exporter has written a file for each tensor.
    if sum(written) > _MOST_IN_ONE_FILE:
        graph = onnx.load(str(parts / "model.onnx"))
        onnx.save_model(
            graph, str(folder / "model.onnx"), save_as_external_data=True, location=_BESIDE
        )
    else:
        (parts / "model.onnx").replace(folder / "model.onnx")
    shutil.rmtree(parts)
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    # Other warnings of tracing are not about values that Python reads.
    taken = (
        each for each in told if str(each.message).startswith("Converting a tensor to a Python")
    )
    return [*dict.fromkeys(f"{each.filename}:{each.lineno}" for each in taken)]


def _broadcast(plainly: Callable[..., Any], *given: torch.Tensor) -> Sequence[torch.Tensor]:
    """Leave tensors of one size as they are.

    A trace would take the result for the scores themselves, so that the graph would need the labels
    with which mse_loss compares them.
    """
    # In a trace sizes are tensors.
    with untraced():
        shapes = {each.shape for each in given}
    found: Sequence[torch.Tensor] = given if len(shapes) == 1 else plainly(*given)
    return found


def _require_evaluation(module: nn.Module) -> None:
    training = [name for name, part in module.named_modules() if part.training]
    assert not training, f"not in evaluation mode: {training[:3]}"


def _inputs_of_graph(path: Path, inputs: list[str]) -> list[str]:
    """Return the inputs that the graph has, and print the others.

    The exporter leaves out inputs on which no output depends, such as weights of the loss.
    """
    import onnx

    found = {each.name for each in onnx.load(str(path), load_external_data=False).graph.input}
    if unused := [name for name in inputs if name not in found]:
        print(f"not inputs of the graph, because no output depends on them: {', '.join(unused)}")
    return [name for name in inputs if name in found]


@torch.no_grad()
def difference(whole: Exported, batch: Batch, path: Path) -> float:
    """Return the largest difference of any output from PyTorch's, on the CPU.

    Raises:
        EngineError: ONNX Runtime cannot run the graph, or returns another shape.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # ONNX Runtime would also print the error that it raises.
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        given = {each.name: batch[each.name].numpy() for each in session.get_inputs()}
        found = session.run([*whole.outputs_by_name(*batch.values())], given)
    # onnxruntime has a class of its own for each type of error.
    except Exception as error:
        raise EngineError(
            f"--format onnx: ONNX Runtime cannot run it: {first_message_line(error)}"
        ) from error
    return largest(
        _apart(torch.from_numpy(one), other) for one, other in zip(found, whole(*batch.values()))
    )


def largest(differences: Iterable[float]) -> float:
    """Return the largest difference; nan if any is nan."""
    # Python's max ignores a nan that is not the first value.
    return float(torch.tensor([*differences], dtype=torch.float64).max())


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        shapes = f"shape {tuple(one.shape)} by ONNX Runtime, and {tuple(other.shape)} by PyTorch"
        raise EngineError(
            f"--format onnx: an output has {shapes}; sizes that forward reads in Python are fixed"
        )
    if not one.numel():
        return 0.0
    apart = (one.double() - other.double()).abs()
    # The difference of equal infinities is nan, so that equal values are set to 0.
    return float(apart.masked_fill(one == other, 0.0).max())


def _save_surroundings(
    trained: LossModule, model: Any, folder: Path, preparing: Iterable[Any]
) -> None:
    """Write config, tokenizer and processor beside the graph, as in a transformers folder."""
    give_back_cache(model, trained.generates_with_cache)
    if hasattr(getattr(model, "config", None), "save_pretrained"):
        model.config.save_pretrained(folder)
    for part in preparing:
        if part is not None:
            part.save_pretrained(folder)
