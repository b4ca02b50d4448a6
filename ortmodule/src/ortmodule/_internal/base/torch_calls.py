"""Calls of torch from inside ORT's graph: any function of tensors, as a PythonOp.

The derivative is torch's own. ORT plans its memory by the graph alone: it overwrites an input or
output of a call once no node needs it. A tensor that torch saves for the backward pass is therefore
copied if it is in ORT's memory, and only then.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction

TensorFunction = Callable[..., Sequence[torch.Tensor]]
# Makes each title unique, because ORT registers functions by name.
_title_numbers = itertools.count()


def tensor_property_getter(property_name: str) -> AnyFunction:
    """Return the function that reads a property of tensors, as `__torch_function__` receives it."""
    return getattr(torch.Tensor, property_name).__get__


def tensor_property_setter(property_name: str) -> AnyFunction:
    """Return the function that sets a property of tensors, as `__torch_function__` receives it."""
    return getattr(torch.Tensor, property_name).__set__


@contextlib.contextmanager
def pause_tracing_and_torch_function() -> Iterator[None]:
    """Hide calls of torch inside the with-block from the tracer and from `__torch_function__`."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # not in torch's stub
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


@dataclass
class TorchCallCounts:
    """Number and duration of an operator's or layer's calls from ORT's graphs, on this rank's
    thread.
    """

    forward: int = 0
    backward: int = 0
    seconds: float = 0.0


counts_by_name: dict[str, TorchCallCounts] = {}
"""Calls in this process, by operator or layer."""
pass_counts = TorchCallCounts()
"""Passes of ORT's graphs themselves."""


def call_counts_by_called_name() -> dict[str, TorchCallCounts]:
    """Return the operators and layers that were called from a graph."""
    return {
        name: call_counts for name, call_counts in counts_by_name.items() if call_counts.forward
    }


def torch_fraction_of_pass_time() -> float:
    """Return the share of calls of torch in the time of ORT's passes, from 0 to 1."""
    return (
        sum(call_counts.seconds for call_counts in counts_by_name.values()) / pass_counts.seconds
        if pass_counts.seconds
        else 0.0
    )


def reset_call_and_pass_counts() -> None:
    """Set all counters to zero."""
    restore_call_and_pass_counts({})


def copy_call_and_pass_counts() -> dict[str, TorchCallCounts]:
    """Return a copy of the counters, for `restore_call_and_pass_counts`."""
    return {
        name: replace(call_counts)
        for name, call_counts in {**counts_by_name, "": pass_counts}.items()
    }


def restore_call_and_pass_counts(saved_counts_by_name: dict[str, TorchCallCounts]) -> None:
    """Set every counter back; a counter that is not in `saved_counts_by_name` becomes zero."""
    for name, call_counts in {**counts_by_name, "": pass_counts}.items():
        vars(call_counts).update(vars(saved_counts_by_name.get(name, TorchCallCounts())))


@contextlib.contextmanager
def measure_seconds_of_pass() -> Iterator[None]:
    """Measure one pass of an ORT graph."""
    with _add_seconds_of_block(pass_counts):
        yield


recorded_errors: list[Exception] = []
"""Errors of calls in the current pass, for torch_in_graph/pass_errors.py."""


@contextlib.contextmanager
def record_and_reraise_errors() -> Iterator[None]:
    """Keep an error of a call, which ORT would not pass on."""
    try:
        yield
    except Exception as error:
        recorded_errors.append(error)
        raise


