"""Keeps a model's buffers as eager PyTorch would: exact BatchNorm statistics, and no trace of the export.

Refuses what cannot be exact. ONNX Runtime's BatchNorm on CPU averages the biased variance, PyTorch the unbiased one;
the number of values that tells them apart leaves the graph as one more output, which ORTModule's schema never reads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ortlaunch.errors import EngineError
from ortlaunch.ortmodule.base.export import Export, seen_of
from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.source_guard import PACKAGE, PROCESSED, TRAINING, owner
from ortlaunch.ortmodule.torch_in_graph import torch_modules
from ortlaunch.ortmodule.tracing import grad_mode

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, GraphInfo, Manager

_SIZE = "ortlaunch_size_of_"


def keep_buffers_exact() -> None:
    """The export runs the model, so BatchNorm's statistics got its batch twice; and ORT does not count batches.

    Other buffers that a forward pass changes would stay as they are in ORT's graph: such a model is refused.
    """
    wrap_method(owner(PROCESSED), "restore_outputs", _keeping_sizes)
    wrap_method(owner(TRAINING), "forward", _with_exact_statistics)


# ---------------------------------------------------------------------------------------------- in the export


@contextlib.contextmanager
def buffers_kept(export: Export) -> Iterator[None]:
    """Modes and buffers are afterwards what they were; what a pass changes of them is known or refused."""
    module = export.module
    changed: dict[str, int] = {}
    try:
        with (
            kept_modes(module),
            kept_buffers(module, changed),
            _frozen_norms_written_out(export.training),
        ):
            yield
    except Exception:
        with contextlib.suppress(EngineError):  # it may be of what changes a buffer
            _layers(export, changed)
        raise
    layers = _layers(export, changed)
    if export.training:
        export.seen["batch_norms"] = layers


def put_out_batch_sizes(export: Export, model: onnx.ModelProto) -> None:
    """The number of values that each BatchNorm's statistics are of, as outputs of a training graph."""
    if not export.training:
        return
    _refuse_frozen_nodes(model)
    if export.device.type == "cpu":  # on CUDA it is cuDNN, which does as PyTorch
        _put_out_sizes(model, export.seen["batch_norms"])


def with_each_mode(export: AnyFunction) -> AnyFunction:
    """ORT's training export would set every layer to training, also a BatchNorm that the user froze by `eval()`.

    Without gradients custom autograd functions keep nothing: ORT would keep it until a backward pass, for ever.
    """
    modes = torch.onnx.TrainingMode

    @functools.wraps(export)
    def export_as_it_is(module: nn.Module, *args: object, **kwargs: object) -> object:
        gradients = grad_mode.at_start(True)
        if kwargs["training"] != modes.TRAINING or (
            gradients and all(layer.training for layer in module.modules())
        ):
            return export(module, *args, **kwargs)
        exporter: Any = importlib.import_module(f"{PACKAGE}._custom_autograd_function_exporter")
        # it knows no third mode
        asked = exporter._get_training_mode
        exporter._get_training_mode = lambda: gradients
        try:
            return export(module, *args, **{**kwargs, "training": modes.PRESERVE})
        finally:
            exporter._get_training_mode = asked

    return export_as_it_is


