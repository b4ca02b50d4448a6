"""A model as ONNX: its outputs, for batches and texts of any size, held against PyTorch before it counts.

Written by torch's TorchScript exporter, the one that ONNX Runtime 1.19 goes with; run back by onnxruntime on the CPU.
"""

from __future__ import annotations

import inspect
import shutil
import warnings
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ortlaunch.errors import EngineError, InputError, MissingDependency
from ortlaunch.ortmodule.torch_in_graph.operator_table import with_forms
from ortlaunch.ortmodule.tracing.tracing import with_autocasts_cache
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.export_records import OnnxCheck
from ortlaunch.worker.data import LoadedData, collate
from ortlaunch.worker.model.model import LossModule, give_back_cache
from ortlaunch.worker.onnx.onnx_own import Outputs, own_outputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPSET = 17
LIMIT = 1e-4  # of the largest difference of a logit
_MOST_IN_ONE_FILE = 2**31 - 2**16  # protobuf's 2 GiB, and room for the graph itself
_LABELS = ("labels", "next_sentence_label", "position_ids", "document_ids")  # and what packing adds

Batch = dict[str, torch.Tensor]


class Sizes(NamedTuple):
    """Inputs and outputs, each with its axes whose size is open."""

    inputs: dict[str, dict[int, str]]
    outputs: dict[str, dict[int, str]]


class Logits(nn.Module):
    """`forward(*inputs)` -> the head's logits, a tuple."""

    def __init__(self, model: nn.Module, inputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.named(*tensors).values())

    def named(self, *tensors: torch.Tensor) -> Batch:
        """The same, each under transformers' name."""
        output = self.model(**dict(zip(self.inputs, tensors)), return_dict=True)
        found = {name: value for name, value in output.items() if name.endswith("logits")}
        if not found:
            raise InputError(f"--format onnx: {type(self.model).__name__} returns no logits")
        return found


def onnx(recipe: Recipe, folder: Path, trained: LossModule, data: LoadedData) -> OnnxCheck:
    """model.onnx, its weights beside it where they pass 2 GB, config and tokenizer, into an existing folder.

    Raises:
        EngineError: the exporter cannot write it, or ONNX Runtime's outputs differ from PyTorch's.
        InputError: the model returns nothing that could be an output.
        MissingDependency: onnx or onnxruntime is not installed.
    """
    _require()
    model: Any = trained.model.float()
    if recipe.model.lora:
        model = model.merge_and_unload(safe_merge=True)
    whole: Logits | Outputs
    if recipe.model.traits.is_own:
        whole, batches = own_outputs(recipe, model, data)
    else:
        batches = real_batches(model, data)
        whole = Logits(model, tuple(batches[0])).eval()
    sizes = _sizes(whole, batches)
    decisions = _write(whole, batches[0], sizes, folder)
    if not recipe.model.traits.is_own:
        decisions = []  # transformers' are of sizes; the comparison shows whether they matter
    for place in decisions:
        print(
            f"{place}: Python takes a tensor's value here: "
            "the graph has that of the batch that was traced, for ever"
        )
    inputs = _inputs_of_graph(folder / "model.onnx", [*sizes.inputs])
    worst = largest(difference(whole, batch, folder / "model.onnx") for batch in batches)
    if not worst <= LIMIT:  # nan, too
        raise EngineError(
            f"ONNX Runtime's outputs differ from PyTorch's by {worst:.3g}; the limit is {LIMIT:g}"
        )
    _save_surroundings(trained, model, folder, data.tokenizer)
    shapes = [_shape(batch, sizes) for batch in batches]
    kept = {name: sizes.inputs[name] for name in inputs}
    axes = {name: [*axes] for name, axes in {**kept, **sizes.outputs}.items()}
    beside = (folder / _BESIDE).exists()
    return OnnxCheck(
        OPSET, inputs, list(sizes.outputs), worst, LIMIT, shapes, beside, axes, decisions
    )


def _shape(batch: Batch, sizes: Sizes) -> list[int]:
    """Samples and, where the first input's is open, length."""
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


def real_batches(model: nn.Module, data: LoadedData) -> list[Batch]:
    """Three batches of the run's own data: padded, of another length, and one sample alone."""
    samples = data.evaluation or data.train
    whole = collate([samples.sample(index % len(samples), epoch=0) for index in range(3)])
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
    """In the order of the model's forward: what the data have, the mask, and segments where the model tells them."""
    taken = inspect.signature(model.forward).parameters
    if "input_ids" not in batch or "attention_mask" not in taken:
        raise InputError(
            "--format onnx takes models of texts, with input_ids and attention_mask; "
            f"got {[*batch]}"
        )
    wanted = {"attention_mask", *batch} - {*_LABELS}
    if (getattr(model.config, "type_vocab_size", None) or 0) > 1:
        wanted.add("token_type_ids")
    return [name for name in taken if name in wanted]


