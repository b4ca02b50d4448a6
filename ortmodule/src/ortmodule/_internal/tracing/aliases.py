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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.repair_registry import repair
from ortmodule._internal.base.torch_calls import (
    pause_tracing_and_torch_function,
    tensor_property_getter,
)
from ortmodule._internal.tracing import python_state
from ortmodule._internal.tracing.grad_mode import (
    CHANGED_MESSAGE,
    CHANGED_WEIGHT_MESSAGE,
    ExportFunction,
    inplace_change_counts,
    tensors_inside_nested_values,
)
from ortmodule._internal.tracing.observer import HandlerOrder, handle_calls_of_trace

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction, Args, Kwargs

View = Callable[[Tensor], Tensor]
# Functions that read only a tensor's metadata, which no in-place change of values affects.
_FORM_READERS = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.__len__,
    tensor_property_getter("shape"),
    tensor_property_getter("ndim"),
    tensor_property_getter("dtype"),
    tensor_property_getter("device"),
    Tensor.is_floating_point,
}
# Functions whose Python bool arguments become tensors, because TorchScript does not accept a bool
# as a number.
_WITH_BOOL = {
    Tensor.__and__, Tensor.__rand__, Tensor.__or__, Tensor.__ror__, Tensor.__xor__, Tensor.__rxor__, Tensor.__eq__,
    Tensor.__ne__, Tensor.eq, Tensor.ne, torch.eq, torch.ne, Tensor.bitwise_and, Tensor.bitwise_or, Tensor.bitwise_xor,
    torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor, Tensor.masked_fill, Tensor.masked_fill_, torch.masked_fill,
    Tensor.fill_, Tensor.where, torch.where, Tensor.__mul__, Tensor.__rmul__, Tensor.mul, torch.mul,
}  # fmt: skip
_FORM_CHANGING_NAMES = {
    "detach",
    "resize",
    "squeeze",
    "swapaxes",
    "swapdims",
    "t",
    "transpose",
    "unsqueeze",
}
_COMPLEX_MESSAGE = (
    "the model writes into a complex tensor at places that a tensor gives, and ONNX Runtime's graph "
    "would lose the imaginary parts: write torch.where, masked_fill or index_copy"
)
_DETACHING_FUNCTIONS = {Tensor.detach, torch.detach, tensor_property_getter("data")}


@repair(
    "propagate_inplace_views",
    "trace wrapper",
    60,
    fault="A change through a view (`h[:1].mul_(3)`, `h.T.mul_(2)`, `part.copy_(h)`) is left out "
    "of the graph where `h` is used afterwards: a gradient of 2 instead of 4.",
    example="tracing/test_compat.py::test_each_check_passes[view]",
)
def wrap_export_with_alias_tracking(torch_export: ExportFunction) -> ExportFunction:
    """Wrap an export so that in-place changes reach all tensors that share memory."""

    @functools.wraps(torch_export)
    def export_with_aliases(model: torch.nn.Module, *args: object, **kwargs: object) -> object:
        tracker = _AliasTracker()
        with (
            model.register_forward_hook(tracker.replace_outputs_by_current_values),
            model.register_forward_pre_hook(tracker.record_inputs),
            handle_calls_of_trace(HandlerOrder.ALIASES, tracker.call_with_current_values),
        ):
            return torch_export(model, *args, **kwargs)

    return export_with_aliases


class MaskedIndex(NamedTuple):
    """An index expression such as `[mask, 0]` in two steps."""

    view: Args
    """`[:, 0]`, which gives a view."""
    mask: Args
    """`[mask]`, an index of that view."""


class ChangedTensor(NamedTuple):
    """A tensor that a call has changed in place."""

    tensor: Tensor
    """As the model's code passed it."""
    value: Tensor
    """The tensor that the call was given for it."""


@dataclass(eq=False)
class _SharedMemory:
    """The memory that several tensors share."""

    full_value: Tensor
    """The whole memory, after every change but the pending ones."""
    is_weight: bool
    """Whether it is a weight's memory."""
    base_alias: weakref.ref[_MemorySharingTensor]
    """The tensor that the others are views of."""
    change_count: int = 0
    """The number of in-place changes so far."""
    pending_changes: list[tuple[_MemorySharingTensor, Tensor]] = field(default_factory=list)
    """Changes that `full_value` does not include yet: the changed tensor and its new value."""


