"""Python values that a forward pass reads, other than its arguments: their places and state.

A place is (holder, name). For a layer's attribute, the holder is the layer's path. For a global of
a user's module, it is `global ` and the module's name. For a variable of the environment, it is
`environment variable`. Closure variables are not detected.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import operator
import os
import random
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from torch import nn

from ortlaunch.ortmodule.tracing.escapes import StaleTensor

GLOBAL = "global "
ENVIRONMENT = "environment variable"
Place = tuple[str, str]
_NUMBERS = (bool, int, float, complex, str, bytes, numpy.generic, torch.dtype, torch.device)
_KINDS = (*_NUMBERS, type(None), list, tuple, set, frozenset, dict, torch.Tensor, numpy.ndarray)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
# Immutable values, and functions. If the object is the same, its value counts as unchanged.
_WHOLE = (*_NUMBERS, type(None), *_FUNCTIONS)
# nn.Module's own containers of parameters, hooks and the like; reads of them are not recorded.
_KEEPING = {
    name for name, value in vars(nn.Module()).items() if not isinstance(value, (bool, type(None)))
}
_KEEPING.add("_compiled_call_impl")
# Code in torch and in ortlaunch.
_NOT_THE_MODELS = f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}"
GONE = object()
"""The value of a place that does not exist."""
# The depth of nested values that are compared.
_DEEP = 4


# One entry for each open `unnoted`.
_paused: list[None] = []


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    """Pause the recording of reads and writes."""
    tracer = sys.gettrace()
    _paused.append(None)
    sys.settrace(None)
    try:
        yield
    finally:
        _paused.pop()
        sys.settrace(tracer)


def model_frame() -> types.FrameType | None:
    """Return the innermost running frame of the model's code, in neither torch nor ortlaunch."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(_NOT_THE_MODELS):
        frame = frame.f_back
    return frame


def _writer(paths: Mapping[int, str]) -> tuple[str, str]:
    """Return the running line of the model's code, and the path of its layer."""
    frame = model_frame()
    if frame is None:
        return "", ""
    line = f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    return line, paths.get(id(first_argument(frame)), "")


def first_argument(frame: types.FrameType) -> object:
    """Return the first argument of a running function, which is `self` in a method."""
    return frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))


class Reads:
    """Places that passes of a model depend on, and names in their code.

    A layer's attribute counts if it is read before it is written, a global if the code names it, a
    variable of the environment if it is read. `places` maps each place to a snapshot (`frozen`) of
    its value when first recorded.
    """

    def __init__(self) -> None:
        self.places: dict[Place, object] = {}
        self.names: set[str] = set()
        self.writers: dict[str, tuple[str, str]] = {}
        """The line that last wrote an attribute of a layer, and the path of the layer whose code it
        is; by the path of the former."""


