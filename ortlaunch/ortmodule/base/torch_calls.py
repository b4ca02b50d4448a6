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

Function = Callable[..., Sequence[torch.Tensor]]
# Makes each title unique, because ORT registers functions by name.
_numbers = itertools.count()


def getter(name: str) -> AnyFunction:
    """Return the function that reads a property of tensors, as `__torch_function__` receives it."""
    return getattr(torch.Tensor, name).__get__


def setter(name: str) -> AnyFunction:
    """Return the function that sets a property of tensors, as `__torch_function__` receives it."""
    return getattr(torch.Tensor, name).__set__


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Hide calls of torch inside the with-block from the tracer and from `__torch_function__`."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # not in torch's stub
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


@dataclass
class Calls:
    """Number and duration of an operator's or layer's calls from ORT's graphs, on this rank's
    thread.
    """

    forward: int = 0
    backward: int = 0
    seconds: float = 0.0


calls: dict[str, Calls] = {}
"""Calls in this process, by operator or layer."""
passes = Calls()
"""Passes of ORT's graphs themselves."""


def calls_from_graph() -> dict[str, Calls]:
    """Return the operators and layers that were called from a graph."""
    return {name: counted for name, counted in calls.items() if counted.forward}


def share() -> float:
    """Return the share of calls of torch in the time of ORT's passes, from 0 to 1."""
    return (
        sum(counted.seconds for counted in calls.values()) / passes.seconds
        if passes.seconds
        else 0.0
    )


def restart() -> None:
    """Set all counters to zero."""
    restore({})


def snapshot() -> dict[str, Calls]:
    """Return a copy of the counters, for `restore`."""
    return {name: replace(counted) for name, counted in {**calls, "": passes}.items()}


def restore(before: dict[str, Calls]) -> None:
    """Set every counter back; a counter that is not in `before` becomes zero."""
    for name, counted in {**calls, "": passes}.items():
        vars(counted).update(vars(before.get(name, Calls())))


@contextlib.contextmanager
def timed_pass() -> Iterator[None]:
    """Measure one pass of an ORT graph."""
    with _timed(passes):
        yield


errors: list[Exception] = []
"""Errors of calls in the current pass, for torch_in_graph/pass_errors.py."""


@contextlib.contextmanager
def noting_errors() -> Iterator[None]:
    """Keep an error of a call, which ORT would not pass on."""
    try:
        yield
    except Exception as error:
        errors.append(error)
        raise


