"""Tensors of a forward pass that are stored outside its result: in layers, by hooks, in closures.

ONNX Runtime's graph returns only a model's outputs. A tensor stored elsewhere would stay that of
the export, without a gradient. After each pass a `StaleTensor` replaces it. Models in which nobody
reads it are unaffected; every use of it raises an error with its location. Tensors made of
constants, buffers or sizes alone are not replaced.
"""

from __future__ import annotations

import contextlib
import gc
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ortlaunch.ortmodule.base.export import Export, own_path, traced_facts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Args, Kwargs, Manager

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# The depth of nested containers that are searched.
_DEEP = 3
Kept = tuple[Any, object, object]
"""A container, a key or index in it, and the object that replaces the entry there."""
Stale = dict[int, tuple[object, object]]
"""By the id of an object: the object, and either the line that made it or its replacement."""


class StaleTensor(torch.Tensor):
    """The replacement of a tensor that ONNX Runtime's graph does not compute.

    Every use of it raises RuntimeError.
    """

    message: str

    @staticmethod
    def __new__(cls, message: str) -> StaleTensor:
        with torch._C.DisableTorchFunction():
            stale: StaleTensor = torch.Tensor._make_subclass(cls, torch.empty(0))
        stale.message = message
        return stale

    @classmethod
    def __torch_function__(
        cls, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        raise RuntimeError(
            next(one.message for one in tree_leaves((args, kwargs)) if isinstance(one, StaleTensor))
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch has an argument of its own
        return f"StaleTensor({self.message!r})"

    # A copy as of other tensors would call torch's functions, which raise.
    def __deepcopy__(self, memo: object) -> StaleTensor:
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[type[StaleTensor], tuple[str]]:
        return StaleTensor, (self.message,)


class _Remade:
    """A tensor that a layer's own hooks make of its weights in each pass.

    Pruning and torch.nn.utils.weight_norm keep it as the attribute `weight`.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def makes(self, name: str) -> bool:
        """Return whether the hooks make the attribute, without the layer's inputs."""
        before = vars(self._layer)[name]
        versions = [buffer._version for buffer in self._layer.buffers()]
        try:
            self.remake()
        # A hook that reads its inputs fails in any way.
        except Exception:
            return False
        made = vars(self._layer)[name]
        return (
            versions == [buffer._version for buffer in self._layer.buffers()]
            and isinstance(made, torch.Tensor)
            and made is not before
            and made.shape == before.shape
        )

    def remake(self) -> None:
        for hook in self._layer._forward_pre_hooks.values():
            hook(self._layer, ())


@contextlib.contextmanager
def noted(export: Export) -> Iterator[None]:
    """Record which tensors of the trace are still alive after it, and where they are stored.

    Raises:
        RuntimeError: a tensor is stored where it cannot be replaced.
    """
    yield
    made = export.facts.pop("made", {})
    # A tensor may be left in a reference cycle that nothing uses: collect those before the search.
    if any(_held(tensor) for tensor in list(made)):
        gc.collect()
    if any(_held(tensor) for tensor in list(made)):
        with _unfrozen():
            export.facts["kept"] = _find(export.module, made)


@contextlib.contextmanager
def _unfrozen() -> Iterator[None]:
    """Disable garbage collection and unfreeze all objects.

    gc.get_referrers searches only objects that are not frozen.
    """
    frozen = gc.get_freeze_count()
    enabled = gc.isenabled()
    gc.disable()
    gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()
        if enabled:
            gc.enable()


def put_back(manager: Manager) -> None:
    """Write the stale tensors into their places again.

    An export of another graph, or a pass of the model itself, may have written other tensors there.
    """
    for container, key, value in traced_facts(manager._graph_transition_manager).get("kept", ()):
        if isinstance(value, _Remade):
            value.remake()
        elif isinstance(container, types.CellType):
            container.cell_contents = value
        elif isinstance(container, dict) or key < len(container):
            container[key] = value


def _held(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, nn.Parameter)


def _find(module: nn.Module, made: Mapping[torch.Tensor, str]) -> list[Kept]:
    alive = [tensor for tensor in list(made) if _held(tensor)]
    stale: Stale = {id(tensor): (tensor, made[tensor]) for tensor in alive}
    found: list[Kept] = []
    _replace(module, alive, stale, found, _DEEP)
    containers = {id(container) for container, _, _ in found}
    # Attributes that hold such a container are restored, too: another pass may bind a new
    # container.
    for layer in module.modules():
        for name, value in vars(layer).items():
            if id(value) in containers or _contains(value, containers, _DEEP):
                found.append((vars(layer), name, value))
    return found


def _replace(
    module: nn.Module, objects: Sequence[object], stale: Stale, found: list[Kept], deep: int
) -> None:
    """Record for each container of one of `objects` the replacement of the object there.

    Args:
        module: the traced model.
        objects: the objects to replace.
        stale: the objects' entries, see `Stale`.
        found: the records; extended in place.
        deep: the number of further levels of tuples to search.
    """
    inner: Stale = {}
    # The search's own containers refer to the objects, too.
    own = {id(objects), id(stale), *map(id, stale.values())}
    for holder in gc.get_referrers(*objects):
        if id(holder) not in own and not isinstance(holder, types.FrameType):
            found.extend(_replaced(module, holder, stale, inner if deep else None))
    if inner:
        _replace(module, [old for old, _ in inner.values()], inner, found, deep - 1)


def _replaced(module: nn.Module, holder: Any, stale: Stale, inner: Stale | None) -> list[Kept]:
    """Return the records of one container; a tuple is put into `inner` with its replacement."""
    if isinstance(holder, types.CellType):
        items: Any = {"cell_contents": holder.cell_contents}
    else:
        items = (
            holder
            if isinstance(holder, (dict, list, deque, tuple))
            else getattr(holder, "__dict__", None)
        )
    if items is None or (isinstance(items, tuple) and inner is None):
        raise RuntimeError(_message(f"a {type(holder).__name__}", "one of its lines"))
    places = list(items.items() if isinstance(items, dict) else enumerate(items))
    new = {
        key: _stale(module, holder, items, key, stale[id(value)])
        for key, value in places
        if id(value) in stale
    }
    if isinstance(items, tuple) and inner is not None:
        inner[id(items)] = items, _typed(items, tuple(new.get(key, value) for key, value in places))
        return []
    container = holder if isinstance(holder, types.CellType) else items
    return [(container, key, value) for key, value in new.items()]


def _stale(
    module: nn.Module, holder: object, items: object, key: Any, entry: tuple[object, object]
) -> object:
    """Return the object that replaces an entry under a key of a container."""
    if not isinstance(entry[1], str):
        return entry[1]
    for path, layer in module.named_modules():
        if items is layer._buffers:
            raise RuntimeError(_message(f"the buffer {own_path(f'{path}.{key}')}", entry[1]))
        if items is vars(layer) and (remade := _Remade(layer)).makes(key):
            return remade
    return StaleTensor(_message(_where(module, holder, items, key), entry[1]))


def _message(where: str, line: str) -> str:
    return (
        f"{where} keeps a tensor that the forward pass made at {line}. "
        "ONNX Runtime's graph returns the outputs of the model alone, so that this tensor would "
        "stay the first pass's, without a gradient: return it from forward"
    )


def _where(module: nn.Module, holder: object, items: object, key: Any) -> str:
    for path, layer in module.named_modules():
        if items is vars(layer):
            return f"the model's attribute {own_path(f'{path}.{key}')}"
        for name, value in vars(layer).items():
            if value is items or (name not in _HOOKS and _contains(value, {id(items)}, _DEEP)):
                return f"the model's attribute {own_path(f'{path}.{name}')}"
        for hook in (hook for hooks in _HOOKS for hook in getattr(layer, hooks).values()):
            if any(items is value or holder is value for value in _reads(hook)):
                return (
                    f"a hook of the layer {own_path(path) or 'around all others'} (under {key!r})"
                )
    return f"a {type(holder).__name__} outside the model (under {key!r})"


def _reads(hook: object) -> Iterator[object]:
    """Yield the objects that a hook may write to."""
    function = getattr(hook, "__func__", hook)
    for cell in getattr(function, "__closure__", None) or ():
        yield cell
        yield cell.cell_contents
    owner = getattr(hook, "__self__", None)
    if owner is not None and hasattr(owner, "__dict__"):
        yield from (vars(owner), *vars(owner).values())
    if isinstance(function, types.FunctionType):
        yield from (function.__globals__.get(name) for name in function.__code__.co_names)


def _typed(old: Any, values: tuple[Any, ...]) -> Any:
    return type(old)(*values) if hasattr(old, "_fields") else type(old)(values)


def _contains(value: object, containers: set[int], deep: int) -> bool:
    if not deep or not isinstance(value, (dict, list, tuple, deque)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return any(id(item) in containers or _contains(item, containers, deep - 1) for item in inner)