@contextlib.contextmanager
def noted(module: nn.Module) -> Iterator[Reads]:
    """Record the places that passes of `module` read in the with-block; yield the records."""
    # The root module has no path. It is ORT's wrapper, so leave it out.
    paths = {id(layer): path for path, layer in module.named_modules() if path}
    reads = Reads()
    # If a pass writes a place before it reads it, the old value does not matter.
    written: set[Place] = set()
    codes: set[types.CodeType] = set()
    running: list[None] = []
    write = nn.Module.__setattr__

    def getting(layer: nn.Module, name: str) -> object:
        value = object.__getattribute__(layer, name)
        path = (
            paths.get(id(layer))
            if running and not _paused and name not in _KEEPING and not name.startswith("__")
            else None
        )
        if path is None or (path, name) in written or (path, name) in reads.places:
            return value
        if isinstance(value, _KINDS) or name in vars(layer):
            reads.places[path, name] = frozen(value)
        return value

    def setting(layer: nn.Module, name: str, value: Any) -> None:
        if running and not _paused and id(layer) in paths:
            written.add((paths[id(layer)], name))
            reads.writers[paths[id(layer)]] = _writer(paths)
        write(layer, name, value)

    def calling(frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Python calls this function at every call, so look at each code object only once.
        if event != "call" or code in codes:
            return
        codes.add(code)
        if not code.co_filename.startswith(_NOT_THE_MODELS):
            # String constants too: they may be names for getattr.
            reads.names.update(
                code.co_names, (word for word in code.co_consts if isinstance(word, str))
            )
            if _is_users(code.co_filename):
                for place, value in _globals(code.co_names, frame.f_globals, set()):
                    reads.places.setdefault(place, frozen(value))

    def begin(who: nn.Module, _: object) -> None:
        if who is module:
            written.clear()
            running.append(None)
            sys.settrace(calling)

    def end(*_: object) -> None:
        running.clear()
        sys.settrace(before)

    before: Any = sys.gettrace()
    hooks = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    layers: Any = nn.Module
    # Set on the class: Python ignores such methods on an instance.
    layers.__getattribute__ = getting
    layers.__setattr__ = setting
    try:
        with _environment(reads, running):
            yield reads
    finally:
        end()
        del layers.__getattribute__
        layers.__setattr__ = write
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _environment(reads: Reads, running: list[None]) -> Iterator[None]:
    """Record the environment variables that a pass reads."""
    environment: Any = type(os.environ)
    read = environment.__getitem__

    def reading(variables: Any, name: str) -> Any:
        if running and not _paused:
            known = variables.encodekey(name) in variables._data
            reads.places.setdefault((ENVIRONMENT, name), read(variables, name) if known else GONE)
        return read(variables, name)

    with mock.patch.object(environment, "__getitem__", reading):
        yield


def _globals(
    names: Iterable[str], namespace: Mapping[str, object], seen: set[int]
) -> Iterator[tuple[Place, object]]:
    """Yield place and value of each global in `names`, of this module and user modules it names."""
    module = namespace.get("__name__")
    if id(namespace) in seen or vars(sys.modules.get(str(module), object)) is not namespace:
        return
    seen.add(id(namespace))
    for name in names:
        value = namespace.get(name, GONE)
        if isinstance(value, types.ModuleType):
            if _is_users(getattr(value, "__file__", None)):
                yield from _globals(names, vars(value), seen)
        elif value is not GONE:
            yield (f"{GLOBAL}{module}", name), value


def frozen(value: Any, names: set[str] | None = None, deep: int = _DEEP) -> Any:
    """Return a snapshot of a value. Two snapshots can be compared with `same`.

    Args:
        value: the value.
        names: only these attributes of objects; tensors in objects and dictionaries are included.
            None: all attributes, without those tensors, because a pass may store results there that
            nothing reads.
        deep: the number of levels of nested values to include.
    """
    if isinstance(value, (*_WHOLE, StaleTensor)) or not deep:
        return value
    if isinstance(value, nn.Parameter) and value.requires_grad:
        # An input of the graph, never a constant of the trace; every step changes its values.
        return value
    if isinstance(value, torch.Tensor):
        # The version counts in-place changes; a tensor of inference mode has none.
        return value, None if value.is_inference() else value._version
    if isinstance(value, numpy.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, (random.Random, numpy.random.RandomState, numpy.random.Generator)):
        return drawn(value)
    if isinstance(value, (list, tuple)):
        return tuple(frozen(item, names, deep - 1) for item in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    if isinstance(value, Mapping):
        items = list(value.items())
        who = type(value)
    elif hasattr(value, "__dict__") and not isinstance(
        value, (nn.Module, types.ModuleType, enum.Enum)
    ):
        if isinstance(value, type) and not _is_settings(value):
            return value
        items = [item for item in vars(value).items() if names is None or item[0] in names]
        who = value if callable(value) else type(value)
    else:
        return value
    kept = [item for item in items if names is not None or not isinstance(item[1], torch.Tensor)]
    return who, *((key, frozen(item, names, deep - 1)) for key, item in kept)


def drawn(source: random.Random | numpy.random.RandomState | numpy.random.Generator) -> str:
    """Return the state of one of Python's or NumPy's random generators as a text."""
    if isinstance(source, random.Random):
        return repr(source.getstate())
    if isinstance(source, numpy.random.RandomState):
        state: Mapping[str, object] = source.get_state(legacy=False)
    else:
        state = source.bit_generator.state
    # Texts, because arrays cannot be compared by ==. Arrays and NumPy's numbers have tolist().
    return json.dumps(state, default=operator.methodcaller("tolist"))


def _is_settings(kind: type) -> bool:
    """Return whether a class may hold values that its user changes.

    A custom autograd function does not count, because its code runs in every pass.
    """
    users = _is_users(getattr(sys.modules.get(kind.__module__), "__file__", None))
    return users and not issubclass(kind, torch.autograd.Function)


def same(one: object, other: object) -> bool:
    """Return whether two snapshots made by `frozen` are equal."""
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, frozenset):
        return bool(one == other)
    # repr, because nan != nan.
    return isinstance(one, _NUMBERS) and type(one) is type(other) and repr(one) == repr(other)


class Values:
    """The values at places when this object was made."""

    def __init__(
        self, module: nn.Module, places: Iterable[Place], names: set[str] | None = None
    ) -> None:
        layers = dict(module.named_modules())
        self._names = names
        self._stood = []
        for place in places:
            own, inherited = _holders(layers, *place)
            value = own.get(place[1], inherited.get(place[1], GONE))
            self._stood.append((place, own, inherited, value, isinstance(value, _WHOLE)))
        self.frozen = {place: frozen(value, names) for place, *_, value, _ in self._stood}

    def changed(self) -> list[Place]:
        """Return the places whose value differs now."""
        found = []
        # If many places share one value, compare it only once.
        compared: dict[tuple[int, int], bool] = {}
        for place, own, inherited, value, whole in self._stood:
            new = own.get(place[1], inherited.get(place[1], GONE))
            if whole and new is value:
                continue
            pair = id(value), id(new)
            if pair not in compared:
                compared[pair] = same(self.frozen[place], frozen(new, self._names))
            if not compared[pair]:
                found.append(place)
        return found


def _holders(
    layers: dict[str, nn.Module], holder: str, name: str
) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Return two mappings to search for a place, in order.

    Layer: its own attributes, then the class that defines `name`. Global or environment: the second
    is empty.
    """
    if holder.startswith(GLOBAL):
        module = sys.modules.get(holder.removeprefix(GLOBAL))
        return (vars(module) if module else {}), {}
    if holder == ENVIRONMENT:
        return os.environ, {}
    if holder not in layers:
        return {}, {}
    kinds = (vars(kind) for kind in type(layers[holder]).__mro__)
    return vars(layers[holder]), next((kind for kind in kinds if name in kind), {})


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages."""
    import site

    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({os.path.realpath(path) + os.sep for path in paths if path})


@functools.cache
def _is_users(file: object) -> bool:
    """Return whether a file is outside the standard library and the installed packages.

    Args:
        file: the `__file__` of a module or the file name of a code object.
    """
    # isabs: torch.ops has the file name `_ops.py` without a folder, and is not the user's.
    return (
        isinstance(file, str)
        and os.path.isabs(file)
        and not os.path.realpath(file).startswith(_installed())
    )
