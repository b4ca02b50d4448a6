"""Refuse a forward pass that changes weights, and restore weights that an export's passes changed.

ONNX Runtime's graph would omit such a change. A handler of the trace's calls detects
`weight.data = ...`. A dispatch mode detects every operator that writes to a weight's memory, in the plain pass by which
ORT learns a model's outputs. Layers of `setting torch_modules` run as torch in each pass and may
change their weights.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ortmodule._internal.base.export import ExportContext, path_in_model
from ortmodule._internal.base.patching import replace_attribute_temporarily
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, repair
from ortmodule._internal.base.source_guard import PACKAGE
from ortmodule._internal.base.torch_calls import tensor_property_setter
from ortmodule._internal.state.python_values import (
    innermost_frame_of_user_code,
    path_of_running_layer_in_list_or_empty,
)
from ortmodule._internal.torch_in_graph import torch_modules
from ortmodule._internal.tracing.observer import HandlerOrder, handle_calls_of_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortmodule._internal.base.ort_types import AnyFunction, Args, Kwargs

# An assignment to `.data` is no operator, so the dispatch mode does not see it.
_SET_DATA = tensor_property_setter("data")
_PLAIN_PASS = "parse_outputs_for_onnx_export_and_extract_schema"


@repair(
    "refuse_weight_changes",
    "context",
    50,
    fault="Weights that a forward pass changes (`b.data = b.data * 0.9 + a.data * 0.1`, as "
    "MoCo's) stay as they were, without a message: losses of .643 .643 .643 instead of .643 "
    ".521 .422.",
    example="state/test_weight_changes.py::test_a_pass_that_changes_weights_is_refused[.data = ...]",
    sources={
        **EXPORT_SOURCES,
        "_io:parse_outputs_for_onnx_export_and_extract_schema": "c83275c7f572b599",
    },
)
@contextlib.contextmanager
def refuse_weight_changes_and_restore_weights(export_context: ExportContext) -> Iterator[None]:
    """Refuse a pass that changes a weight, while open; restore every weight afterwards."""
    weights = dict(export_context.module.named_parameters())
    original_memories = [(weight, weight.data) for weight in weights.values()]
    names_by_id = _WeightAndLayerNamesById()
    writes = _WeightWriteGuard(names_by_id, weights)

    def record_names(module: nn.Module, _: object) -> None:
        # ORT may run a copy of the module, which has the hook too, so that the copy's weights are
        # known.
        names_by_id.name_by_object.update(
            (id(weight), name) for name, weight in module.named_parameters()
        )
        names_by_id.name_by_memory.update(
            (_shared_memory_id(weight), name) for name, weight in module.named_parameters()
        )
        names_by_id.path_by_layer.update(
            (id(layer), path_in_model(path)) for path, layer in module.named_modules()
        )

    io: Any = importlib.import_module(f"{PACKAGE}._io")
    hook = export_context.module.register_forward_pre_hook(record_names)
    wrapped_pass = functools.partial(
        _run_plain_pass_under_write_guard, writes, getattr(io, _PLAIN_PASS)
    )
    try:
        with (
            replace_attribute_temporarily(io, _PLAIN_PASS, wrapped_pass),
            handle_calls_of_trace(
                HandlerOrder.WEIGHT_CHANGES,
                functools.partial(_call_or_refuse_weight_data_assignment, names_by_id),
            ),
        ):
            yield
    finally:
        hook.remove()
        with torch.no_grad():
            for weight, original_data in original_memories:
                if _shared_memory_id(weight) != _shared_memory_id(original_data):
                    weight.data = original_data
            for name, value in writes.values_before.items():
                weights[name].copy_(value)


def _run_plain_pass_under_write_guard(
    write_guard: _WeightWriteGuard, plain_pass: AnyFunction, *args: object
) -> object:
    with write_guard:
        return plain_pass(*args)


def _refuse_weight_change(weight_name: str, path_by_layer: dict[int, str]) -> None:
    """Raise RuntimeError with the weight, the line that changes it, and a remedy."""
    frame = innermost_frame_of_user_code()
    layer = path_of_running_layer_in_list_or_empty(frame, path_by_layer)
    remedy = f", or let {layer[0]} run as torch (torch_modules={layer})" if layer else ""
    raise RuntimeError(
        f"the forward pass changes the weight {path_in_model(weight_name)} at "
        f"{frame.f_code.co_filename}:{frame.f_lineno}, which ONNX Runtime's graph would leave "
        f"out; change weights outside the forward pass, for example after optimizer.step(){remedy}"
    )


class _WeightAndLayerNamesById:
    """Names of a model's weights and layers, by their identity in the passes of one export."""

    def __init__(self) -> None:
        self.name_by_object: dict[int, str] = {}
        self.name_by_memory: dict[int, str] = {}
        self.path_by_layer: dict[int, str] = {}


def _call_or_refuse_weight_data_assignment(
    names_by_id: _WeightAndLayerNamesById, called_function: AnyFunction, args: Args, kwargs: Kwargs
) -> object:
    if called_function == _SET_DATA and id(args[0]) in names_by_id.name_by_object:
        _refuse_weight_change(names_by_id.name_by_object[id(args[0])], names_by_id.path_by_layer)
    return called_function(*args, **kwargs)


class _WeightWriteGuard(TorchDispatchMode):
    """A mode that refuses operators that write to a weight's memory.

    In layers that run as torch, it keeps the value before the first write.
    """

    def __init__(
        self, names_by_id: _WeightAndLayerNamesById, weight_by_name: dict[str, nn.Parameter]
    ) -> None:
        super().__init__()
        self._names = names_by_id
        self._weights = weight_by_name
        self.values_before: dict[str, torch.Tensor] = {}
        """Values of changed weights before the change."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in _tensors_written_by_call(func._schema, args, kwargs):
                name = self._names.name_by_memory.get(_shared_memory_id(tensor))
                if name is not None and not torch_modules.is_torch_layer_running():
                    _refuse_weight_change(name, self._names.path_by_layer)
                if name is not None and name not in self.values_before:
                    # Of the model's own weight: the pass may be one of a copy.
                    self.values_before[name] = self._weights[name].detach().clone()
        return func(*args, **kwargs)


def _tensors_written_by_call(
    operator_schema: torch._C.FunctionSchema, call_arguments: Args, call_keywords: Kwargs
) -> Iterator[torch.Tensor]:
    for argument_index, argument in enumerate(operator_schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = (
                call_arguments[argument_index]
                if argument_index < len(call_arguments)
                else call_keywords.get(argument.name)
            )
            tensors = [tensor for tensor in _as_list(value) if isinstance(tensor, torch.Tensor)]
            # `set_` of an alias gives the alias another memory, and does not change the weight.
            if operator_schema.name == "aten::set_":
                tensors = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
            yield from tensors


def _as_list(value_or_list: object) -> Sequence[object]:
    return list(value_or_list) if isinstance(value_or_list, (list, tuple)) else [value_or_list]


def _shared_memory_id(tensor: torch.Tensor) -> int:
    """Return an identifier of the memory that a tensor shares with its views."""
    with torch._C.DisableTorchFunction():
        return (
            int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)
        )
