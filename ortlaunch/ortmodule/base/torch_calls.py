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
    from ortlaunch.ortmodule.base.ort_types import AnyFunction

TensorFunction = Callable[..., Sequence[torch.Tensor]]
# Makes each title unique, because ORT registers functions by name.
_title_numbers = itertools.count()


def tensor_getter(property_name: str) -> AnyFunction:
    """Return the function that reads a property of tensors, as `__torch_function__` receives it."""
    return getattr(torch.Tensor, property_name).__get__


def tensor_setter(property_name: str) -> AnyFunction:
    """Return the function that sets a property of tensors, as `__torch_function__` receives it."""
    return getattr(torch.Tensor, property_name).__set__


@contextlib.contextmanager
def pause_tracing() -> Iterator[None]:
    """Hide calls of torch inside the with-block from the tracer and from `__torch_function__`."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # not in torch's stub
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


@dataclass
class CallCounts:
    """Number and duration of an operator's or layer's calls from ORT's graphs, on this rank's
    thread.
    """

    forward: int = 0
    backward: int = 0
    seconds: float = 0.0


counts_by_name: dict[str, CallCounts] = {}
"""Calls in this process, by operator or layer."""
pass_counts = CallCounts()
"""Passes of ORT's graphs themselves."""


def counts_of_called() -> dict[str, CallCounts]:
    """Return the operators and layers that were called from a graph."""
    return {
        name: call_counts for name, call_counts in counts_by_name.items() if call_counts.forward
    }


def torch_share_of_pass_time() -> float:
    """Return the share of calls of torch in the time of ORT's passes, from 0 to 1."""
    return (
        sum(call_counts.seconds for call_counts in counts_by_name.values()) / pass_counts.seconds
        if pass_counts.seconds
        else 0.0
    )


def reset_counters() -> None:
    """Set all counters to zero."""
    restore_counters({})


def copy_counters() -> dict[str, CallCounts]:
    """Return a copy of the counters, for `restore_counters`."""
    return {
        name: replace(call_counts)
        for name, call_counts in {**counts_by_name, "": pass_counts}.items()
    }


def restore_counters(saved_counts: dict[str, CallCounts]) -> None:
    """Set every counter back; a counter that is not in `saved_counts` becomes zero."""
    for name, call_counts in {**counts_by_name, "": pass_counts}.items():
        vars(call_counts).update(vars(saved_counts.get(name, CallCounts())))


@contextlib.contextmanager
def measure_pass() -> Iterator[None]:
    """Measure one pass of an ORT graph."""
    with _add_seconds(pass_counts):
        yield


recorded_errors: list[Exception] = []
"""Errors of calls in the current pass, for torch_in_graph/pass_errors.py."""


@contextlib.contextmanager
def record_errors() -> Iterator[None]:
    """Keep an error of a call, which ORT would not pass on."""
    try:
        yield
    except Exception as error:
        recorded_errors.append(error)
        raise


