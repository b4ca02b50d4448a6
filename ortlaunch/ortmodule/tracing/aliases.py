"""In-place changes of tensors that share memory, in a traced model.

A change through one tensor changes all tensors that share its memory. torch's exporter applies it
only to the tensor that it is made through, and to the tensor that this one was sliced from in the
same line of the model's source. Here every other such tensor is recomputed where it is used next.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.torch_calls import getter, untraced
from ortlaunch.ortmodule.tracing import python_state
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
# Functions that read only a tensor's metadata, which no in-place change of values affects.
_FORMS = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__, getter("shape"),
          getter("ndim"), getter("dtype"), getter("device"), Tensor.is_floating_point}  # fmt: skip
# Functions whose Python bool arguments become tensors, because TorchScript does not accept a bool
# as a number.
_WITH_BOOL = {
    Tensor.__and__, Tensor.__rand__, Tensor.__or__, Tensor.__ror__, Tensor.__xor__, Tensor.__rxor__, Tensor.__eq__,
    Tensor.__ne__, Tensor.eq, Tensor.ne, torch.eq, torch.ne, Tensor.bitwise_and, Tensor.bitwise_or, Tensor.bitwise_xor,
    torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor, Tensor.masked_fill, Tensor.masked_fill_, torch.masked_fill,
    Tensor.fill_, Tensor.where, torch.where, Tensor.__mul__, Tensor.__rmul__, Tensor.mul, torch.mul,
}  # fmt: skip
_OF_FORM = {"detach", "resize", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze"}
_COMPLEX_PLACES = (
    "the model writes into a complex tensor at places that a tensor gives, and ONNX Runtime's graph "
    "would lose the imaginary parts: write torch.where, masked_fill or index_copy"
)
_DETACHED = {Tensor.detach, torch.detach, getter("data")}


def following_changes(export: Export) -> Export:
    """Wrap an export so that in-place changes reach all tensors that share memory."""

    @functools.wraps(export)
    def export_with_aliases(model: torch.nn.Module, *args: object, **kwargs: object) -> object:
        with _Aliases(model):
            return export(model, *args, **kwargs)

    return export_with_aliases


@dataclass(eq=False)
class _Memory:
    """The memory that several tensors share."""

    whole: Tensor
    """The whole memory, after every change but the pending ones."""
    weight: bool
    """Whether it is a weight's memory."""
    first: weakref.ref[_Alias]
    """The tensor that the others are views of."""
    changes: int = 0
    """The number of in-place changes so far."""
    pending: list[tuple[_Alias, Tensor]] = field(default_factory=list)
    """Changes that `whole` does not include yet: the changed tensor and its new value."""


@dataclass(eq=False)
class _Alias:
    """One of the tensors that share memory."""

    memory: Callable[[], _Memory | None]
    """A weak reference to the memory."""
    held: _Memory | None
    """A strong reference to the memory, which keeps it for as long as this tensor lives.

    It is None for the first tensor until a change: the memory refers to that tensor, which would
    then live throughout the export.
    """
    views: tuple[View, ...] = ()
    """The calls that make this tensor from the whole memory."""
    obstacle: str = ""
    """Why a change through this tensor cannot be written to the whole memory; empty if it can."""
    value: Tensor | None = None
    """The tensor that replaces this one in the trace; None if the tensor itself is current."""
    changes: int = 0
    """The number of the memory's changes that the value includes."""