def create_counted_torch_function_class_for_ort(
    counted_name: str,
    tensor_operation: TensorFunction,
    unchanged_input_positions: frozenset[int],
    unlisted_weights: Sequence[torch.Tensor] = (),
    open_forward_context: Any = contextlib.nullcontext,
    saves_only_copies: bool = False,
) -> Any:
    """Return a torch.autograd.Function with a unique name, for ORT to call.

    tensor_operation: takes tensors and returns tensors.
    unchanged_input_positions: positions of inputs that ORT keeps unchanged until the backward pass: weights, and inputs
        of the model.
    unlisted_weights: weights that `tensor_operation` reads without a parameter for them; they are
        passed as the last inputs,
        so that they get their gradients.
    open_forward_context: returns a context for each forward pass.
    saves_only_copies: whether `tensor_operation` saves nothing of its inputs but copies. The
        outputs are then copied, too,
        and no hook sees what torch saves: a transform of torch.func allows no hooks.
    """
    call_counts = counts_by_name.setdefault(counted_name, TorchCallCounts())

    def forward(ctx: Any, *inputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        # The exporter calls the function once to trace it; this is no call from a graph.
        is_exporting = torch.jit.is_tracing()
        with (
            _add_seconds_of_block(TorchCallCounts() if is_exporting else call_counts),
            record_and_reraise_errors(),
            open_forward_context(),
        ):
            call_counts.forward += not is_exporting
            outputs = _run_detached_and_keep_graph(
                ctx,
                tensor_operation,
                inputs,
                None if saves_only_copies else unchanged_input_positions,
                unlisted_weights,
            )
            ctx.mark_non_differentiable(
                *(output for output in outputs if not output.is_floating_point())
            )
        return outputs if len(outputs) > 1 else outputs[0]

    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        with count_and_time_torch_call_and_record_error(counted_name, is_backward=True):
            input_gradients = _derive_input_gradients_and_drop_graph(ctx, gradients)
        return input_gradients if len(input_gradients) > 1 else input_gradients[0]

    title = f"{counted_name}_{next(_title_numbers)}"
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    identity = {"__module__": __name__, "__qualname__": title}
    return types.new_class(
        title, (torch.autograd.Function,), {}, lambda body: body.update(members, **identity)
    )


@contextlib.contextmanager
def count_and_time_torch_call_and_record_error(
    counted_name: str, is_backward: bool = False
) -> Iterator[None]:
    """Count and measure one call of torch from a graph, and note its error."""
    call_counts = counts_by_name.setdefault(counted_name, TorchCallCounts())
    call_counts.forward += not is_backward
    call_counts.backward += is_backward
    with _add_seconds_of_block(call_counts), record_and_reraise_errors():
        yield


@contextlib.contextmanager
def _add_seconds_of_block(call_counts: TorchCallCounts) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        call_counts.seconds += time.perf_counter() - began


def _run_detached_and_keep_graph(
    ctx: Any,
    tensor_operation: TensorFunction,
    input_tensors: Sequence[torch.Tensor],
    unchanged_input_positions: frozenset[int] | None,
    unlisted_weights: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Run the function on detached inputs, and keep its graph for the backward pass.

    unchanged_input_positions: as in `create_counted_torch_function_class_for_ort`; None if `tensor_operation`
        saves nothing of its inputs but copies.
    """
    operand_count = len(input_tensors) - len(unlisted_weights)
    gradient_flags = [
        needs_gradient_by_ort and input_tensor.is_floating_point()
        for needs_gradient_by_ort, input_tensor in zip(ctx.needs_input_grad, input_tensors)
    ]
    # Memory that an output must not share.
    input_addresses = set(map(_storage_address_or_tensor_id, input_tensors))
    ctx.leaves = ()
    ctx.results = ()
    ctx.wanted = gradient_flags
    # Autocast would cast a second time; a layer that torch runs opens its own.
    with torch.autocast(input_tensors[0].device.type if input_tensors else "cpu", enabled=False):
        if not any(gradient_flags):
            with torch.no_grad():
                return tuple(
                    _make_output_contiguous_and_add_its_address(result, input_addresses)
                    for result in tensor_operation(*input_tensors[:operand_count])
                )
        leaves = [
            input_tensor.detach().requires_grad_(needs_gradient)
            for input_tensor, needs_gradient in zip(input_tensors[:operand_count], gradient_flags)
        ]
        if unchanged_input_positions is None:
            with torch.enable_grad():
                results = tuple(tensor_operation(*leaves))
            # torch may have saved any of them.
            input_addresses |= set(map(_storage_address_or_tensor_id, results))
        else:
            saved_copies = _SavedCopies(
                {
                    _storage_address_or_tensor_id(input_tensor)
                    for i, input_tensor in enumerate(input_tensors)
                    if i not in unchanged_input_positions
                }
            )
            with torch.enable_grad(), saved_copies:
                results = tuple(tensor_operation(*leaves))
            input_addresses |= saved_copies.saved_addresses
    ctx.leaves = [*leaves, *unlisted_weights]
    ctx.results = results
    return tuple(
        _make_output_contiguous_and_add_its_address(result, input_addresses) for result in results
    )


class _SavedCopies(torch.autograd.graph.saved_tensors_hooks):
    """Hooks that copy a tensor that torch saves, if it is in memory of a temporary tensor of ORT."""

    def __init__(self, temporary_addresses: set[int]) -> None:
        self.saved_addresses: set[int] = set()
        copies: dict[Any, torch.Tensor] = {}

        def copy_if_temporary(tensor: torch.Tensor) -> torch.Tensor:
            address = _storage_address_or_tensor_id(tensor)
            # Saved as it is; its memory is remembered, because an output must not share it.
            if address not in temporary_addresses:
                self.saved_addresses.add(address)
                return tensor
            # One copy for each view, also if torch saves it several times.
            key = (
                address,
                tensor.storage_offset(),
                tuple(tensor.shape),
                tensor.stride(),
                tensor.dtype,
            )
            if key not in copies:
                copies[key] = tensor.detach().clone()
            return copies[key]

        super().__init__(copy_if_temporary, lambda tensor: tensor)


def _storage_address_or_tensor_id(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _make_output_contiguous_and_add_its_address(
    result_tensor: torch.Tensor, used_addresses: set[int]
) -> torch.Tensor:
    """Return a tensor in the form that ORT requires of an output: contiguous, in memory of its own.

    used_addresses: memory in use by other tensors; the memory of the result is added.
    """
    plain = result_tensor.detach()
    # Of nothing torch takes any strides for contiguous, and ORT those of its own alone.
    if not plain.numel():
        return plain.new_empty(plain.shape)
    # ORT has no sparse outputs.
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    owns_memory = (
        plain.is_contiguous()
        and plain.numel() * plain.element_size() == plain.untyped_storage().nbytes()
    )
    # `owns_memory` is false for a slice: a view that is contiguous, but in a larger memory.
    if not owns_memory or _storage_address_or_tensor_id(plain) in used_addresses:
        plain = plain.clone(memory_format=torch.contiguous_format)
    used_addresses.add(_storage_address_or_tensor_id(plain))
    return plain


def _derive_input_gradients_and_drop_graph(
    ctx: Any, output_gradients: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the inputs that need one, and None for the others."""
    pairs = [
        # ORT may pass a gradient in another dtype or shape than torch's result.
        (result, g.to(result.dtype).reshape(result.shape))
        for result, g in zip(ctx.results, output_gradients)
        if result.requires_grad and g is not None
    ]
    leaves = [leaf for leaf, needs_gradient in zip(ctx.leaves, ctx.wanted) if needs_gradient]
    gradient_iterator: Iterator[Any] = iter([None] * len(leaves))
    if pairs:
        results, gradients = zip(*pairs)
        gradient_iterator = iter(torch.autograd.grad(results, leaves, gradients, allow_unused=True))
    ctx.results = ()
    used_addresses = {
        _storage_address_or_tensor_id(g) for g in output_gradients if g is not None
    } | set(map(_storage_address_or_tensor_id, ctx.leaves))
    return tuple(
        _make_gradient_or_zeros_and_add_its_address(next(gradient_iterator), leaf, used_addresses)
        if needs_gradient
        else None
        for leaf, needs_gradient in zip(ctx.leaves, ctx.wanted)
    )


def _make_gradient_or_zeros_and_add_its_address(
    gradient: torch.Tensor | None, leaf: torch.Tensor, used_addresses: set[int]
) -> torch.Tensor:
    """Return a gradient for ORT, which requires zeros in place of None."""
    return (
        torch.zeros_like(leaf, memory_format=torch.contiguous_format)
        if gradient is None
        else _make_output_contiguous_and_add_its_address(gradient, used_addresses)
    )