@dataclass(eq=False)
class _MemorySharingTensor:
    """One of the tensors that share memory."""

    memory_ref: Callable[[], _SharedMemory | None]
    """A weak reference to the memory."""
    held_memory: _SharedMemory | None
    """A strong reference to the memory, which keeps it for as long as this tensor lives.

    It is None for the first tensor until a change: the memory refers to that tensor, which would
    then live throughout the export.
    """
    view_calls: tuple[View, ...] = ()
    """The calls that make this tensor from the whole memory."""
    obstacle: str = ""
    """Why a change through this tensor cannot be written to the whole memory; empty if it can."""
    current_value: Tensor | None = None
    """The tensor that replaces this one in the trace; None if the tensor itself is current."""
    change_count: int = 0
    """The number of the memory's changes that the value includes."""


class _AliasTracker:
    """A handler of calls that tracks which tensors share memory, and which calls change it."""

    def __init__(self) -> None:
        # Weak keys: the tracker must not keep the model's tensors alive.
        self._alias_by_tensor = WeakTensorKeyDictionary()
        self._forward_inputs: list[Tensor] = []

    def record_inputs(self, model: torch.nn.Module, inputs: Sequence[object]) -> None:
        """Record the tensors that the caller passed; a hook before the model's pass."""
        self._forward_inputs = tensors_inside_nested_values(inputs)

    def replace_outputs_by_current_values(
        self, model: torch.nn.Module, inputs: object, output: object
    ) -> object:
        """Return the outputs after all changes; a hook after the model's pass."""
        return self._with_current_values(output)

    def call_with_current_values(self, func: AnyFunction, args: Args, kwargs: Kwargs) -> object:
        """Run a call with the current values of its arguments, and record what it changes."""
        if func in _FORM_READERS:
            return func(*args, **kwargs)
        if args and isinstance(args[0], Tensor):
            func, args, kwargs = self._rewrite_inplace_call_for_exporter(func, args, kwargs)
        if func in _WITH_BOOL:
            args, kwargs = tree_map_only(bool, torch.tensor, (args, kwargs))
        input_tensors = tensors_inside_nested_values((args, kwargs))
        current_values = [
            self._current_value_after_alias_changes(tensor) for tensor in input_tensors
        ]
        # Replace tensors that are out of date by their current values.
        if any(value is not tensor for value, tensor in zip(current_values, input_tensors)):
            args, kwargs = self._with_current_values((args, kwargs))
        if (
            func is Tensor.copy_
            and input_tensors[0] is not input_tensors[-1]
            and (self._is_recorded_view(input_tensors[0]) or input_tensors[0].dtype.is_complex)
        ):
            return self._copy_outside_trace_and_record_change(input_tensors[0], *args, **kwargs)
        versions = inplace_change_counts(current_values)
        result = func(*args, **kwargs)
        self._record_results_that_are_views(
            func, args, kwargs, input_tensors, current_values, result
        )
        pairs = zip(input_tensors, current_values, versions, inplace_change_counts(current_values))
        changed_tensors = [
            ChangedTensor(tensor, value)
            for tensor, value, version_before, version_after in pairs
            if version_before != version_after
        ]
        for changed in _changed_tensors_of_separate_memory(changed_tensors, result):
            if any(
                _share_storage_or_false(changed.tensor, forward_input)
                for forward_input in self._forward_inputs
            ):
                _note_that_an_argument_is_changed_in_place()
            self._record_inplace_change_or_refuse(changed.tensor, changed.value)
        return result

    def _rewrite_inplace_call_for_exporter(
        self, tensor_function: AnyFunction, args: Args, kwargs: Kwargs
    ) -> tuple[AnyFunction, Args, Kwargs]:
        """Return a change in place in a form that the exporter writes right; other calls as given."""
        x = args[0]
        if tensor_function is Tensor.__setitem__ and x.dtype.is_complex:
            # Of complex numbers the exporter would lose the imaginary parts.
            part: Any = self.call_with_current_values(Tensor.__getitem__, args[:2], {})
            if not self._is_recorded_view(part):
                raise RuntimeError(_COMPLEX_MESSAGE)
            return Tensor.copy_, (part, _convert_like(args[2], part)), {}
        if tensor_function is Tensor.__setitem__ and (
            masked_index := _split_masked_index_or_none(args[1])
        ):
            # The exporter would take the mask for an index.
            part = self.call_with_current_values(Tensor.__getitem__, (x, masked_index.view), {})
            return self._rewrite_inplace_call_for_exporter(
                tensor_function, (part, masked_index.mask, args[2]), kwargs
            )
        if tensor_function is Tensor.__setitem__ and (
            index_tensors := _tensor_indices_or_empty(args[1])
        ):
            value = args[2]
            if isinstance(value, Tensor) and 0 < value.dim() <= x.dim():
                # torch would cut off a first dimension of `value` that is 1 in this batch.
                tensor_function, args = torch.ops.aten.index_put_, (x, index_tensors, value)
            elif self._is_recorded_view(x):
                tensor_function, args = (
                    Tensor.index_put_,
                    (x, index_tensors, _convert_like(value, x)),
                )
        # For a part that is written at places the exporter would use the whole tensor.
        writes_to_part = tensor_function is Tensor.index_put_ and self._is_recorded_view(x)
        if (writes_to_part or x.dtype.is_complex) and (
            out_of_place := _out_of_place_function_or_none(tensor_function)
        ):
            return (
                Tensor.copy_,
                (x, self.call_with_current_values(out_of_place, args, kwargs)),
                {},
            )
        return tensor_function, args, kwargs

    def _is_recorded_view(self, tensor: Tensor) -> bool:
        alias = self._alias_by_tensor.get(tensor)
        return alias is not None and bool(alias.view_calls)

    def _copy_outside_trace_and_record_change(
        self,
        written_view: Tensor,
        current_view_value: Tensor,
        source_tensor: Tensor,
        *other_copy_arguments: bool,
        **copy_keywords: bool,
    ) -> Tensor:
        """Run `view.copy_(source)` outside the trace, and record the change.

        After a traced copy_ torch's exporter would use the whole tensor for the view.
        """
        new_value = source_tensor.to(current_view_value.dtype).expand(current_view_value.shape)
        with pause_tracing_and_torch_function():
            current_view_value.copy_(source_tensor, *other_copy_arguments, **copy_keywords)
        # The record holds the new value; it lives as long as its memory.
        memory = self._get_or_create_alias_and_memory(written_view, current_view_value)[1]
        self._record_inplace_change_or_refuse(written_view, new_value)
        del memory
        return written_view

    def _with_current_values(self, nested_arguments_or_results: object) -> Any:
        """Return arguments or results with their values after changes through other tensors."""
        return tree_map_only(
            Tensor, self._current_value_after_alias_changes, nested_arguments_or_results
        )

    def _current_value_after_alias_changes(self, traced_tensor: Tensor) -> Tensor:
        alias = self._alias_by_tensor.get(traced_tensor)
        if alias is None:
            return traced_tensor
        memory = alias.memory_ref()
        if memory and alias.change_count != memory.change_count:
            alias.current_value = _apply_views(alias.view_calls, _apply_pending_changes(memory))
            alias.change_count = memory.change_count
        return traced_tensor if alias.current_value is None else alias.current_value

    def _record_results_that_are_views(
        self,
        called_function: AnyFunction,
        call_arguments: Args,
        call_keywords: Kwargs,
        input_tensors: Sequence[Tensor],
        current_values: Sequence[Tensor],
        call_result: object,
    ) -> None:
        for output_index, output in enumerate(tree_leaves(call_result)):
            if not isinstance(output, Tensor) or any(output is value for value in current_values):
                continue
            for tensor, value in zip(input_tensors, current_values):
                if _share_storage_or_false(output, value):
                    source_alias, memory = self._get_or_create_alias_and_memory(tensor, value)
                    views = (
                        *source_alias.view_calls,
                        _create_view_repeater(
                            called_function, call_arguments, call_keywords, value, output_index
                        ),
                    )
                    obstacle = source_alias.obstacle or _obstacle_to_write_through_view_or_empty(
                        called_function, value, output
                    )
                    self._alias_by_tensor[output] = _MemorySharingTensor(
                        source_alias.memory_ref,
                        memory,
                        views,
                        obstacle,
                        change_count=memory.change_count,
                    )
                    break

    def _get_or_create_alias_and_memory(
        self, viewed_tensor: Tensor, current_value: Tensor
    ) -> tuple[_MemorySharingTensor, _SharedMemory]:
        """Return the records of a tensor that has a view now; create them for a new tensor."""
        alias = self._alias_by_tensor.get(viewed_tensor)
        memory = alias.memory_ref() if alias else None
        if alias is None or memory is None:
            alias = self._alias_by_tensor[viewed_tensor] = _MemorySharingTensor(lambda: None, None)
            memory = _SharedMemory(
                current_value, isinstance(viewed_tensor, torch.nn.Parameter), weakref.ref(alias)
            )
            alias.memory_ref = weakref.ref(memory)
        return alias, memory

    def _record_inplace_change_or_refuse(self, changed_tensor: Tensor, new_value: Tensor) -> None:
        """Record an in-place change of a tensor, whose value in the trace is `new_value`."""
        alias = self._alias_by_tensor.get(changed_tensor)
        memory = alias.memory_ref() if alias else None
        if alias is None or memory is None:
            return
        # A weight is an input of ORT's graph, which would leave the change out.
        if memory.is_weight:
            raise RuntimeError(CHANGED_WEIGHT_MESSAGE)
        # grad_mode.py intercepts both reads; they return the values that the model sees.
        if not torch.is_grad_enabled() and memory.full_value.requires_grad:
            raise RuntimeError(CHANGED_MESSAGE)
        memory.change_count += 1
        alias.change_count = memory.change_count
        alias.current_value = None if new_value is changed_tensor else new_value
        # Consecutive changes through one tensor are one entry: its value has all of them.
        if not memory.pending_changes or memory.pending_changes[-1][0] is not alias:
            memory.pending_changes.append((alias, new_value))
        # From now on the first tensor, too, must keep the memory with its changes.
        if base_alias := memory.base_alias():
            base_alias.held_memory = memory


