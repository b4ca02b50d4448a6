"""A transformers model as ONNX: its logits, for batches and texts of any size, held against PyTorch before it counts.

Written by torch's TorchScript exporter, the one that ONNX Runtime 1.19 goes with; run back by onnxruntime on the CPU.
"""

from __future__ import annotations

import inspect
import shutil
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ortlaunch.errors import EngineError, InputError, MissingDependency
from ortlaunch.recipe import Recipe
from ortlaunch.run.export_records import OnnxCheck
from ortlaunch.worker.data import Data, collate
from ortlaunch.worker.model import LossModule, give_back_cache

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
        self.model, self.inputs = model, inputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.named(*tensors).values())

    def named(self, *tensors: torch.Tensor) -> Batch:
        """The same, each under transformers' name."""
        output = self.model(**dict(zip(self.inputs, tensors)), return_dict=True)
        return {name: value for name, value in output.items() if name.endswith("logits")}


def onnx(recipe: Recipe, folder: Path, trained: LossModule, data: Data) -> OnnxCheck:
    """model.onnx, its weights beside it where they pass 2 GB, config and tokenizer, into an existing folder.

    Raises:
        EngineError: ONNX Runtime's logits differ from PyTorch's.
        InputError: the model is the user's own, or its logits cannot be told from its other outputs.
        MissingDependency: onnx or onnxruntime is not installed.
    """
    _require()
    refuse_own(recipe)
    model: Any = trained.model.float()
    if recipe.model.lora:
        model = model.merge_and_unload(safe_merge=True)
    batches = real_batches(model, data)
    logits = Logits(model, tuple(batches[0])).eval()
    sizes = _sizes(logits, batches)
    _write(logits, batches[0], sizes, folder)
    worst = max(difference(logits, batch, folder / "model.onnx") for batch in batches)
    if not worst <= LIMIT:  # nan, too
        raise EngineError(f"ONNX Runtime's logits differ from PyTorch's by {worst:.3g}; the limit is {LIMIT:g}")
    _save_surroundings(trained, model, folder, data.tokenizer)
    shapes = [list(next(iter(batch.values())).shape[:2]) for batch in batches]
    return OnnxCheck(OPSET, list(sizes.inputs), list(sizes.outputs), worst, LIMIT, shapes, (folder / _BESIDE).exists())


_BESIDE = "model.onnx_data"


def refuse_own(recipe: Recipe) -> None:
    """A model of the user's own is trained by the loss that it returns: which output others want, it does not say.

    Raises:
        InputError: it is one.
    """
    if recipe.model.task == "custom":
        raise InputError(
            "--format onnx takes transformers' models, and model.factory's is your own: export huggingface, load its "
            "model.safetensors, and give torch.onnx.export the outputs that you want"
        )


def _require() -> None:
    try:
        for name in ("onnx", "onnxruntime"):
            import_module(name)
    except ImportError as error:
        raise MissingDependency(
            f'--format onnx needs {error.name}: pip install "ortlaunch[ort-cpu]", or onnx and onnxruntime'
        ) from None


def real_batches(model: nn.Module, data: Data) -> list[Batch]:
    """Three batches of the run's own data: padded, of another length, and one sample alone."""
    samples = data.evaluation or data.train
    whole = collate([samples.sample(index % len(samples), epoch=0) for index in range(3)])
    length, batch = whole["input_ids"].size(1), {}
    for name in _inputs(model, whole):
        batch[name] = whole.get(name, torch.full_like(whole["input_ids"], int(name == "attention_mask")))
    padded = {name: value.clone() for name, value in batch.items()}
    pad = getattr(data.tokenizer, "pad_token_id", None) or 0
    for row, kept in enumerate((length, length // 2 + 1, length // 4 + 1)):
        padded["attention_mask"][row, kept:] = 0
        padded["input_ids"][row, kept:] = pad
    shorter = {name: value[:2, : length // 2 + 1] for name, value in padded.items()}
    return [padded, shorter, {name: value[:1] for name, value in batch.items()}]


def _inputs(model: Any, batch: Batch) -> list[str]:
    """In the order of the model's forward: what the data have, the mask, and segments where the model tells them."""
    taken = inspect.signature(model.forward).parameters
    if "input_ids" not in batch or "attention_mask" not in taken:
        raise InputError(f"--format onnx takes models of texts, with input_ids and attention_mask; got {[*batch]}")
    wanted = {"attention_mask", *batch} - {*_LABELS}
    if (getattr(model.config, "type_vocab_size", None) or 0) > 1:
        wanted.add("token_type_ids")
    return [name for name in taken if name in wanted]


@torch.no_grad()
def _sizes(logits: Logits, batches: list[Batch]) -> Sizes:
    """Axis 1 is the text's length where it follows that of the inputs."""
    long, short = (logits.named(*batch.values()) for batch in batches[:2])
    if not long:
        raise InputError(f"--format onnx: {type(logits.model).__name__} returns no logits")
    follows = {name: long[name].dim() > 1 and long[name].size(1) != short[name].size(1) for name in long}
    outputs = {name: {0: "batch", **({1: "length"} if follows[name] else {})} for name in long}
    return Sizes({name: {0: "batch", 1: "length"} for name in logits.inputs}, outputs)


def _write(logits: Logits, batch: Batch, sizes: Sizes, folder: Path) -> None:
    """One file, or one with the weights in another beside it; checked by onnx."""
    import onnx

    _require_evaluation(logits)
    parts = folder / "parts"
    parts.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what tracing cannot see; the comparison shows whether it mattered
        torch.onnx.export(
            logits, tuple(batch.values()), str(parts / "model.onnx"), input_names=[*sizes.inputs],
            output_names=[*sizes.outputs], dynamic_axes={**sizes.inputs, **sizes.outputs}, opset_version=OPSET,
            dynamo=False,
        )  # fmt: skip
    _require_evaluation(logits)  # the exporter gives every module the mode that the outermost had
    written = [path.stat().st_size for path in parts.iterdir()]
    if sum(written) > _MOST_IN_ONE_FILE:  # the exporter made a file of each tensor
        whole = onnx.load(str(parts / "model.onnx"))
        onnx.save_model(whole, str(folder / "model.onnx"), save_as_external_data=True, location=_BESIDE)
    else:
        (parts / "model.onnx").replace(folder / "model.onnx")
    shutil.rmtree(parts)
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)


def _require_evaluation(module: nn.Module) -> None:
    training = [name for name, part in module.named_modules() if part.training]
    assert not training, f"not in evaluation mode: {training[:3]}"


@torch.no_grad()
def difference(logits: Logits, batch: Batch, path: Path) -> float:
    """The largest of any logit, on the CPU."""
    import onnxruntime

    expected = logits(*batch.values())
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, {name: value.numpy() for name, value in batch.items()})
    return max(float((torch.from_numpy(one) - other).abs().max()) for one, other in zip(found, expected))


def _save_surroundings(trained: LossModule, model: Any, folder: Path, tokenizer: Any) -> None:
    """What says how to use it, as beside transformers' weights."""
    give_back_cache(model, trained.generates_with_cache)
    model.config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
