"""Keep a model's buffers as in eager PyTorch: exact BatchNorm statistics, no trace of the export.

Models whose buffers cannot be exact are refused. ONNX Runtime's BatchNorm on CPU averages the
biased variance, PyTorch the unbiased one. The correction needs the number of values. The graph
returns that number as one more output, which ORTModule's schema never reads.
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
from ortlaunch.ortmodule.base.export import Export, own_path, traced_facts
from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.source_guard import PACKAGE, PROCESSED, TRAINING, owner
from ortlaunch.ortmodule.torch_in_graph import torch_modules
from ortlaunch.ortmodule.tracing import grad_mode

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, GraphInfo, Manager

_SIZE = "ortlaunch_size_of_"


def keep_buffers_exact() -> None:
    """Keep BatchNorm's statistics and counters exact.

    The export runs the model, so without this the statistics would include its batch twice; and ORT
    does not count batches. Other buffers that a forward pass changes would not change in ORT's
    graph: such a model is refused.
    """
    wrap_method(owner(PROCESSED), "restore_outputs", _keeping_sizes)
    wrap_method(owner(TRAINING), "forward", _with_exact_statistics)


# ---------------------------------------------------------------------------------------------- in the export


@contextlib.contextmanager
def buffers_kept(export: Export) -> Iterator[None]:
    """Restore modes and buffers after the export; changes by a pass are recorded or refused."""
    changed: dict[str, int] = {}
    try:
        with (
            kept_modes(export.module),
            kept_buffers(export.module, changed),
            _frozen_norms_written_out(export.training),
        ):
            yield
    except Exception:
        # The failure may come from a layer that changes a buffer; that layer may then run as torch
        # (OnceMore).
        with contextlib.suppress(EngineError):
            _layers(export, changed)
        raise
    layers = _layers(export, changed)
    if export.training:
        export.facts["batch_norms"] = layers


def put_out_batch_sizes(export: Export, model: onnx.ModelProto) -> None:
    """Add outputs to a training graph: the number of values behind each BatchNorm's statistics."""
    if not export.training:
        return
    _refuse_frozen_nodes(model)
    if export.device.type == "cpu":
        # On CUDA cuDNN computes the statistics, in the same way as in PyTorch.
        _put_out_sizes(export, model)


def with_each_mode(export: AnyFunction) -> AnyFunction:
    """Return an export that keeps each layer's own mode and the current grad mode.

    ORT's training export would set every layer to training, also a BatchNorm that the user froze by
    `eval()`. Without gradients, custom autograd functions save nothing: ORT would keep the saved
    tensors until a backward pass that never comes.
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
        asked = exporter._get_training_mode
        # ORT's own function handles no mode besides TRAINING and EVAL.
        exporter._get_training_mode = lambda: gradients
        try:
            return export(module, *args, **{**kwargs, "training": modes.PRESERVE})
        finally:
            exporter._get_training_mode = asked

    return export_as_it_is


@contextlib.contextmanager
def _frozen_norms_written_out(training: bool) -> Iterator[None]:
    """Export a BatchNorm in evaluation mode as plain arithmetic.

    In a training graph ORT would run it as if it were in training mode.
    """
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
    """Restore every layer's own mode, training or evaluation, afterwards."""
    modes = [(layer, layer.training) for layer in module.modules()]
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


class _Buffer(NamedTuple):
    owner: nn.Module
    name: str
    tensor: torch.Tensor
    value: torch.Tensor


@contextlib.contextmanager
def kept_buffers(module: nn.Module, changed: dict[str, int] | None = None) -> Iterator[None]:
    """Restore every buffer's object and value; fill `changed`, at the end, with their counts.

    A count is the number of times that one pass added 1 to a single integer, as BatchNorm does; it
    is 0 for other changes.
    """
    kept = {
        f"{path}.{name}": _Buffer(place, name, tensor, tensor.detach().clone())
        for path, place in module.named_modules()
        for name, tensor in place._buffers.items()
        if tensor is not None
    }
    # The export runs the model several times; counts are divided by the number of passes.
    passes: list[None] = []
    # A copy that ORT makes of the module has the hook too, and is not counted.
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


