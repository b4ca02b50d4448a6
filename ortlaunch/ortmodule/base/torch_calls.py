"""Calls of torch from inside ORT's graph: any function of tensors, with torch's own derivative, as a PythonOp.

ORT plans its memory by the graph alone: it writes over an input or output of a call once no node needs it. What torch
saves for the backward pass is therefore copied where it is ORT's, and only then.
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
_numbers = itertools.count()


def getter(name: str) -> AnyFunction:
    """The function with which torch reads a property of tensors, as `__torch_function__` receives it."""
    return getattr(torch.Tensor, name).__get__


def setter(name: str) -> AnyFunction:
    """The function with which torch sets a property of tensors, as `__torch_function__` receives it."""
    return getattr(torch.Tensor, name).__set__


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Calls of torch inside are neither traced nor given to `__torch_function__`."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # not in torch's stub
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


@dataclass
class Calls:
    """How often one operator or layer was called from ORT's graphs, and how long that took on this rank's thread."""

    forward: int = 0
    backward: int = 0
    seconds: float = 0.0


calls: dict[str, Calls] = {}
"""Of this process, by operator or layer."""
passes = Calls()
"""Those of ORT's graphs themselves."""


def made() -> dict[str, Calls]:
    """Those that were called from a graph."""
    return {name: counted for name, counted in calls.items() if counted.forward}


def share() -> float:
    """Of the time of ORT's passes, what calls of torch take."""
    return (
        sum(counted.seconds for counted in calls.values()) / passes.seconds
        if passes.seconds
        else 0.0
    )


def restart() -> None:
    """Count from zero."""
    restore({})


def snapshot() -> dict[str, Calls]:
    """The counters as they are, for `restore`."""
    return {name: replace(counted) for name, counted in {**calls, "": passes}.items()}


def restore(before: dict[str, Calls]) -> None:
    """Set every counter back; those that are not in `before` to zero."""
    for name, counted in {**calls, "": passes}.items():
        vars(counted).update(vars(before.get(name, Calls())))


@contextlib.contextmanager
def timed_pass() -> Iterator[None]:
    """While open, one of ORT's graphs runs."""
    with _timed(passes):
        yield


_errors: list[Exception] = []


@contextlib.contextmanager
def telling_errors() -> Iterator[None]:
    """While open, one of ORT's graphs runs: of a call that fails ORT says that it failed, and not why."""
    _errors.clear()
    try:
        yield
    except Exception as error:
        if not _errors:
            raise
        raise RuntimeError(f"in a call of torch from ONNX Runtime's graph: {_errors[0]}") from error
    finally:
        _errors.clear()


@contextlib.contextmanager
def _noting_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _errors.append(error)
        raise


def as_function(
    name: str,
    run: Function,
    kept: frozenset[int],
    own: Sequence[torch.Tensor] = (),
    around: Any = contextlib.nullcontext,
) -> Any:
    """A torch.autograd.Function, of a name of its own, for ORT to call.

    run: takes tensors and returns tensors.
    kept: inputs that ORT leaves as they are until the backward pass: weights, and inputs of the model.
    own: weights that `run` uses by itself; they come as the last inputs, and get their gradients so.
    around: a context for each forward pass.
    """
    counted = calls.setdefault(name, Calls())

    def forward(ctx: Any, *inputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        exporting = torch.jit.is_tracing()
        with _timed(Calls() if exporting else counted), _noting_errors(), around():
            counted.forward += not exporting
            outputs = _run(ctx, run, inputs, kept, own)
            ctx.mark_non_differentiable(
                *(output for output in outputs if not output.is_floating_point())
            )
        return outputs if len(outputs) > 1 else outputs[0]

    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        with _timed(counted), _noting_errors():
            counted.backward += 1
            found = _derive(ctx, gradients)
        return found if len(found) > 1 else found[0]

    title = f"{name}_{next(_numbers)}"
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    place = {"__module__": __name__, "__qualname__": title}
    return types.new_class(
        title, (torch.autograd.Function,), {}, lambda body: body.update(members, **place)
    )


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
    number = len(inputs) - len(own)
    wanted = [
        needed and given.is_floating_point() for needed, given in zip(ctx.needs_input_grad, inputs)
    ]
    places = set(map(_place, inputs))
    ctx.leaves = ()
    ctx.results = ()
    ctx.wanted = wanted
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
    """Copies of what torch saves, where it lies in the memory of one of ORT's passing tensors."""

    def __init__(self, passing: set[int]) -> None:
        self.places: set[int] = set()
        copies: dict[Any, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            place = _place(tensor)
            if place not in passing:
                self.places.add(place)
                return tensor
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
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _own(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """As ORT takes an output: contiguous, in a memory that nothing else reads or writes."""
    plain = tensor.detach()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    whole = (
        plain.is_contiguous()
        and plain.numel() * plain.element_size() == plain.untyped_storage().nbytes()
    )
    if not whole or _place(plain) in taken:
        plain = plain.clone(memory_format=torch.contiguous_format)
    taken.add(_place(plain))
    return plain


def _derive(ctx: Any, given: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    pairs = [
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
    return (
        torch.zeros_like(leaf, memory_format=torch.contiguous_format)
        if found is None
        else _own(found, taken)
    )