@torch.no_grad()
def _sizes(whole: Logits | Outputs, batches: list[Batch]) -> Sizes:
    """Axis 0 is the batch; others are open where two batches differ in them, under one name where they do alike."""
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

    return Sizes(axes(batches), axes([whole.named(*batch.values()) for batch in batches]))


def _write(whole: Logits | Outputs, batch: Batch, sizes: Sizes, folder: Path) -> list[str]:
    """One file, or one with the weights in another beside it; checked by onnx. Where Python took a tensor's value."""
    import onnx

    _require_evaluation(whole)
    parts = folder / "parts"
    parts.mkdir()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", torch.jit.TracerWarning)  # of what tracing cannot see
        try:
            # For Whisper, and MultiheadAttention.
            export = with_forms(torch.onnx.export, "diff", "cumsum", "unflatten")
            with_autocasts_cache(export)(
                whole, tuple(batch.values()), str(parts / "model.onnx"), input_names=[*sizes.inputs],
                output_names=[*sizes.outputs], dynamic_axes={**sizes.inputs, **sizes.outputs}, opset_version=OPSET,
                dynamo=False,
            )  # fmt: skip
        except Exception as error:  # whatever the exporter raises is a reason
            raise EngineError(
                f"--format onnx: the model does not export: {_first_line(error)}"
            ) from error
    _require_evaluation(whole)  # the exporter gives every module the mode that the outermost had
    written = [path.stat().st_size for path in parts.iterdir()]
    if sum(written) > _MOST_IN_ONE_FILE:  # the exporter made a file of each tensor
        graph = onnx.load(str(parts / "model.onnx"))
        onnx.save_model(
            graph, str(folder / "model.onnx"), save_as_external_data=True, location=_BESIDE
        )
    else:
        (parts / "model.onnx").replace(folder / "model.onnx")
    shutil.rmtree(parts)
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    taken = (
        each for each in told if str(each.message).startswith("Converting a tensor to a Python")
    )
    return [*dict.fromkeys(f"{each.filename}:{each.lineno}" for each in taken)]


def _require_evaluation(module: nn.Module) -> None:
    training = [name for name, part in module.named_modules() if part.training]
    assert not training, f"not in evaluation mode: {training[:3]}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _inputs_of_graph(path: Path, inputs: list[str]) -> list[str]:
    """Those that the graph has; the exporter leaves out what no output depends on, as weights of the loss."""
    import onnx

    found = {each.name for each in onnx.load(str(path), load_external_data=False).graph.input}
    unused = [name for name in inputs if name not in found]
    if unused:
        print(
            "no inputs of the graph, whose outputs have nothing of their tensors: "
            f"{', '.join(unused)}"
        )
    return [name for name in inputs if name in found]


@torch.no_grad()
def difference(whole: Logits | Outputs, batch: Batch, path: Path) -> float:
    """The largest of any output, on the CPU.

    Raises:
        EngineError: ONNX Runtime cannot compute it, or gives another shape.
    """
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        given = {each.name: batch[each.name].numpy() for each in session.get_inputs()}
        found = session.run([*whole.named(*batch.values())], given)
    except Exception as error:  # onnxruntime has a class for each, all of them its own
        raise EngineError(
            f"--format onnx: ONNX Runtime cannot run it: {_first_line(error)}"
        ) from error
    return largest(
        _apart(torch.from_numpy(one), other) for one, other in zip(found, whole(*batch.values()))
    )


def largest(differences: Iterable[float]) -> float:
    """Nan where any is: Python's max leaves out one that is not the first."""
    return float(torch.tensor([*differences], dtype=torch.float64).max())


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        shapes = f"shape {tuple(one.shape)} by ONNX Runtime, and {tuple(other.shape)} by PyTorch"
        raise EngineError(
            f"--format onnx: an output has {shapes}; sizes that forward asks in Python are fixed"
        )
    if not one.numel():
        return 0.0
    apart = (one.double() - other.double()).abs()
    return float(apart.masked_fill(one == other, 0.0).max())  # of infinities, too


def _save_surroundings(
    trained: LossModule, model: Any, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """What says how to use it, as beside transformers' weights."""
    give_back_cache(model, trained.generates_with_cache)
    if hasattr(getattr(model, "config", None), "save_pretrained"):
        model.config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