@contextlib.contextmanager
def _frozen_norms_written_out(training: bool) -> Iterator[None]:
    """In a training graph ORT would run a BatchNorm in evaluation mode as if it were training: export arithmetic."""
    forward = _BatchNorm.forward

    def written_out(norm: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
        if norm.training or norm.running_var is None or norm.running_mean is None:
            return forward(norm, x)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        scale = (norm.running_var + norm.eps).rsqrt()
        y = (x - norm.running_mean.view(shape)) * scale.view(shape)
        return y * norm.weight.view(shape) + norm.bias.view(shape) if norm.affine else y

    with (
        mock.patch.object(_BatchNorm, "forward", written_out)
        if training
        else contextlib.nullcontext()
    ):
        yield


@contextlib.contextmanager
def kept_modes(module: nn.Module) -> Iterator[None]:
    """Give every layer back its own mode, training or evaluation."""
    modes = [(layer, layer.training) for layer in module.modules()]
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


class _Kept(NamedTuple):
    owner: nn.Module
    name: str
    tensor: torch.Tensor
    value: torch.Tensor


@contextlib.contextmanager
def kept_buffers(module: nn.Module, changed: dict[str, int] | None = None) -> Iterator[None]:
    """Give every buffer back its object and its value; fills `changed`, at the end, with their counts.

    A count is how often one pass added 1 to a single number, as BatchNorm does; 0 for other changes.
    """
    kept = {
        f"{path}.{name}": _Kept(place, name, tensor, tensor.detach().clone())
        for path, place in module.named_modules()
        for name, tensor in place._buffers.items()
        if tensor is not None
    }
    passes: list[None] = []
    # A copy that ORT makes of the module takes the hook along.
    hook = module.register_forward_pre_hook(
        lambda who, _: passes.append(None) if who is module else None
    )
    try:
        yield
    finally:
        hook.remove()
        if changed is not None:
            changed.update(_changed(kept, len(passes)))
        with torch.no_grad():
            for old in kept.values():
                old.owner._buffers[old.name] = old.tensor
                old.tensor.copy_(old.value)


def _changed(kept: dict[str, _Kept], passes: int) -> Iterator[tuple[str, int]]:
    for name, old in kept.items():
        new = old.owner._buffers[old.name]
        if new is not None and _differs(old.value, new):
            counts = old.value.dtype == torch.long and old.value.numel() == 1
            yield name, int(new - old.value) // max(1, passes) if counts else 0


def _differs(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    """Whether a pass changed a value; one of another shape is a table that grew, which a graph does not need."""
    return after is not None and before.shape == after.shape and not torch.equal(before, after)


def _layers(export: Export, changed: dict[str, int]) -> list[str]:
    """The BatchNorm layers that a pass updates, each once.

    Raises:
        EngineError: a buffer that ONNX Runtime's graph would not change as the model does.
        OnceMore: its layer can run as torch.
    """
    module = export.module
    outer = torch_modules.paths(export)
    changed = {
        name: count for name, count in changed.items() if not torch_modules.inside(name, outer)
    }
    layers = sorted({name.rpartition(".")[0] for name in changed})
    for path in layers:
        layer = module.get_submodule(path)
        name = _plain(path)
        if not isinstance(layer, _BatchNorm):
            buffers = ", ".join(
                _plain(buffer) for buffer in changed if buffer.startswith(f"{path}.")
            )
            why = (
                f"a forward pass changes the model's {buffers}, and ONNX Runtime's graph would not"
            )
            raise torch_modules.instead(export, path, why)
        if layer.momentum is None:
            why = (
                f"{name} is a BatchNorm with momentum=None, and ONNX Runtime's cannot average "
                "over all batches"
            )
            raise torch_modules.instead(export, path, f"{why}; give it a momentum such as 0.1")
        if changed.get(f"{path}.num_batches_tracked", 1) > 1:
            why = f"{name} is a BatchNorm that runs more than once in a pass; ONNX Runtime's cannot"
            raise torch_modules.instead(export, path, why)
    return layers


def _plain(name: str) -> str:
    return name.replace("_original_module.", "", 1)


def _put_out_sizes(model: onnx.ModelProto, layers: list[str]) -> None:
    """One more output for each layer: the number of values that its statistics are of, times its channels."""
    from onnx import TensorProto, helper

    normalized = {node.input[4]: node.input[0] for node in _norm_nodes(model)}
    for path in layers:
        if f"{path}.running_var" not in normalized:
            raise EngineError(f"{path} is a BatchNorm inside a branch of ONNX Runtime's graph")
        name = f"{_SIZE}{path}"
        model.graph.node.append(
            helper.make_node("Size", [normalized[f"{path}.running_var"]], [name])
        )
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT64, []))


def _norm_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "BatchNormalization"]


def _refuse_frozen_nodes(model: onnx.ModelProto) -> None:
    for node in _norm_nodes(model):
        if not any(
            attribute.name == "training_mode" and attribute.i for attribute in node.attribute
        ):
            raise EngineError(
                f"{node.name} is frozen batch normalization, which ONNX Runtime would train"
            )


# ------------------------------------------------------------------------------------------------ in each pass


def _keeping_sizes(original: AnyFunction, info: GraphInfo, outputs: list[str]) -> object:
    info._ortlaunch_outputs = outputs
    return original(info, outputs)


def _with_exact_statistics(
    original: AnyFunction, manager: Manager, *args: object, **kwargs: object
) -> object:
    norms = _norms(manager)
    if not norms:
        return original(manager, *args, **kwargs)
    before = {path: norm.running_var.clone() for path, norm in norms.items()}
    output = original(manager, *args, **kwargs)
    transition = manager._graph_transition_manager
    layers = seen_of(transition).get("batch_norms", [])
    info = transition._post_export_processed_model_info
    sizes = (
        info._ortlaunch_outputs[len(info._ortlaunch_outputs) - len(layers) :]
        if manager._device.type == "cpu"
        else []
    )
    with torch.no_grad():
        for path, size in zip(layers, sizes):
            _unbias(norms[path], before[path], int(size))
        for path in layers:
            norms[path].num_batches_tracked.add_(1)
    return output


def _norms(manager: Manager) -> dict[str, Any]:
    """The BatchNorm layers that have statistics."""
    if not hasattr(manager, "_ortlaunch_norms"):
        modules = manager._flattened_module.named_modules()
        manager._ortlaunch_norms = {
            path: module
            for path, module in modules
            if isinstance(module, _BatchNorm) and module.running_var is not None
        }
    norms: dict[str, Any] = manager._ortlaunch_norms
    return norms


def _unbias(norm: Any, before: torch.Tensor, size: int) -> None:
    """From new = (1 - m) before + m biased to (1 - m) before + m biased n / (n - 1)."""
    values = size // norm.running_var.numel()
    if values < 2:  # PyTorch's words
        raise ValueError(f"Expected more than 1 value per channel when training, got {values}")
    share = norm.running_var - (1 - norm.momentum) * before
    norm.running_var.add_(share, alpha=1 / (values - 1))
