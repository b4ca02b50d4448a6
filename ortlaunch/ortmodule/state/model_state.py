"""Follow the state of a model that an exported graph fixes, beside its weights.

Such state are modes, Python values, hooks and parts. A trace records the Python state that a
forward pass reads (python_state.py). Before each later pass that state is compared, and after a
change the graph is built again. A graph cannot follow hooks of a backward pass, numbers that Python
or NumPy draws, and a forward pass that continues from a value that an earlier one left in an
attribute: these are refused.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy
import torch
from torch import nn

from ortlaunch.ortmodule.base.export import Export, own_path
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
    from ortlaunch.ortmodule.base.ort_types import AnyFunction

# Attributes of nn.Module whose change means another graph.
_PARTS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


# ---------------------------------------------------------------------------------------------- in the export


@contextlib.contextmanager
def noted_state(export: Export) -> Iterator[None]:
    """Record the Python state that the passes read, and refuse state that a graph cannot follow."""
    module = export.module
    if export.training:
        _refuse_backward_hooks(module, torch_modules.paths(export))
    with noted(module) as reads, _nothing_drawn():
        yield
        _refuse_memory(module, reads, export.inputs)
    export.facts.update(read=sorted(reads.places), names=sorted(reads.names))


def _refuse_memory(module: nn.Module, reads: Reads, inputs: Any) -> None:
    """Refuse a pass that continues from a value that an earlier pass left.

    Such a value is read, then changed, and changed again by a second pass.
    """
    after = Values(module, reads.places)
    changed = {
        place
        for place, value in after.frozen.items()
        if not (value is GONE or same(reads.places[place], value))
    }
    if not changed:
        return
    # One more pass: a value that it does not change again was only initialized by the first.
    with torch.no_grad(), kept_buffers(module):
        module(*(tensor.clone() for tensor in inputs))
    for place in after.changed():
        if place in changed:
            line, layer = reads.writers.get(place[0], ("", ""))
            layer = own_path(layer)
            instead = f", or let {layer} run as torch (Settings.torch_modules={[layer]})"
            raise RuntimeError(
                f"a forward pass reads and changes {_described(*place)}{line}, and ONNX Runtime's "
                "graph would hold its first value; give such a value to the forward pass as an "
                f"argument{instead if layer else ''}"
            )


def _refuse_backward_hooks(module: nn.Module, outer: list[str]) -> None:
    """Raise RuntimeError if a layer in the graph has a backward hook."""
    for path, layer in module.named_modules():
        if not torch_modules.inside(path, outer) and any(
            getattr(layer, hooks, None) for hooks in _BACKWARD
        ):
            raise RuntimeError(
                f"{own_path(path) or 'the model'} has a backward hook, which ONNX Runtime's graph "
                "would never call; hooks of parameters are called, and those of layers in "
                "Settings.torch_modules"
            )


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Refuse a pass that seeds torch, or draws numbers with Python or NumPy.

    These would be the same in every step.
    """
    shared: dict[str, Any] = {"random": random.getstate, "numpy.random": numpy.random.get_state}
    sources = {name: state.__self__ for name, state in shared.items()}
    # A draw changes the generator's state.
    before = {name: drawn(source) for name, source in sources.items()}
    with mock.patch.object(torch, "manual_seed", functools.partial(_seed, torch.manual_seed)):
        yield
    if new := [name for name, source in sources.items() if drawn(source) != before[name]]:
        raise RuntimeError(
            f"a forward pass draws numbers with Python's {new[0]}, which would be the same in "
            "every step of ONNX Runtime's graph; draw them with torch, give them to the forward "
            "pass as arguments, or let the layer run as torch "
            "(Settings.torch_modules=['PATH OF THE LAYER'])"
        )


def _seed(plainly: AnyFunction, seed: int) -> torch.Generator:
    if torch.jit.is_tracing():
        raise RuntimeError(
            f"a forward pass seeds torch's random numbers with {seed}, and ONNX Runtime's graph "
            "would never: seed them before it, give the numbers to the forward pass as arguments, "
            "or let the layer run as torch (Settings.torch_modules=['PATH OF THE LAYER'])"
        )
    found: torch.Generator = plainly(seed)
    return found


def _described(holder: str, name: str) -> str:
    """Return a place of Python state as a name for messages."""
    if holder.startswith(GLOBAL):
        return f"{holder.removeprefix(GLOBAL)}.{name}"
    return (
        f"{ENVIRONMENT} {name}"
        if holder == ENVIRONMENT
        else f"the model's {own_path(f'{holder}.{name}')}"
    )


# ------------------------------------------------------------------------------------------------ in each pass


class TracedState:
    """The state of a model at the time when its graph was made."""

    def __init__(self, module: nn.Module, facts: Facts) -> None:
        places = [(holder, name) for holder, name in facts.get("read", [])]
        self._values = Values(module, places, set(facts.get("names", [])))
        groups = [getattr(layer, part) for layer in module.modules() for part in _PARTS]
        # Most groups are empty, and to check that they still are is fast.
        self._empty = [group for group in groups if not group]
        # The objects are kept, because the id of a freed object may be used again.
        self._parts = [
            (group, tuple(map(id, group.values())), tuple(group.values()))
            for group in groups
            if group
        ]

    def replaced(self) -> bool:
        """Return whether a weight, buffer, layer or hook is another object than before."""
        return any(self._empty) or any(
            tuple(map(id, group.values())) != ids for group, ids, _ in self._parts
        )

    def changed(self) -> str:
        """Return the name of a value that a pass reads and that has changed, or an empty string."""
        return next((_described(*place) for place in self._values.changed()), "")