def _note_that_an_argument_is_changed_in_place() -> None:
    frame = python_state.innermost_frame_of_model_code_or_none()
    line = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
    tally.add_end_note_once(
        f"the forward pass changes an argument in place{line}: the graph computes with the change, "
        "and the caller's tensor stays as it was"
    )


def _out_of_place_function_or_none(in_place_function: AnyFunction) -> AnyFunction | None:
    """Return the function that computes what `mul_` or `__imul__` writes; None for others."""
    match = re.fullmatch(r"__i(\w+)__|(\w*[a-z0-9])_", getattr(in_place_function, "__name__", ""))
    function_name = match and (f"__{match[1]}__" if match[1] else match[2])
    special_functions: dict[str, AnyFunction] = {
        "fill": lambda x, value: torch.zeros_like(x) + value,
        "zero": torch.zeros_like,
    }
    function = (
        (getattr(Tensor, function_name, None) or special_functions.get(function_name))
        if function_name
        else None
    )
    # `requires_grad_` has an attribute of its name; the others change a form, and no values.
    return function if callable(function) and function_name not in _FORM_CHANGING_NAMES else None


def _split_masked_index_or_none(index_expression: object) -> MaskedIndex | None:
    """Split `[mask, 0]` into the view `[:, 0]` and the index `[mask]` of it.

    Returns:
        None for other indices than masks beside numbers and slices.
    """
    parts = index_expression if isinstance(index_expression, tuple) else ()
    plain_parts = [part for part in parts if isinstance(part, (int, slice))]
    masks = [part for part in parts if isinstance(part, Tensor) and part.dtype == torch.bool]
    if (
        not masks
        or plain_parts.count(slice(None)) == len(plain_parts)
        or len(plain_parts) + len(masks) < len(parts)
    ):
        return None
    view_index: list[object] = []
    mask_index: list[object] = []
    for part in parts:
        if isinstance(part, Tensor):
            view_index += [slice(None)] * part.dim()
            mask_index.append(part)
        else:
            view_index.append(part)
            mask_index += [] if isinstance(part, int) else [slice(None)]
    while isinstance(mask_index[-1], slice):
        mask_index.pop()
    return MaskedIndex(tuple(view_index), tuple(mask_index))


