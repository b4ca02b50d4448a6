"""Follows what of a model itself, beside its weights, an exported graph holds fixed: modes, numbers, hooks, parts.

A trace notes which attributes of which layers a forward pass reads; before each later pass they are compared, and a
graph of others is built anew. What a graph cannot follow at all is refused: hooks of a backward pass, numbers that
are drawn by Python or NumPy, and a forward pass that goes on from what an earlier one left in an attribute.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ortlaunch.worker.ort.buffers import kept_buffers
from ortlaunch.worker.ort.known import EVALUATION, TRAINING, TRANSITION, owner
from ortlaunch.worker.ort.patching import wrap_method
from ortlaunch.worker.ort.tally import tally, traced

_NUMBERS = (bool, int, float, str)
_KINDS = (*_NUMBERS, type(None), list, tuple, torch.Tensor)
_PARTS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_GONE = object()
Read = dict[tuple[str, str], Any]


def follow_model_state() -> None:
    """A layer's `eval()`, a changed number or hook, a replaced weight or buffer: ORT's graph stayed as it was."""
    wrap_method(owner(TRANSITION), "_get_exported_model", _noting)
    for manager in (TRAINING, EVALUATION):
        wrap_method(owner(manager), "forward", _exporting_when_other)


# ---------------------------------------------------------------------------------------------- in the export


def _noting(original: Callable[..., Any], **kwargs: Any) -> Any:
    module = kwargs["flattened_module"]
    if kwargs["model_info_for_export"].export_mode == torch.onnx.TrainingMode.TRAINING:
        _refuse_backward_hooks(module)
    with _noted(module) as read, _nothing_drawn():
        exported = original(**kwargs)
        _refuse_memory(module, read, kwargs["flatten_module_inputs"])
    traced(kwargs["stage3_param_handle"])["read"] = sorted(read)
    return exported


@contextlib.contextmanager
def _noted(module: nn.Module) -> Iterator[Read]:
    """Yields, filled in passes of `module`, the (layer, attribute) that they read before they write, with the value."""
    paths = {id(layer): path for path, layer in module.named_modules() if path}  # that without is ORT's
    read: Read = {}
    written: set[tuple[str, str]] = set()
    running: list[None] = []
    write = nn.Module.__setattr__

    def getting(layer: Any, name: str) -> Any:
        value = object.__getattribute__(layer, name)
        if running and isinstance(value, _KINDS):
            path = paths.get(id(layer))
            if path is not None and (path, name) not in written:
                read.setdefault((path, name), _frozen(value))
        return value

    def setting(layer: Any, name: str, value: Any) -> None:
        if running and id(layer) in paths:
            written.add((paths[id(layer)], name))
        write(layer, name, value)

    def begin(who: nn.Module, _: Any) -> None:
        if who is module:
            written.clear()
            running.append(None)

    hooks = [module.register_forward_pre_hook(begin)]
    hooks.append(module.register_forward_hook(lambda *_: running.clear()))
    layers: Any = nn.Module
    layers.__getattribute__, layers.__setattr__ = getting, setting
    try:
        yield read
    finally:
        del layers.__getattribute__
        layers.__setattr__ = write
        for hook in hooks:
            hook.remove()


def _frozen(value: Any) -> Any:
    """What of a value a graph depends on, which can be compared later."""
    if isinstance(value, torch.Tensor):
        return value, value._version
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, _NUMBERS) and type(one) is type(other) and repr(one) == repr(other)  # nan is not nan


def _values(module: nn.Module, names: Any) -> list[tuple[Mapping[str, Any], str, Any]]:
    """(attributes of a layer, name, value as it is now) of what was read."""
    layers = dict(module.named_modules())
    found = [(vars(layers[path]), name) for path, name in names if path in layers]
    return [(attributes, name, _frozen(attributes.get(name, _GONE))) for attributes, name in found]


def _refuse_memory(module: nn.Module, read: Read, inputs: Any) -> None:
    """Whether a pass goes on from what another one left: a value read, then changed, and changed by a second pass."""
    after = _values(module, read)
    changed = [key for key, (*_, now) in zip(list(read), after) if not _same(read[key], now) and now is not _GONE]
    if not changed:
        return
    first = _values(module, changed)
    with torch.no_grad(), kept_buffers(module):
        module(*(tensor.clone() for tensor in inputs))
    for (path, name), before, now in zip(changed, first, _values(module, changed)):
        if not _same(before[2], now[2]):
            raise RuntimeError(
                f"a forward pass reads and changes the model's {_plain(path, name)}, and ONNX Runtime's graph would "
                "hold its first value; give such a value to the forward pass as an argument"
            )


def _refuse_backward_hooks(module: nn.Module) -> None:
    for path, layer in module.named_modules():
        if any(getattr(layer, hooks, None) for hooks in _BACKWARD):
            raise RuntimeError(
                f"{_plain(path, '') or 'the model'} has a backward hook, which ONNX Runtime's graph would never call; "
                "hooks of parameters are called"
            )


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Refuse a pass with numbers that Python or NumPy draws: they would be the same in every step."""
    import numpy

    sources: dict[str, Callable[[], Any]] = {"random": random.getstate, "numpy.random": numpy.random.get_state}
    with numpy.printoptions(threshold=sys.maxsize):
        before = {name: repr(state()) for name, state in sources.items()}
    yield
    with numpy.printoptions(threshold=sys.maxsize):
        drawn = [name for name, state in sources.items() if repr(state()) != before[name]]
    if drawn:
        raise RuntimeError(
            f"a forward pass draws numbers with Python's {drawn[0]}, which would be the same in every step of ONNX "
            "Runtime's graph; draw them with torch, or give them to the forward pass as arguments"
        )


def _plain(path: str, name: str) -> str:
    return ".".join(part for part in (*path.split(".")[1:], name) if part)


# ------------------------------------------------------------------------------------------------ in each pass


class _Seen:
    """A model as it was when its graph was made."""

    def __init__(self, module: nn.Module, read: Any) -> None:
        self._values = _values(module, read)
        groups = [getattr(layer, part) for layer in module.modules() for part in _PARTS]
        self._empty = [group for group in groups if not group]  # most of them, and quick to ask
        # With the objects, because an id is another's once its object is gone.
        self._parts = [(group, tuple(map(id, group.values())), tuple(group.values())) for group in groups if group]

    def changed(self) -> str:
        """What is not as it was; empty for nothing."""
        for attributes, name, value in self._values:
            if not _same(value, _frozen(attributes.get(name, _GONE))):
                return name
        if any(self._empty) or any(tuple(map(id, group.values())) != ids for group, ids, _ in self._parts):
            return "a weight, buffer, layer or hook"
        return ""


def _exporting_when_other(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    seen: _Seen | None = getattr(manager, "_ortlaunch_seen", None)
    changed = seen.changed() if seen and manager._execution_agent is not None else ""
    if changed:
        tally.note(f"exported again, because the model's own state had changed: {changed}")
        forget_graph(manager)
        for name in ("_ortlaunch_norms", "_ortlaunch_frozen"):
            vars(manager).pop(name, None)
    agent = manager._execution_agent
    output = original(manager, *args, **kwargs)
    if manager._execution_agent is not agent or seen is None:
        read = traced(manager._graph_transition_manager).get("read", [])
        manager._ortlaunch_seen = _Seen(manager._flattened_module, read)
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
