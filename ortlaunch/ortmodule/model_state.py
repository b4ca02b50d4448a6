"""Follows what of a model itself, beside its weights, an exported graph holds fixed: modes, numbers, hooks, parts.

A trace notes what of Python's a forward pass reads (python_state.py); before each later pass it is compared, and a
graph of others is built anew. What a graph cannot follow at all is refused: hooks of a backward pass, numbers that
are drawn by Python or NumPy, and a forward pass that goes on from what an earlier one left in an attribute.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

from ortlaunch.ortmodule import torch_modules
from ortlaunch.ortmodule.buffers import kept_buffers
from ortlaunch.ortmodule.counters import tally
from ortlaunch.ortmodule.export import Export, seen_of
from ortlaunch.ortmodule.patching import wrap_method
from ortlaunch.ortmodule.python_state import GLOBAL, GONE, Reads, Values, drawn, noted, same
from ortlaunch.ortmodule.settings import settings_of
from ortlaunch.ortmodule.source_guard import EVALUATION, TRAINING, owner

_PARTS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


def follow_model_state() -> None:
    """A layer's `eval()`, a changed number or hook, a replaced weight or buffer: ORT's graph stayed as it was."""
    for manager in (TRAINING, EVALUATION):
        wrap_method(owner(manager), "forward", _exporting_when_other)


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
        place for place, value in after.frozen.items() if not (value is GONE or same(reads.places[place], value))
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
        if not torch_modules.inside(path, outer) and any(getattr(layer, hooks, None) for hooks in _BACKWARD):
            raise RuntimeError(
                f"{_plain(path) or 'the model'} has a backward hook, which ONNX Runtime's graph would never call; "
                "hooks of parameters are called, and those of layers in Settings.torch_modules"
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
            f"a forward pass draws numbers with Python's {new[0]}, which would be the same in every step of ONNX "
            "Runtime's graph; draw them with torch, or give them to the forward pass as arguments"
        )


def _told(holder: str, name: str) -> str:
    if holder.startswith(GLOBAL):
        return f"{holder.removeprefix(GLOBAL)}.{name}"
    return f"the model's {_plain(f'{holder}.{name}')}"


def _plain(path: str) -> str:
    """Without ORT's own part of it."""
    return path.partition(".")[2]


# ------------------------------------------------------------------------------------------------ in each pass


class _Seen:
    """A model as it was when its graph was made."""

    def __init__(self, module: nn.Module, seen: dict[str, Any]) -> None:
        places = [(holder, name) for holder, name in seen.get("read", [])]
        self._values = Values(module, places, set(seen.get("names", [])))
        groups = [getattr(layer, part) for layer in module.modules() for part in _PARTS]
        self._empty = [group for group in groups if not group]  # most of them, and quick to ask
        # With the objects, because an id is another's once its object is gone.
        self._parts = [(group, tuple(map(id, group.values())), tuple(group.values())) for group in groups if group]

    def changed(self) -> str:
        """What is not as it was; empty for nothing."""
        for place in self._values.changed():
            return _told(*place)
        if any(self._empty) or any(tuple(map(id, group.values())) != ids for group, ids, _ in self._parts):
            return "a weight, buffer, layer or hook of the model"
        return ""


def _exporting_when_other(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    if not settings_of(manager).follow_model_state:
        return original(manager, *args, **kwargs)
    seen: _Seen | None = getattr(manager, "_ortlaunch_seen", None)
    changed = seen.changed() if seen and manager._execution_agent is not None else ""
    if changed:
        tally.note(f"exported again, because {changed} had changed")
        forget_graph(manager)
        for name in ("_ortlaunch_norms", "_ortlaunch_frozen"):
            vars(manager).pop(name, None)
    agent = manager._execution_agent
    output = original(manager, *args, **kwargs)
    if manager._execution_agent is not agent or seen is None:
        manager._ortlaunch_seen = _Seen(manager._flattened_module, seen_of(manager._graph_transition_manager))
    return output


def forget_graph(manager: Any) -> None:
    """Let the next forward export and build anew."""
    if manager._execution_agent is not None:
        tally.re_exports += 1
    manager._graph_transition_manager._exported_model_info = None
    manager._execution_agent = None
    # These belong to the old graph; levels 1 and 2 of memory optimization would choose from them.
    observer = manager._runtime_inspector.memory_ob
    observer.cluster_id_combination_to_saving_symbolics_map.clear()
    observer.symbolic_dim_collecting_completed = False