class _Aliases(TorchFunctionMode):
    """A function mode that tracks which tensors share memory, and which calls change it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        # Weak keys: the mode must not keep the model's tensors alive.
        self._known = WeakTensorKeyDictionary()
        self._given: list[Tensor] = []

    def __enter__(self) -> _Aliases:
        self._hooks = (
            self._model.register_forward_hook(lambda model, given, output: self._current(output)),
            self._model.register_forward_pre_hook(self._begin),
        )
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def _begin(self, model: torch.nn.Module, given: Sequence[object]) -> None:
        self._given = tensors(given)

    def __torch_function__(
        self, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _FORMS:
            return func(*args, **kwargs)
        if args and isinstance(args[0], Tensor):
            func, args, kwargs = self._exportable(func, types, args, kwargs)
        if func in _WITH_BOOL:
            args, kwargs = tree_map_only(bool, torch.tensor, (args, kwargs))
        given = tensors((args, kwargs))
        values = [self._value(tensor) for tensor in given]
        # Replace tensors that are out of date by their current values.
        if any(value is not tensor for value, tensor in zip(values, given)):
            args, kwargs = self._current((args, kwargs))
        if (
            func is Tensor.copy_
            and given[0] is not given[-1]
            and (self._is_view(given[0]) or given[0].dtype.is_complex)
        ):
            return self._copied(given[0], *args, **kwargs)
        versions = versions_of(values)
        result = func(*args, **kwargs)
        self._made(func, args, kwargs, given, values, result)
        pairs = zip(given, values, versions, versions_of(values))
        changed = [(tensor, value) for tensor, value, before, after in pairs if before != after]
        for tensor, value in _targets(changed, result):
            if any(_share(tensor, given) for given in self._given):
                _note_change_of_argument()
            self._changed(tensor, value)
        return result

    def _exportable(
        self, func: AnyFunction, types: object, args: Args, kwargs: Kwargs
    ) -> tuple[AnyFunction, Args, Kwargs]:
        """Return a change in place in a form that the exporter writes right; other calls as given."""
        x = args[0]
        if func is Tensor.__setitem__ and x.dtype.is_complex:
            # Of complex numbers the exporter would lose the imaginary parts.
            part: Any = self.__torch_function__(Tensor.__getitem__, types, args[:2])
            if not self._is_view(part):
                raise RuntimeError(_COMPLEX_PLACES)
            return Tensor.copy_, (part, _like(args[2], part)), {}
        if func is Tensor.__setitem__ and (parts := _split(args[1])):
            # The exporter would take the mask for an index.
            view, masked = parts
            part = self.__torch_function__(Tensor.__getitem__, types, (x, view))
            return self._exportable(func, types, (part, masked, args[2]), kwargs)
        if func is Tensor.__setitem__ and (places := _places(args[1])):
            value = args[2]
            if isinstance(value, Tensor) and 0 < value.dim() <= x.dim():
                # torch would cut off a first dimension of `value` that is 1 in this batch.
                func, args = torch.ops.aten.index_put_, (x, places, value)
            elif self._is_view(x):
                func, args = Tensor.index_put_, (x, places, _like(value, x))
        # For a part that is written at places the exporter would use the whole tensor.
        of_part = func is Tensor.index_put_ and self._is_view(x)
        if (of_part or x.dtype.is_complex) and (new := _without_change(func)):
            return Tensor.copy_, (x, self.__torch_function__(new, types, args, kwargs)), {}
        return func, args, kwargs

    def _is_view(self, tensor: Tensor) -> bool:
        alias = self._known.get(tensor)
        return alias is not None and bool(alias.views)

    def _copied(
        self, tensor: Tensor, value: Tensor, source: Tensor, *rest: bool, **named: bool
    ) -> Tensor:
        """Run `view.copy_(source)` outside the trace, and record the change.

        After a traced copy_ torch's exporter would use the whole tensor for the view.
        """
        new = source.to(value.dtype).expand(value.shape)
        with untraced():
            value.copy_(source, *rest, **named)
        # The record holds the new value; it lives as long as its memory.
        memory = self._source(tensor, value)[1]
        self._changed(tensor, new)
        del memory
        return tensor

    def _current(self, values: object) -> Any:
        """Return arguments or results with their values after changes through other tensors."""
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
        """Record which results are views of which arguments."""
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
        """Return the records of a tensor that has a view now; create them for a new tensor."""
        alias = self._known.get(tensor)
        memory = alias.memory() if alias else None
        if alias is None or memory is None:
            alias = self._known[tensor] = _Alias(lambda: None, None)
            memory = _Memory(value, isinstance(tensor, torch.nn.Parameter), weakref.ref(alias))
            alias.memory = weakref.ref(memory)
        return alias, memory

    def _changed(self, tensor: Tensor, value: Tensor) -> None:
        """Record an in-place change of a tensor, whose value in the trace is `value`."""
        alias = self._known.get(tensor)
        memory = alias.memory() if alias else None
        if alias is None or memory is None:
            return
        # A weight is an input of ORT's graph, which would leave the change out.
        if memory.weight:
            raise RuntimeError(CHANGED_WEIGHT)
        # grad_mode.py intercepts both reads; they return the values that the model sees.
        if not torch.is_grad_enabled() and memory.whole.requires_grad:
            raise RuntimeError(CHANGED)
        memory.changes += 1
        alias.changes = memory.changes
        alias.value = None if value is tensor else value
        # Consecutive changes through one tensor are one entry: its value has all of them.
        if not memory.pending or memory.pending[-1][0] is not alias:
            memory.pending.append((alias, value))
        # From now on the first tensor, too, must keep the memory with its changes.
        if first := memory.first():
            first.held = memory


def _note_change_of_argument() -> None:
    frame = python_state.model_frame()
    line = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
    tally.note(
        f"the forward pass changes an argument in place{line}: the graph computes with the change, "
        "and the caller's tensor stays as it was"
    )


def _without_change(func: AnyFunction) -> AnyFunction | None:
    """Return the function that computes what `mul_` or `__imul__` writes; None for others."""
    match = re.fullmatch(r"__i(\w+)__|(\w*[a-z0-9])_", getattr(func, "__name__", ""))
    name = match and (f"__{match[1]}__" if match[1] else match[2])
    others: dict[str, AnyFunction] = {
        "fill": lambda x, value: torch.zeros_like(x) + value,
        "zero": torch.zeros_like,
    }
    found = (getattr(Tensor, name, None) or others.get(name)) if name else None
    # `requires_grad_` has an attribute of its name; the others change a form, and no values.
    return found if callable(found) and name not in _OF_FORM else None


def _split(index: object) -> tuple[Args, Args] | None:
    """Split `[mask, 0]` into the view `[:, 0]` and the index `[mask]` of it.

    Returns:
        None for other indices than masks beside numbers and slices.
    """
    parts = index if isinstance(index, tuple) else ()
    plain = [part for part in parts if isinstance(part, (int, slice))]
    masks = [part for part in parts if isinstance(part, Tensor) and part.dtype == torch.bool]
    if not masks or plain.count(slice(None)) == len(plain) or len(plain) + len(masks) < len(parts):
        return None
    view: list[object] = []
    masked: list[object] = []
    for part in parts:
        if isinstance(part, Tensor):
            view += [slice(None)] * part.dim()
            masked.append(part)
        else:
            view.append(part)
            masked += [] if isinstance(part, int) else [slice(None)]
    while isinstance(masked[-1], slice):
        masked.pop()
    return tuple(view), tuple(masked)


def _places(index: object) -> list[Tensor | None]:
    """Return the index of `x[index] = value` for index_put_; empty for an index of another form."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, Tensor) or part == slice(None) for part in parts):
        return []
    places = [part if isinstance(part, Tensor) else None for part in parts]
    return places if any(place is not None for place in places) else []