def _tensor_indices_or_empty(index_expression: object) -> list[Tensor | None]:
    """Return the index of `x[index] = value` for index_put_; empty for an index of another form."""
    parts = index_expression if isinstance(index_expression, tuple) else (index_expression,)
    if not all(isinstance(part, Tensor) or part == slice(None) for part in parts):
        return []
    index_tensors = [part if isinstance(part, Tensor) else None for part in parts]
    return index_tensors if any(index_tensor is not None for index_tensor in index_tensors) else []


def _convert_like(value: Any, tensor: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=tensor.dtype, device=tensor.device)


def _changed_tensors_of_separate_memory(
    changed_tensors: Sequence[ChangedTensor], call_result: object
) -> list[ChangedTensor]:
    """Return the tensors through which a call changed memory, one for each shared memory.

    Of several tensors that share memory, the result of the call comes first, then the first
    argument.
    """
    targets: list[ChangedTensor] = []
    result_tensors = tensors_inside_nested_values(call_result)
    for changed in sorted(
        changed_tensors,
        key=lambda changed: not any(changed.value is output for output in result_tensors),
    ):
        if not any(_share_storage_or_false(changed.value, target.value) for target in targets):
            targets.append(changed)
    return targets


def _share_storage_or_false(tensor: Tensor, other_tensor: Tensor) -> bool:
    # Sparse tensors, for example, have no storage.
    try:
        with torch._C.DisableTorchFunction():
            # _cdata is the address of the storage.
            return bool(tensor.untyped_storage()._cdata == other_tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return False


def _create_view_repeater(
    viewing_function: AnyFunction,
    view_arguments: Args,
    view_keywords: Kwargs,
    viewed_tensor: Tensor,
    output_index: int,
) -> View:
    """Return a function that makes the same view of another tensor."""

    def make_view(other_tensor: Tensor) -> Tensor:
        arguments, keywords = tree_map_only(
            Tensor,
            lambda tensor: other_tensor if tensor is viewed_tensor else tensor,
            (view_arguments, view_keywords),
        )
        output: Tensor = tree_leaves(viewing_function(*arguments, **keywords))[output_index]
        return output

    return make_view


def _obstacle_to_write_through_view_or_empty(
    viewing_function: AnyFunction, source_tensor: Tensor, view_tensor: Tensor
) -> str:
    name = getattr(viewing_function, "__name__", "")
    if viewing_function in _DETACHING_FUNCTIONS and source_tensor.requires_grad:
        return "one of them is detached"
    if name == "apply":
        return "one of them is a custom autograd function's"
    return (
        "one of them reads it in another form"
        if source_tensor.dtype != view_tensor.dtype or name == "as_strided"
        else ""
    )


def _apply_views(view_calls: Sequence[View], base_tensor: Tensor) -> Tensor:
    for view in view_calls:
        base_tensor = view(base_tensor)
    return base_tensor


def _apply_pending_changes(shared_memory: _SharedMemory) -> Tensor:
    """Apply the pending changes to the whole memory and return it."""
    for alias, value in shared_memory.pending_changes:
        if alias.obstacle:
            raise RuntimeError(
                f"tensors that share memory are changed in place, and {alias.obstacle}: "
                "ONNX Runtime's graph cannot show it; "
                "write the change without a trailing underscore"
            )
        if alias.view_calls:
            # The same views of the element indices give the elements that the change covers.
            sizes = shared_memory.full_value.shape
            element_indices = _apply_views(
                alias.view_calls,
                torch.arange(shared_memory.full_value.numel(), device=value.device).view(sizes),
            )
            shared_memory.full_value = (
                shared_memory.full_value.flatten()
                .scatter(0, element_indices.flatten(), value.flatten())
                .view(sizes)
            )
        else:
            shared_memory.full_value = value
    shared_memory.pending_changes.clear()
    return shared_memory.full_value
