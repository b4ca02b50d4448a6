"""Tensors of a traced model that share memory: a change in place through one is one of the others, too.

torch's exporter changes the tensor that it is made through, and what that was sliced from in the same line of a model's
source; every other one stays as it was. Here such a tensor is computed anew where it is used next.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ortlaunch.ortmodule.base.torch_calls import getter, untraced
from ortlaunch.ortmodule.tracing.grad_mode import (
    CHANGED,
    CHANGED_WEIGHT,
    Export,
    tensors,
    versions_of,
)

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Args, Kwargs

View = Callable[[Tensor], Tensor]
# What is asked of a tensor's form; a change is of no account.
_FORMS = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__, getter("shape"),
          getter("ndim"), getter("dtype"), getter("device"), Tensor.is_floating_point}  # fmt: skip
# Called with one of Python's bools, which TorchScript takes for no number.
_WITH_BOOL = {
    Tensor.__and__, Tensor.__rand__, Tensor.__or__, Tensor.__ror__, Tensor.__xor__, Tensor.__rxor__, Tensor.__eq__,
    Tensor.__ne__, Tensor.eq, Tensor.ne, torch.eq, torch.ne, Tensor.bitwise_and, Tensor.bitwise_or, Tensor.bitwise_xor,
    torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor, Tensor.masked_fill, Tensor.masked_fill_, torch.masked_fill,
    Tensor.fill_, Tensor.where, torch.where, Tensor.__mul__, Tensor.__rmul__, Tensor.mul, torch.mul,
}  # fmt: skip
_DETACHED = {Tensor.detach, torch.detach, getter("data")}


def following_changes(export: Export) -> Export:
    """An export in which tensors that share memory change together."""

    @functools.wraps(export)
    def export_with_aliases(model: torch.nn.Module, *args: object, **kwargs: object) -> object:
        with _Aliases(model):
            return export(model, *args, **kwargs)

    return export_with_aliases


@dataclass(eq=False)
class _Memory:
    """What some tensors share."""

    whole: Tensor
    """All of it, as it is after every change but the pending ones."""
    weight: bool
    first: weakref.ref[_Alias]
    """The tensor that the others are views of."""
    changes: int = 0
    pending: list[tuple[_Alias, Tensor]] = field(default_factory=list)


@dataclass(eq=False)
class _Alias:
    """One of the tensors."""

    memory: Callable[[], _Memory | None]
    held: _Memory | None
    """The same, for as long as the tensor lives; not by the first one, which would then live throughout the export."""
    views: tuple[View, ...] = ()
    """How it is made of the whole."""
    obstacle: str = ""
    """Why nothing can be written to the whole through it."""
    value: Tensor | None = None
    """What stands for it in the trace; None for itself."""
    changes: int = 0
    """Those of the memory that it shows."""


class _Aliases(TorchFunctionMode):
    """Follows every call of torch's functions: what shares memory with what, and what changes it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._known = WeakTensorKeyDictionary()

    def __enter__(self) -> _Aliases:
        self._hook = self._model.register_forward_hook(
            lambda model, given, output: self._current(output)
        )
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._hook.remove()

    def __torch_function__(
        self, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _FORMS:
            return func(*args, **kwargs)
        if func in _WITH_BOOL:
            args, kwargs = tree_map_only(bool, torch.tensor, (args, kwargs))
        given = tensors((args, kwargs))
        values = [self._value(tensor) for tensor in given]
        if any(value is not tensor for value, tensor in zip(values, given)):
            args, kwargs = self._current((args, kwargs))
        if func is Tensor.copy_ and given[0] is not given[-1] and self._is_view(given[0]):
            return self._copied(given[0], *args, **kwargs)
        versions = versions_of(values)
        result = func(*args, **kwargs)
        self._made(func, args, kwargs, given, values, result)
        pairs = zip(given, values, versions, versions_of(values))
        changed = [(tensor, value) for tensor, value, before, after in pairs if before != after]
        for tensor, value in _targets(changed, result):
            self._changed(tensor, value)
        return result

    def _is_view(self, tensor: Tensor) -> bool:
        alias = self._known.get(tensor)
        return alias is not None and bool(alias.views)

    def _copied(
        self, tensor: Tensor, value: Tensor, source: Tensor, *rest: bool, **named: bool
    ) -> Tensor:
        """`view.copy_(source)`: torch's exporter takes the whole for the view afterwards."""
        new = source.to(value.dtype).expand(value.shape)
        with untraced():
            value.copy_(source, *rest, **named)
        self._changed(tensor, new)
        return tensor

    def _current(self, values: object) -> Any:
        """Arguments or results with the values that they have after changes through others."""
        return tree_map_only(Tensor, self._value, values)

    def _value(self, tensor: Tensor) -> Tensor:
        alias = self._known.get(tensor)
        if alias is None:
            return tensor
        memory = alias.memory()
        if memory and alias.changes != memory.changes:
            alias.value = _through(alias.views, _written(memory))
            alias.changes = memory.changes
        return tensor if alias.value is None else alias.value

    def _made(
        self,
        func: AnyFunction,
        args: Args,
        kwargs: Kwargs,
        given: Sequence[Tensor],
        values: Sequence[Tensor],
        result: object,
    ) -> None:
        """Note which results are views of which arguments."""
        for place, output in enumerate(tree_leaves(result)):
            if not isinstance(output, Tensor) or any(output is value for value in values):
                continue
            for tensor, value in zip(given, values):
                if _share(output, value):
                    source, memory = self._source(tensor, value)
                    views = (*source.views, _again(func, args, kwargs, value, place))
                    obstacle = source.obstacle or _obstacle(func, value, output)
                    self._known[output] = _Alias(
                        source.memory, memory, views, obstacle, changes=memory.changes
                    )
                    break

    def _source(self, tensor: Tensor, value: Tensor) -> tuple[_Alias, _Memory]:
        """What is known of a tensor of which there is a view now."""
        alias = self._known.get(tensor)
        memory = alias.memory() if alias else None
        if alias is None or memory is None:
            alias = self._known[tensor] = _Alias(lambda: None, None)
            memory = _Memory(value, isinstance(tensor, torch.nn.Parameter), weakref.ref(alias))
            alias.memory = weakref.ref(memory)
        return alias, memory

    def _changed(self, tensor: Tensor, value: Tensor) -> None:
        """Note that the tensor, for which `value` stands, has been changed in place."""
        alias = self._known.get(tensor)
        memory = alias.memory() if alias else None
        if alias is None or memory is None:
            return
        if memory.weight:
            raise RuntimeError(CHANGED_WEIGHT)
        if (
            not torch.is_grad_enabled() and memory.whole.requires_grad
        ):  # as the model sees it: grad_mode.py
            raise RuntimeError(CHANGED)
        memory.changes += 1
        alias.changes = memory.changes
        alias.value = None if value is tensor else value
        if not memory.pending or memory.pending[-1][0] is not alias:
            memory.pending.append((alias, value))
        first = memory.first()
        if first:
            first.held = memory


def _targets(
    changed: Sequence[tuple[Tensor, Tensor]], result: object
) -> list[tuple[Tensor, Tensor]]:
    """Through which tensors a call changed memory: of several that share it, the one that it returns, or the first."""
    targets: list[tuple[Tensor, Tensor]] = []
    made = tensors(result)
    for tensor, value in sorted(
        changed, key=lambda pair: not any(pair[1] is output for output in made)
    ):
        if not any(_share(value, other) for _, other in targets):
            targets.append((tensor, value))
    return targets


def _share(one: Tensor, other: Tensor) -> bool:
    try:
        with torch._C.DisableTorchFunction():
            return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse ones and the like
        return False


def _again(func: AnyFunction, args: Args, kwargs: Kwargs, old: Tensor, place: int) -> View:
    """The same view of another tensor."""

    def view(new: Tensor) -> Tensor:
        given, named = tree_map_only(
            Tensor, lambda tensor: new if tensor is old else tensor, (args, kwargs)
        )
        output: Tensor = tree_leaves(func(*given, **named))[place]
        return output

    return view


def _obstacle(func: AnyFunction, source: Tensor, output: Tensor) -> str:
    name = getattr(func, "__name__", "")
    if func in _DETACHED and source.requires_grad:
        return "one of them is detached"
    if name == "apply":
        return "one of them is a custom autograd function's"
    return (
        "one of them reads it in another form"
        if source.dtype != output.dtype or name == "as_strided"
        else ""
    )


def _through(views: Sequence[View], value: Tensor) -> Tensor:
    for view in views:
        value = view(value)
    return value


def _written(memory: _Memory) -> Tensor:
    """The whole with the pending changes."""
    for alias, value in memory.pending:
        if alias.obstacle:
            raise RuntimeError(
                f"tensors that share memory are changed in place, and {alias.obstacle}: ONNX Runtime's graph cannot "
                "show it; write the change without a trailing underscore"
            )
        if alias.views:
            sizes = memory.whole.shape
            places = _through(
                alias.views, torch.arange(memory.whole.numel(), device=value.device).view(sizes)
            )
            memory.whole = (
                memory.whole.flatten().scatter(0, places.flatten(), value.flatten()).view(sizes)
            )
        else:
            memory.whole = value
    memory.pending.clear()
    return memory.whole