def _like(value: Any, tensor: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)


def _targets(
    changed: Sequence[tuple[Tensor, Tensor]], result: object
) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors through which a call changed memory, one for each shared memory.

    Of several tensors that share memory, the result of the call comes first, then the first
    argument.
    """
    targets: list[tuple[Tensor, Tensor]] = []
    made = tensors(result)
    for tensor, value in sorted(
        changed, key=lambda pair: not any(pair[1] is output for output in made)
    ):
        if not any(_share(value, other) for _, other in targets):
            targets.append((tensor, value))
    return targets


def _share(one: Tensor, other: Tensor) -> bool:
    # Sparse tensors, for example, have no storage.
    try:
        with torch._C.DisableTorchFunction():
            # _cdata is the address of the storage.
            return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return False


def _again(func: AnyFunction, args: Args, kwargs: Kwargs, old: Tensor, place: int) -> View:
    """Return a function that makes the same view of another tensor."""

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
    """Apply the pending changes to the whole memory and return it."""
    for alias, value in memory.pending:
        if alias.obstacle:
            raise RuntimeError(
                f"tensors that share memory are changed in place, and {alias.obstacle}: "
                "ONNX Runtime's graph cannot show it; "
                "write the change without a trailing underscore"
            )
        if alias.views:
            # The same views of the element indices give the elements that the change covers.
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
