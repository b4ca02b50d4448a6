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

from ortmodule._internal.base import garbage
from ortmodule._internal.base.attached import GraphManagerRecord
from ortmodule._internal.base.export import ExportContext, path_in_model
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, repair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortmodule._internal.base.ort_types import AnyFunction, Args, Kwargs, Manager
    from ortmodule._internal.base.trace_facts import ContainerKeyAndValue

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# The depth of nested containers that are searched.
_MAX_DEPTH = 3
ObjectAndLineOrReplacementById = dict[int, tuple[object, object]]
"""By the id of an object: the object, and either the line that made it or its replacement."""


class StaleTensor(torch.Tensor):
    """The replacement of a tensor that ONNX Runtime's graph does not compute.

    Every use of it raises RuntimeError.
    """

    message: str

    @staticmethod
    def __new__(cls, error_message: str) -> StaleTensor:
        with torch._C.DisableTorchFunction():
            stale: StaleTensor = torch.Tensor._make_subclass(cls, torch.empty(0))
        stale.message = error_message
        return stale

    @classmethod
    def __torch_function__(
        cls, func: AnyFunction, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        raise RuntimeError(
            next(
                argument.message
                for argument in tree_leaves((args, kwargs))
                if isinstance(argument, StaleTensor)
            )
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch has an argument of its own
        return f"StaleTensor({self.message!r})"

    # A copy as of other tensors would call torch's functions, which raise.
    def __deepcopy__(self, memo: object) -> StaleTensor:
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[type[StaleTensor], tuple[str]]:
        return StaleTensor, (self.message,)


class _HookComputedWeight:
    """A tensor that a layer's own hooks make of its weights in each pass.

    Pruning and torch.nn.utils.weight_norm keep it as the attribute `weight`.
    """

    def __init__(self, hooked_layer: nn.Module) -> None:
        self._layer = hooked_layer

    def run_hooks_and_check_they_remake_attribute(self, attribute_name: str) -> bool:
        """Return whether the hooks make the attribute, without the layer's inputs."""
        tensor_before = vars(self._layer)[attribute_name]
        versions = [buffer._version for buffer in self._layer.buffers()]
        try:
            self.run_forward_pre_hooks()
        # A hook that reads its inputs fails in any way.
        except Exception:
            return False
        remade_tensor = vars(self._layer)[attribute_name]
        return (
            versions == [buffer._version for buffer in self._layer.buffers()]
            and isinstance(remade_tensor, torch.Tensor)
            and remade_tensor is not tensor_before
            and remade_tensor.shape == tensor_before.shape
        )

    def run_forward_pre_hooks(self) -> None:
        for hook in self._layer._forward_pre_hooks.values():
            hook(self._layer, ())


@repair(
    "detect_kept_tensors",
    "context",
    90,
    fault="A tensor that a forward pass keeps (`self.aux = p.square().mean()`, an output in a "
    "hook, a weight that `prune` makes) stays that of the first pass, without a gradient.",
    example="tracing/test_escapes.py::test_a_kept_tensor_is_an_error_where_it_is_used[attribute]",
    sources=EXPORT_SOURCES,
)
@contextlib.contextmanager
def record_escaped_tensors_and_replacements(export_context: ExportContext) -> Iterator[None]:
    """Record which tensors of the trace are still alive after it, and where they are stored.

    Raises:
        RuntimeError: a tensor is stored where it cannot be replaced.
    """
    yield
    line_by_tensor = export_context.facts.line_by_value
    # A tensor may be left in a reference cycle that nothing uses: collect those before the search.
    for collect_garbage in (garbage.collect_new_objects, gc.collect):
        if any(_is_not_parameter(tensor) for tensor in list(line_by_tensor)):
            collect_garbage()
    if any(_is_not_parameter(tensor) for tensor in list(line_by_tensor)):
        with _pause_garbage_collection_and_unfreeze():
            export_context.facts.kept_entries = _find_entries_of_trace_tensors_and_containers(
                export_context.module, line_by_tensor
            )


@contextlib.contextmanager
def _pause_garbage_collection_and_unfreeze() -> Iterator[None]:
    """Disable garbage collection and unfreeze all objects.

    gc.get_referrers searches only objects that are not frozen.
    """
    frozen_count = gc.get_freeze_count()
    was_enabled = gc.isenabled()
    gc.disable()
    gc.unfreeze()
    try:
        yield
    finally:
        if frozen_count:
            gc.freeze()
        if was_enabled:
            gc.enable()


def put_tensors_kept_by_trace_back_into_python_containers(graph_execution_manager: Manager) -> None:
    """Write the stale tensors into their places again.

    An export of another graph, or a pass of the model itself, may have written other tensors there.
    """
    for container, key, value in GraphManagerRecord.attached_to(
        graph_execution_manager._graph_transition_manager
    ).trace_facts.kept_entries:
        if isinstance(value, _HookComputedWeight):
            value.run_forward_pre_hooks()
        elif isinstance(container, types.CellType):
            container.cell_contents = value
        elif isinstance(container, dict) or key < len(container):
            container[key] = value


def _is_not_parameter(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, nn.Parameter)


def _find_entries_of_trace_tensors_and_containers(
    traced_model: nn.Module, source_line_by_traced_tensor: Mapping[torch.Tensor, str]
) -> list[ContainerKeyAndValue]:
    live_tensors = [
        tensor for tensor in list(source_line_by_traced_tensor) if _is_not_parameter(tensor)
    ]
    stale: ObjectAndLineOrReplacementById = {
        id(tensor): (tensor, source_line_by_traced_tensor[tensor]) for tensor in live_tensors
    }
    kept_entries: list[ContainerKeyAndValue] = []
    _collect_replacements_in_referrers(traced_model, live_tensors, stale, kept_entries, _MAX_DEPTH)
    container_ids = {id(container) for container, _, _ in kept_entries}
    # Attributes that hold such a container are restored, too: another pass may bind a new
    # container.
    for layer in traced_model.modules():
        for name, value in vars(layer).items():
            if id(value) in container_ids or _holds_any_container_inside(
                value, container_ids, _MAX_DEPTH
            ):
                kept_entries.append((vars(layer), name, value))
    return kept_entries


def _collect_replacements_in_referrers(
    traced_model: nn.Module,
    objects_to_replace: Sequence[object],
    stale_entry_by_id: ObjectAndLineOrReplacementById,
    collected_entries: list[ContainerKeyAndValue],
    remaining_tuple_levels: int,
) -> None:
    """Record for each container of one of `objects_to_replace` the replacement of the object there.

    Args:
        traced_model: the traced model.
        objects_to_replace: the objects to replace.
        stale_entry_by_id: the objects' entries, see `ObjectAndLineOrReplacementById`.
        collected_entries: the records; extended in place.
        remaining_tuple_levels: the number of further levels of tuples to search.
    """
    inner_entries: ObjectAndLineOrReplacementById = {}
    # The search's own containers refer to the objects, too.
    own_ids = {id(objects_to_replace), id(stale_entry_by_id), *map(id, stale_entry_by_id.values())}
    for holder in gc.get_referrers(*objects_to_replace):
        if id(holder) not in own_ids and not isinstance(holder, types.FrameType):
            collected_entries.extend(
                _replacement_entries_or_collect_tuple(
                    traced_model,
                    holder,
                    stale_entry_by_id,
                    inner_entries if remaining_tuple_levels else None,
                )
            )
    if inner_entries:
        _collect_replacements_in_referrers(
            traced_model,
            [old for old, _ in inner_entries.values()],
            inner_entries,
            collected_entries,
            remaining_tuple_levels - 1,
        )


def _replacement_entries_or_collect_tuple(
    traced_model: nn.Module,
    container_or_holder: Any,
    stale_entry_by_id: ObjectAndLineOrReplacementById,
    collected_tuple_entries: ObjectAndLineOrReplacementById | None,
) -> list[ContainerKeyAndValue]:
    """Return the records of one container; a tuple is put into `collected_tuple_entries` with its replacement."""
    if isinstance(container_or_holder, types.CellType):
        items: Any = {"cell_contents": container_or_holder.cell_contents}
    else:
        items = (
            container_or_holder
            if isinstance(container_or_holder, (dict, list, deque, tuple))
            else getattr(container_or_holder, "__dict__", None)
        )
    if items is None or (isinstance(items, tuple) and collected_tuple_entries is None):
        raise RuntimeError(
            _stale_tensor_message(f"a {type(container_or_holder).__name__}", "one of its lines")
        )
    keys_and_values = list(items.items() if isinstance(items, dict) else enumerate(items))
    replacements = {
        key: _create_replacement_of_entry(
            traced_model, container_or_holder, items, key, stale_entry_by_id[id(value)]
        )
        for key, value in keys_and_values
        if id(value) in stale_entry_by_id
    }
    if isinstance(items, tuple) and collected_tuple_entries is not None:
        collected_tuple_entries[id(items)] = (
            items,
            _tuple_of_original_type(
                items, tuple(replacements.get(key, value) for key, value in keys_and_values)
            ),
        )
        return []
    container = container_or_holder if isinstance(container_or_holder, types.CellType) else items
    return [(container, key, value) for key, value in replacements.items()]


def _create_replacement_of_entry(
    traced_model: nn.Module,
    holder: object,
    container_items: object,
    entry_key: Any,
    object_and_line_or_replacement: tuple[object, object],
) -> object:
    """Return the object that replaces an entry under a key of a container."""
    if not isinstance(object_and_line_or_replacement[1], str):
        return object_and_line_or_replacement[1]
    for path, layer in traced_model.named_modules():
        if container_items is layer._buffers:
            raise RuntimeError(
                _stale_tensor_message(
                    f"the buffer {path_in_model(f'{path}.{entry_key}')}",
                    object_and_line_or_replacement[1],
                )
            )
        if container_items is vars(layer) and (
            hook_weight := _HookComputedWeight(layer)
        ).run_hooks_and_check_they_remake_attribute(entry_key):
            return hook_weight
    return StaleTensor(
        _stale_tensor_message(
            _container_location_text(traced_model, holder, container_items, entry_key),
            object_and_line_or_replacement[1],
        )
    )


def _stale_tensor_message(location_text: str, source_line: str) -> str:
    return (
        f"{location_text} keeps a tensor that the forward pass made at {source_line}. "
        "ONNX Runtime's graph returns the outputs of the model alone, so that this tensor would "
        "stay the first pass's, without a gradient: return it from forward"
    )


def _container_location_text(
    traced_model: nn.Module, holder: object, container_items: object, entry_key: Any
) -> str:
    for path, layer in traced_model.named_modules():
        if container_items is vars(layer):
            return f"the model's attribute {path_in_model(f'{path}.{entry_key}')}"
        for name, value in vars(layer).items():
            if value is container_items or (
                name not in _HOOKS
                and _holds_any_container_inside(value, {id(container_items)}, _MAX_DEPTH)
            ):
                return f"the model's attribute {path_in_model(f'{path}.{name}')}"
        for hook in (hook for hooks in _HOOKS for hook in getattr(layer, hooks).values()):
            if any(
                container_items is value or holder is value
                for value in _objects_that_hook_may_write_to(hook)
            ):
                return f"a hook of the layer {path_in_model(path) or 'around all others'} (under {entry_key!r})"
    return f"a {type(holder).__name__} outside the model (under {entry_key!r})"


def _objects_that_hook_may_write_to(forward_hook: object) -> Iterator[object]:
    function = getattr(forward_hook, "__func__", forward_hook)
    for cell in getattr(function, "__closure__", None) or ():
        yield cell
        yield cell.cell_contents
    owner = getattr(forward_hook, "__self__", None)
    if owner is not None and hasattr(owner, "__dict__"):
        yield from (vars(owner), *vars(owner).values())
    if isinstance(function, types.FunctionType):
        yield from (function.__globals__.get(name) for name in function.__code__.co_names)


def _tuple_of_original_type(original_tuple: Any, new_values: tuple[Any, ...]) -> Any:
    return (
        type(original_tuple)(*new_values)
        if hasattr(original_tuple, "_fields")
        else type(original_tuple)(new_values)
    )


def _holds_any_container_inside(
    possible_container: object, container_ids: set[int], remaining_levels: int
) -> bool:
    if not remaining_levels or not isinstance(possible_container, (dict, list, tuple, deque)):
        return False
    inner = (
        possible_container.values() if isinstance(possible_container, dict) else possible_container
    )
    return any(
        id(item) in container_ids
        or _holds_any_container_inside(item, container_ids, remaining_levels - 1)
        for item in inner
    )
