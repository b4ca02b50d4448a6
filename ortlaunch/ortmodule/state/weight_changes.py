"""Refuse a forward pass that changes weights, and restore weights that an export's passes changed.

ONNX Runtime's graph would omit such a change. A function mode detects `weight.data = ...`. A
dispatch mode detects every operator that writes to a weight's memory, in the plain pass by which
ORT learns a model's outputs. Layers of `Settings.torch_modules` run as torch in each pass and may
change their weights.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ortlaunch.ortmodule.base.export import Export, own_path
from ortlaunch.ortmodule.base.source_guard import PACKAGE
from ortlaunch.ortmodule.base.torch_calls import setter
from ortlaunch.ortmodule.state.python_values import innermost, user_frame
from ortlaunch.ortmodule.torch_in_graph import torch_modules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Args, Kwargs

# An assignment to `.data` is no operator, so the dispatch mode does not see it.
_SET_DATA = setter("data")
_PLAIN_PASS = "parse_outputs_for_onnx_export_and_extract_schema"


@contextlib.contextmanager
def weights_kept(export: Export) -> Iterator[None]:
    """Refuse a pass that changes a weight, while open; restore every weight afterwards."""
    weights = dict(export.module.named_parameters())
    memories = [(weight, weight.data) for weight in weights.values()]
    names = _NamesById()
    writes = _Writes(names, weights)

    def begin(module: nn.Module, _: object) -> None:
        # ORT may run a copy of the module, which has the hook too, so that the copy's weights are
        # known.
        names.objects.update((id(weight), name) for name, weight in module.named_parameters())
        names.memory.update((_memory(weight), name) for name, weight in module.named_parameters())
        names.layers.update((id(layer), own_path(path)) for path, layer in module.named_modules())

    io: Any = importlib.import_module(f"{PACKAGE}._io")
    hook = export.module.register_forward_pre_hook(begin)
    plain = functools.partial(_under, writes, getattr(io, _PLAIN_PASS))
    try:
        with mock.patch.object(io, _PLAIN_PASS, plain), _Assignments(names):
            yield
    finally:
        hook.remove()
        with torch.no_grad():
            for weight, data in memories:
                if _memory(weight) != _memory(data):
                    weight.data = data
            for name, value in writes.values.items():
                weights[name].copy_(value)


def _under(writes: _Writes, run: AnyFunction, *args: object) -> object:
    with writes:
        return run(*args)


def _refuse(name: str, layers: dict[int, str]) -> None:
    """Raise RuntimeError with the weight, the line that changes it, and a remedy."""
    frame = user_frame()
    layer = innermost(frame, layers)
    remedy = f", or let {layer[0]} run as torch (Settings.torch_modules={layer})" if layer else ""
    raise RuntimeError(
        f"the forward pass changes the weight {own_path(name)} at "
        f"{frame.f_code.co_filename}:{frame.f_lineno}, which ONNX Runtime's graph would leave "
        f"out; change weights outside the forward pass, for example after optimizer.step(){remedy}"
    )


class _NamesById:
    """Names of a model's weights and layers, by their identity in the passes of one export."""

    def __init__(self) -> None:
        self.objects: dict[int, str] = {}
        self.memory: dict[int, str] = {}
        self.layers: dict[int, str] = {}


class _Assignments(TorchFunctionMode):
    """A mode that refuses `weight.data = ...`."""

    def __init__(self, names: _NamesById) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(
        self, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func == _SET_DATA and id(args[0]) in self._names.objects:
            _refuse(self._names.objects[id(args[0])], self._names.layers)
        return func(*args, **(kwargs or {}))


class _Writes(TorchDispatchMode):
    """A mode that refuses operators that write to a weight's memory.

    In layers that run as torch, it keeps the value before the first write.
    """

    def __init__(self, names: _NamesById, weights: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self._names = names
        self._weights = weights
        self.values: dict[str, torch.Tensor] = {}
        """Values of changed weights before the change."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        for tensor in _written(func._schema, args, kwargs) if func._schema.is_mutable else ():
            name = self._names.memory.get(_memory(tensor))
            if name is not None and not torch_modules.is_running():
                _refuse(name, self._names.layers)
            if name is not None and name not in self.values:
                # Of the model's own weight: the pass may be one of a copy.
                self.values[name] = self._weights[name].detach().clone()
        return func(*args, **kwargs)


def _written(schema: torch._C.FunctionSchema, args: Args, kwargs: Kwargs) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call of an operator changes."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written = [tensor for tensor in _listed(value) if isinstance(tensor, torch.Tensor)]
            # `set_` of an alias gives the alias another memory, and does not change the weight.
            if schema.name == "aten::set_":
                written = [tensor for tensor in written if isinstance(tensor, nn.Parameter)]
            yield from written


def _listed(value: object) -> Sequence[object]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _memory(tensor: torch.Tensor) -> int:
    """Return an identifier of the memory that a tensor shares with its views."""
    with torch._C.DisableTorchFunction():
        return (
            int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)
        )