def _changed(kept: dict[str, _Buffer], passes: int) -> Iterator[tuple[str, int]]:
    for name, old in kept.items():
        new = old.owner._buffers[old.name]
        if new is not None and _differs(old.value, new):
            # As num_batches_tracked is.
            counts = old.value.dtype == torch.long and old.value.numel() == 1
            yield name, int(new - old.value) // max(1, passes) if counts else 0


def _differs(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    """Return whether a pass changed a value.

    A value of another shape is a table that grew, which a graph does not need.
    """
    return after is not None and before.shape == after.shape and not torch.equal(before, after)


def _layers(export: Export, changed: dict[str, int]) -> list[str]:
    """Return the BatchNorm layers that a pass updates, each once.

    Raises:
        EngineError: a pass changes a buffer that ONNX Runtime's graph would not change.
        OnceMore: the layer of such a buffer can run as torch.
    """
    outer = torch_modules.paths(export)
    changed = {
        name: count for name, count in changed.items() if not torch_modules.inside(name, outer)
    }
    layers = sorted({name.rpartition(".")[0] for name in changed})
    for path in layers:
        layer = export.module.get_submodule(path)
        name = own_path(path)
        if not isinstance(layer, _BatchNorm):
            buffers = ", ".join(
                own_path(buffer) for buffer in changed if buffer.startswith(f"{path}.")
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


def _put_out_sizes(export: Export, model: onnx.ModelProto) -> None:
    """Add an output for each layer: the number of values behind its statistics, times its channels."""
    from onnx import TensorProto, helper

    # Input 4 of a BatchNormalization is the running variance.
    normalized = {node.input[4]: node.input[0] for node in _norm_nodes(model)}
    for path in export.facts["batch_norms"]:
        if f"{path}.running_var" not in normalized:
            why = (
                f"{own_path(path)} is a BatchNorm inside a branch, or of a batch whose size follows "
                "from values and may be 0; ONNX Runtime's graph cannot update its statistics"
            )
            raise torch_modules.instead(export, path, why)
        name = f"{_SIZE}{path}"
        model.graph.node.append(
            helper.make_node("Size", [normalized[f"{path}.running_var"]], [name])
        )
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT64, []))


def _norm_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "BatchNormalization"]


def _refuse_frozen_nodes(model: onnx.ModelProto) -> None:
    """Raise EngineError if a BatchNormalization node is in evaluation mode."""
    for node in _norm_nodes(model):
        if not any(
            attribute.name == "training_mode" and attribute.i for attribute in node.attribute
        ):
            raise EngineError(
                f"{node.name} is frozen batch normalization, which ONNX Runtime would train"
            )


# ------------------------------------------------------------------------------------------------ in each pass


def _keeping_sizes(original: AnyFunction, info: GraphInfo, outputs: list[str]) -> object:
    """Keep ORT's outputs, because the schema drops the added ones."""
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
    layers = traced_facts(transition).get("batch_norms", [])
    info = transition._post_export_processed_model_info
    # Only the CPU's graph has these outputs, and they come last.
    sizes = (
        info._ortlaunch_outputs[len(info._ortlaunch_outputs) - len(layers) :]
        if manager._device.type == "cpu"
        else []
    )
    with torch.no_grad():
        for path, size in zip(layers, sizes):
            _unbias(norms[path], before[path], int(size))
        for path in layers:
            # ORT's node does not count batches, on any device.
            norms[path].num_batches_tracked.add_(1)
    return output


def _norms(manager: Manager) -> dict[str, Any]:
    """Return the BatchNorm layers that have statistics, by path."""
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
    """Replace the biased variance of this batch by the unbiased one, in the running variance.

    The running variance changes from (1 - m) before + m biased to (1 - m) before + m biased n / (n
    - 1).
    """
    values = size // norm.running_var.numel()
    # The error has PyTorch's text.
    if values < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got {values}")
    # m times the biased variance of this batch.
    share = norm.running_var - (1 - norm.momentum) * before
    norm.running_var.add_(share, alpha=1 / (values - 1))