def as_function(
    name: str,
    run: Function,
    kept: frozenset[int],
    own: Sequence[torch.Tensor] = (),
    around: Any = contextlib.nullcontext,
) -> Any:
    """Return a torch.autograd.Function with a unique name, for ORT to call.

    run: takes tensors and returns tensors.
    kept: positions of inputs that ORT keeps unchanged until the backward pass: weights, and inputs
        of the model.
    own: weights that `run` reads without a parameter for them; they are passed as the last inputs,
        so that they get their gradients.
    around: returns a context for each forward pass.
    """
    counted = calls.setdefault(name, Calls())

    def forward(ctx: Any, *inputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        # The exporter calls the function once to trace it; this is no call from a graph.
        exporting = torch.jit.is_tracing()
        with _timed(Calls() if exporting else counted), noting_errors(), around():
            counted.forward += not exporting
            outputs = _run(ctx, run, inputs, kept, own)
            ctx.mark_non_differentiable(
                *(output for output in outputs if not output.is_floating_point())
            )
        return outputs if len(outputs) > 1 else outputs[0]

    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        with one_call(name, backward=True):
            found = _derive(ctx, gradients)
        return found if len(found) > 1 else found[0]

    title = f"{name}_{next(_numbers)}"
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    place = {"__module__": __name__, "__qualname__": title}
    return types.new_class(
        title, (torch.autograd.Function,), {}, lambda body: body.update(members, **place)
    )


@contextlib.contextmanager
def one_call(name: str, backward: bool = False) -> Iterator[None]:
    """Count and measure one call of torch from a graph, and note its error."""
    counted = calls.setdefault(name, Calls())
    counted.forward += not backward
    counted.backward += backward
    with _timed(counted), noting_errors():
        yield


@contextlib.contextmanager
def _timed(counted: Calls) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        counted.seconds += time.perf_counter() - began


def _run(
    ctx: Any,
    run: Function,
    inputs: Sequence[torch.Tensor],
    kept: frozenset[int],
    own: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Run the function on detached inputs, and keep its graph for the backward pass."""
    number = len(inputs) - len(own)
    wanted = [
        needed and given.is_floating_point() for needed, given in zip(ctx.needs_input_grad, inputs)
    ]
    # Memory that an output must not share.
    places = set(map(_place, inputs))
    ctx.leaves = ()
    ctx.results = ()
    ctx.wanted = wanted
    # Autocast would cast a second time; a layer that torch runs opens its own.
    with torch.autocast(inputs[0].device.type if inputs else "cpu", enabled=False):
        if not any(wanted):
            with torch.no_grad():
                return tuple(_own(result, places) for result in run(*inputs[:number]))
        leaves = [
            given.detach().requires_grad_(want) for given, want in zip(inputs[:number], wanted)
        ]
        saved = _SavedCopies({_place(given) for i, given in enumerate(inputs) if i not in kept})
        with torch.enable_grad(), saved:
            results = tuple(run(*leaves))
    ctx.leaves = [*leaves, *own]
    ctx.results = results
    return tuple(_own(result, saved.places | places) for result in results)


class _SavedCopies(torch.autograd.graph.saved_tensors_hooks):
    """Hooks that copy a tensor that torch saves, if it is in memory of a temporary tensor of ORT."""

    def __init__(self, passing: set[int]) -> None:
        self.places: set[int] = set()
        copies: dict[Any, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            place = _place(tensor)
            # Saved as it is; its memory is remembered, because an output must not share it.
            if place not in passing:
                self.places.add(place)
                return tensor
            # One copy for each view, also if torch saves it several times.
            key = (
                place,
                tensor.storage_offset(),
                tuple(tensor.shape),
                tensor.stride(),
                tensor.dtype,
            )
            if key not in copies:
                copies[key] = tensor.detach().clone()
            return copies[key]

        super().__init__(pack, lambda tensor: tensor)


def _place(tensor: torch.Tensor) -> int:
    """Return an identifier of a tensor's memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _own(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """Return a tensor in the form that ORT requires of an output: contiguous, in memory of its own.

    taken: memory in use by other tensors; the memory of the result is added.
    """
    plain = tensor.detach()
    # Of nothing torch takes any strides for contiguous, and ORT those of its own alone.
    if not plain.numel():
        return plain.new_empty(plain.shape)
    # ORT has no sparse outputs.
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    whole = (
        plain.is_contiguous()
        and plain.numel() * plain.element_size() == plain.untyped_storage().nbytes()
    )
    # `whole` is false for a slice: a view that is contiguous, but in a larger memory.
    if not whole or _place(plain) in taken:
        plain = plain.clone(memory_format=torch.contiguous_format)
    taken.add(_place(plain))
    return plain


def _derive(ctx: Any, given: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the inputs that need one, and None for the others."""
    pairs = [
        # ORT may pass a gradient in another dtype or shape than torch's result.
        (result, g.to(result.dtype).reshape(result.shape))
        for result, g in zip(ctx.results, given)
        if result.requires_grad and g is not None
    ]
    leaves = [leaf for leaf, want in zip(ctx.leaves, ctx.wanted) if want]
    found: Iterator[Any] = iter([None] * len(leaves))
    if pairs:
        results, gradients = zip(*pairs)
        found = iter(torch.autograd.grad(results, leaves, gradients, allow_unused=True))
    ctx.results = ()
    taken = {_place(g) for g in given if g is not None} | set(map(_place, ctx.leaves))
    return tuple(
        _gradient(next(found), leaf, taken) if want else None
        for leaf, want in zip(ctx.leaves, ctx.wanted)
    )


def _gradient(found: torch.Tensor | None, leaf: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """Return a gradient for ORT, which requires zeros in place of None."""
    return (
        torch.zeros_like(leaf, memory_format=torch.contiguous_format)
        if found is None
        else _own(found, taken)
    )
