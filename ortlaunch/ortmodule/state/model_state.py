"""Follows what of a model itself, beside its weights, an exported graph holds fixed: modes, numbers, hooks, parts.

A trace notes what of Python's a forward pass reads (python_state.py); before each later pass it is compared, and a
graph of others is built anew. What a graph cannot follow at all is refused: hooks of a backward pass, numbers that
are drawn by Python or NumPy, and a forward pass that goes on from what an earlier one left in an attribute.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn

from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.state.buffers import kept_buffers
from ortlaunch.ortmodule.torch_in_graph import torch_modules
from ortlaunch.ortmodule.tracing.python_state import (
    ENVIRONMENT,
    GLOBAL,
    GONE,
    Reads,
    Values,
    drawn,
    noted,
    same,
)

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.export import Facts

_PARTS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


# ---------------------------------------------------------------------------------------------- in the export


@contextlib.contextmanager
def noted_state(export: Export) -> Iterator[None]:
    """Note what of Python's the passes read, and refuse what a graph cannot follow."""
    module = export.module
    if export.training:
        _refuse_backward_hooks(module, torch_modules.paths(export))
    with noted(module) as reads, _nothing_drawn():
        yield
        _refuse_memory(module, reads, export.inputs)
    export.seen.update(read=sorted(reads.places), names=sorted(reads.names))


def _refuse_memory(module: nn.Module, reads: Reads, inputs: Any) -> None:
    """Whether a pass goes on from what another one left: a value read, then changed, and changed by a second pass."""
    after = Values(module, reads.places)
    changed = {
        place
        for place, value in after.frozen.items()
        if not (value is GONE or same(reads.places[place], value))
    }
    if not changed:
        return
    with torch.no_grad(), kept_buffers(module):
        module(*(tensor.clone() for tensor in inputs))
    for place in after.changed():
        if place in changed:
            raise RuntimeError(
                f"a forward pass reads and changes {_told(*place)}, and ONNX Runtime's graph would "
                "hold its first value; give such a value to the forward pass as an argument"
            )


def _refuse_backward_hooks(module: nn.Module, outer: list[str]) -> None:
    for path, layer in module.named_modules():
        if not torch_modules.inside(path, outer) and any(
            getattr(layer, hooks, None) for hooks in _BACKWARD
        ):
            raise RuntimeError(
                f"{_plain(path) or 'the model'} has a backward hook, which ONNX Runtime's graph "
                "would never call; hooks of parameters are called, and those of layers in "
                "Settings.torch_modules"
            )


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Refuse a pass with numbers that Python or NumPy draws: they would be the same in every step."""
    shared: dict[str, Any] = {"random": random.getstate, "numpy.random": numpy.random.get_state}
    sources = {name: state.__self__ for name, state in shared.items()}
    before = {name: drawn(source) for name, source in sources.items()}
    yield
    new = [name for name, source in sources.items() if drawn(source) != before[name]]
    if new:
        raise RuntimeError(
            f"a forward pass draws numbers with Python's {new[0]}, which would be the same in "
            "every step of ONNX Runtime's graph; draw them with torch, or give them to the "
            "forward pass as arguments"
        )


def _told(holder: str, name: str) -> str:
    if holder.startswith(GLOBAL):
        return f"{holder.removeprefix(GLOBAL)}.{name}"
    return (
        f"{ENVIRONMENT} {name}"
        if holder == ENVIRONMENT
        else f"the model's {_plain(f'{holder}.{name}')}"
    )


def _plain(path: str) -> str:
    """Without ORT's own part of it."""
    return path.partition(".")[2]


# ------------------------------------------------------------------------------------------------ in each pass


class TracedState:
    """A model as it was when its graph was made."""

    def __init__(self, module: nn.Module, seen: Facts) -> None:
        places = [(holder, name) for holder, name in seen.get("read", [])]
        self._values = Values(module, places, set(seen.get("names", [])))
        groups = [getattr(layer, part) for layer in module.modules() for part in _PARTS]
        self._empty = [group for group in groups if not group]  # most of them, and quick to ask
        # With the objects, because an id is another's once its object is gone.
        self._parts = [
            (group, tuple(map(id, group.values())), tuple(group.values()))
            for group in groups
            if group
        ]

    def replaced(self) -> bool:
        """Whether a weight, buffer, layer or hook is another object."""
        return any(self._empty) or any(
            tuple(map(id, group.values())) != ids for group, ids, _ in self._parts
        )

    def changed(self) -> str:
        """Which of the values that a pass reads is not as it was; empty for none."""
        return next((_told(*place) for place in self._values.changed()), "")