def create_call_function(
    call_name: str,
    operation: TensorFunction,
    kept_positions: frozenset[int],
    own_weights: Sequence[torch.Tensor] = (),
    forward_context: Any = contextlib.nullcontext,
    copies: bool = False,
) -> Any:
    """Return a torch.autograd.Function with a unique name, for ORT to call.

    operation: takes tensors and returns tensors.
    kept_positions: positions of inputs that ORT keeps unchanged until the backward pass: weights, and inputs
        of the model.
    own_weights: weights that `operation` reads without a parameter for them; they are passed as the last inputs,
        so that they get their gradients.
    forward_context: returns a context for each forward pass.
    copies: whether `operation` saves nothing of its inputs but copies. The outputs are then copied, too,
        and no hook sees what torch saves: a transform of torch.func allows no hooks.
    """
    call_counts = counts_by_name.setdefault(call_name, CallCounts())

    def forward(ctx: Any, *inputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        # The exporter calls the function once to trace it; this is no call from a graph.
        is_exporting = torch.jit.is_tracing()
        with (
            _add_seconds(CallCounts() if is_exporting else call_counts),
            record_errors(),
            forward_context(),
        ):
            call_counts.forward += not is_exporting
            outputs = _run_and_keep_graph(
                ctx, operation, inputs, None if copies else kept_positions, own_weights
            )
            ctx.mark_non_differentiable(
                *(output for output in outputs if not output.is_floating_point())
            )
        return outputs if len(outputs) > 1 else outputs[0]

    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        with count_call(call_name, is_backward=True):
            input_gradients = _input_gradients(ctx, gradients)
        return input_gradients if len(input_gradients) > 1 else input_gradients[0]

    title = f"{call_name}_{next(_title_numbers)}"
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    identity = {"__module__": __name__, "__qualname__": title}
    return types.new_class(
        title, (torch.autograd.Function,), {}, lambda body: body.update(members, **identity)
    )


@contextlib.contextmanager
def count_call(call_name: str, is_backward: bool = False) -> Iterator[None]:
    """Count and measure one call of torch from a graph, and note its error."""
    call_counts = counts_by_name.setdefault(call_name, CallCounts())
    call_counts.forward += not is_backward
    call_counts.backward += is_backward
    with _add_seconds(call_counts), record_errors():
        yield


@contextlib.contextmanager
def _add_seconds(call_counts: CallCounts) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        call_counts.seconds += time.perf_counter() - began


def _run_and_keep_graph(
    ctx: Any,
    operation: TensorFunction,
    inputs: Sequence[torch.Tensor],
    kept_positions: frozenset[int] | None,
    own_weights: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Run the function on detached inputs, and keep its graph for the backward pass.

    kept_positions: as in `create_call_function`; None if `operation` saves nothing of its inputs but copies.
    """
    operand_count = len(inputs) - len(own_weights)
    gradient_flags = [
        needs_gradient_by_ort and input_tensor.is_floating_point()
        for needs_gradient_by_ort, input_tensor in zip(ctx.needs_input_grad, inputs)
    ]
    # Memory that an output must not share.
    input_addresses = set(map(_memory_address, inputs))
    ctx.leaves = ()
    ctx.results = ()
    ctx.wanted = gradient_flags
    # Autocast would cast a second time; a layer that torch runs opens its own.
    with torch.autocast(inputs[0].device.type if inputs else "cpu", enabled=False):
        if not any(gradient_flags):
            with torch.no_grad():
                return tuple(
                    _output_in_own_memory(result, input_addresses)
                    for result in operation(*inputs[:operand_count])
                )
        leaves = [
            input_tensor.detach().requires_grad_(needs_gradient)
            for input_tensor, needs_gradient in zip(inputs[:operand_count], gradient_flags)
        ]
        if kept_positions is None:
            with torch.enable_grad():
                results = tuple(operation(*leaves))
            # torch may have saved any of them.
            input_addresses |= set(map(_memory_address, results))
        else:
            saved_copies = _SavedCopies(
                {
                    _memory_address(input_tensor)
                    for i, input_tensor in enumerate(inputs)
                    if i not in kept_positions
                }
            )
            with torch.enable_grad(), saved_copies:
                results = tuple(operation(*leaves))
            input_addresses |= saved_copies.saved_addresses
    ctx.leaves = [*leaves, *own_weights]
    ctx.results = results
    return tuple(_output_in_own_memory(result, input_addresses) for result in results)


class _SavedCopies(torch.autograd.graph.saved_tensors_hooks):
    """Hooks that copy a tensor that torch saves, if it is in memory of a temporary tensor of ORT."""

    def __init__(self, temporary_addresses: set[int]) -> None:
        self.saved_addresses: set[int] = set()
        copies: dict[Any, torch.Tensor] = {}

        def copy_if_temporary(tensor: torch.Tensor) -> torch.Tensor:
            address = _memory_address(tensor)
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


def _memory_address(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _output_in_own_memory(tensor: torch.Tensor, used_addresses: set[int]) -> torch.Tensor:
    """Return a tensor in the form that ORT requires of an output: contiguous, in memory of its own.

    used_addresses: memory in use by other tensors; the memory of the result is added.
    """
    plain = tensor.detach()
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
    if not owns_memory or _memory_address(plain) in used_addresses:
        plain = plain.clone(memory_format=torch.contiguous_format)
    used_addresses.add(_memory_address(plain))
    return plain


def _input_gradients(
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
    used_addresses = {_memory_address(g) for g in output_gradients if g is not None} | set(
        map(_memory_address, ctx.leaves)
    )
    return tuple(
        _gradient_or_zeros(next(gradient_iterator), leaf, used_addresses)
        if needs_gradient
        else None
        for leaf, needs_gradient in zip(ctx.leaves, ctx.wanted)
    )


def _gradient_or_zeros(
    gradient: torch.Tensor | None, leaf: torch.Tensor, used_addresses: set[int]
) -> torch.Tensor:
    """Return a gradient for ORT, which requires zeros in place of None."""
    return (
        torch.zeros_like(leaf, memory_format=torch.contiguous_format)
        if gradient is None
        else _output_in_own_memory(gradient, used_addresses)
    )
