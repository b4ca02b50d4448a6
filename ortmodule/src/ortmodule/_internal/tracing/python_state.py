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
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from ortmodule._internal.base.patching import replace_attribute_temporarily
from ortmodule._internal.tracing.kept_tensors import StaleTensor

GLOBAL = "global "
ENVIRONMENT = "environment variable"
StatePath = tuple[str, str]
_SCALAR_TYPES = (bool, int, float, complex, str, bytes, numpy.generic, torch.dtype, torch.device)
_RECORDED_TYPES = (
    *_SCALAR_TYPES,
    type(None),
    list,
    tuple,
    set,
    frozenset,
    dict,
    torch.Tensor,
    numpy.ndarray,
)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
# Immutable values, and functions. If the object is the same, its value counts as unchanged.
_IMMUTABLE_TYPES = (*_SCALAR_TYPES, type(None), *_FUNCTIONS)
# nn.Module's own containers of parameters, hooks and the like; reads of them are not recorded.
_MODULE_CONTAINERS = {
    name for name, value in vars(nn.Module()).items() if not isinstance(value, (bool, type(None)))
}
_MODULE_CONTAINERS.add("_compiled_call_impl")
# Code in torch and in this package.
_LIBRARY_FOLDERS = f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}"
MISSING_VALUE = object()
"""The value of a place that does not exist."""
# The depth of nested values that are compared.
_MAX_LEVELS = 4


# One entry for each open `pause_state_recording`.
_paused: list[None] = []


@contextlib.contextmanager
def pause_state_recording() -> Iterator[None]:
    """Pause the recording of reads and writes."""
    tracer = sys.gettrace()
    _paused.append(None)
    sys.settrace(None)
    try:
        yield
    finally:
        _paused.pop()
        sys.settrace(tracer)


def innermost_frame_of_model_code_or_none() -> types.FrameType | None:
    """Return the innermost running frame of the model's code, in neither torch nor this package."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(_LIBRARY_FOLDERS):
        frame = frame.f_back
    return frame


def _running_attribute_writer(path_by_layer_id: Mapping[int, str]) -> AttributeWriter:
    """Return the running line of the model's code as a writer."""
    frame = innermost_frame_of_model_code_or_none()
    if frame is None:
        return AttributeWriter()
    line = f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    layer_id = id(first_argument_of_running_function(frame))
    return AttributeWriter(line, path_by_layer_id.get(layer_id, ""))


def first_argument_of_running_function(frame: types.FrameType) -> object:
    """Return the first argument of a running function, which is `self` in a method."""
    return frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))


class AttributeWriter(NamedTuple):
    """The code that wrote an attribute of a layer."""

    line_text: str = ""
    """The line, for messages."""
    layer_path: str = ""
    """The path of the layer whose code it is."""


class RecordedStateReads:
    """Places that passes of a model depend on, and names in their code.

    A layer's attribute counts if it is read before it is written, a global if the code names it, a
    variable of the environment if it is read. `value_by_path` maps each place to a snapshot
    (`comparable_value_snapshot`) of
    its value when first recorded.
    """

    def __init__(self) -> None:
        self.value_by_path: dict[StatePath, object] = {}
        self.code_names: set[str] = set()
        self.writer_by_layer: dict[str, AttributeWriter] = {}
        """The last writer of an attribute of a layer, by the path of that layer."""


@contextlib.contextmanager
def record_python_values_that_passes_read(traced_model: nn.Module) -> Iterator[RecordedStateReads]:
    """Record the places that passes of `traced_model` read in the with-block; yield the records."""
    # The root module has no path. It is ORT's wrapper, so leave it out.
    path_by_layer_id = {id(layer): path for path, layer in traced_model.named_modules() if path}
    reads = RecordedStateReads()
    # If a pass writes a place before it reads it, the old value does not matter.
    written_paths: set[StatePath] = set()
    seen_codes: set[types.CodeType] = set()
    running_passes: list[None] = []
    original_setattr = nn.Module.__setattr__

    def get_and_record(layer: nn.Module, name: str) -> object:
        value = object.__getattribute__(layer, name)
        path = (
            path_by_layer_id.get(id(layer))
            if running_passes
            and not _paused
            and name not in _MODULE_CONTAINERS
            and not name.startswith("__")
            else None
        )
        if path is None or (path, name) in written_paths or (path, name) in reads.value_by_path:
            return value
        if isinstance(value, _RECORDED_TYPES) or name in vars(layer):
            reads.value_by_path[path, name] = comparable_value_snapshot(value)
        return value

    def set_and_record(layer: nn.Module, name: str, value: Any) -> None:
        if running_passes and not _paused and id(layer) in path_by_layer_id:
            written_paths.add((path_by_layer_id[id(layer)], name))
            reads.writer_by_layer[path_by_layer_id[id(layer)]] = _running_attribute_writer(
                path_by_layer_id
            )
        original_setattr(layer, name, value)

    def trace_call(frame: types.FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Python calls this function at every call, so look at each code object only once.
        if event != "call" or code in seen_codes:
            return
        seen_codes.add(code)
        if not code.co_filename.startswith(_LIBRARY_FOLDERS):
            # String constants too: they may be names for getattr.
            reads.code_names.update(
                code.co_names, (word for word in code.co_consts if isinstance(word, str))
            )
            if _is_user_file(code.co_filename):
                for state_path, value in _state_paths_and_values_of_user_globals(
                    code.co_names, frame.f_globals, set()
                ):
                    reads.value_by_path.setdefault(state_path, comparable_value_snapshot(value))

    def begin_pass(called_module: nn.Module, _: object) -> None:
        if called_module is traced_model:
            written_paths.clear()
            running_passes.append(None)
            sys.settrace(trace_call)

    def end_pass(*_: object) -> None:
        running_passes.clear()
        sys.settrace(previous_tracer)

    previous_tracer: Any = sys.gettrace()
    hooks = [
        traced_model.register_forward_pre_hook(begin_pass),
        traced_model.register_forward_hook(end_pass),
    ]
    module_class: Any = nn.Module
    # Set on the class: Python ignores such methods on an instance.
    module_class.__getattribute__ = get_and_record
    module_class.__setattr__ = set_and_record
    try:
        with _record_environment_variable_reads(reads, running_passes):
            yield reads
    finally:
        end_pass()
        del module_class.__getattribute__
        module_class.__setattr__ = original_setattr
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _record_environment_variable_reads(
    recorded_reads: RecordedStateReads, running_passes: list[None]
) -> Iterator[None]:
    environment_class: Any = type(os.environ)
    original_getitem = environment_class.__getitem__

    def get_and_record(variables: Any, name: str) -> Any:
        if running_passes and not _paused:
            is_set = variables.encodekey(name) in variables._data
            recorded_reads.value_by_path.setdefault(
                (ENVIRONMENT, name), original_getitem(variables, name) if is_set else MISSING_VALUE
            )
        return original_getitem(variables, name)

    with replace_attribute_temporarily(environment_class, "__getitem__", get_and_record):
        yield


def _state_paths_and_values_of_user_globals(
    names_in_code: Iterable[str],
    module_globals: Mapping[str, object],
    visited_globals_ids: set[int],
) -> Iterator[tuple[StatePath, object]]:
    """Yield place and value of each global in `names_in_code`, of this module and user modules it names."""
    module_name = module_globals.get("__name__")
    if (
        id(module_globals) in visited_globals_ids
        or vars(sys.modules.get(str(module_name), object)) is not module_globals
    ):
        return
    visited_globals_ids.add(id(module_globals))
    for name in names_in_code:
        value = module_globals.get(name, MISSING_VALUE)
        if isinstance(value, types.ModuleType):
            if _is_user_file(getattr(value, "__file__", None)):
                yield from _state_paths_and_values_of_user_globals(
                    names_in_code, vars(value), visited_globals_ids
                )
        elif value is not MISSING_VALUE:
            yield (f"{GLOBAL}{module_name}", name), value


def comparable_value_snapshot(
    python_value: Any,
    only_attributes_with_tensors: set[str] | None = None,
    remaining_levels: int = _MAX_LEVELS,
) -> Any:
    """Return a snapshot of a value. Two snapshots can be compared with `same`.

    Args:
        python_value: the value.
        only_attributes_with_tensors: only these attributes of objects; tensors in objects and
            dictionaries are included.
            None: all attributes, without those tensors, because a pass may store results there that
            nothing reads.
        remaining_levels: the number of levels of nested values to include.
    """
    if isinstance(python_value, (*_IMMUTABLE_TYPES, StaleTensor)) or not remaining_levels:
        return python_value
    if isinstance(python_value, nn.Parameter) and python_value.requires_grad:
        # An input of the graph, never a constant of the trace; every step changes its values.
        return python_value
    if isinstance(python_value, torch.Tensor):
        # The version counts in-place changes; a tensor of inference mode has none.
        return python_value, None if python_value.is_inference() else python_value._version
    if isinstance(python_value, numpy.ndarray):
        return str(python_value.dtype), python_value.shape, python_value.tobytes()
    if isinstance(python_value, (random.Random, numpy.random.RandomState, numpy.random.Generator)):
        return random_generator_state_text(python_value)
    if isinstance(python_value, (list, tuple)):
        return tuple(
            comparable_value_snapshot(item, only_attributes_with_tensors, remaining_levels - 1)
            for item in python_value
        )
    if isinstance(python_value, (set, frozenset)):
        return frozenset(python_value)
    if isinstance(python_value, Mapping):
        items = list(python_value.items())
        holder_or_type = type(python_value)
    elif hasattr(python_value, "__dict__") and not isinstance(
        python_value, (nn.Module, types.ModuleType, enum.Enum)
    ):
        if isinstance(python_value, type) and not _is_user_class_with_attributes(python_value):
            return python_value
        items = [
            item
            for item in vars(python_value).items()
            if only_attributes_with_tensors is None or item[0] in only_attributes_with_tensors
        ]
        holder_or_type = python_value if callable(python_value) else type(python_value)
    else:
        return python_value
    kept_items = [
        item
        for item in items
        if only_attributes_with_tensors is not None or not isinstance(item[1], torch.Tensor)
    ]
    return holder_or_type, *(
        (key, comparable_value_snapshot(item, only_attributes_with_tensors, remaining_levels - 1))
        for key, item in kept_items
    )


def random_generator_state_text(
    random_generator: random.Random | numpy.random.RandomState | numpy.random.Generator,
) -> str:
    """Return the state of one of Python's or NumPy's random generators as a text."""
    if isinstance(random_generator, random.Random):
        return repr(random_generator.getstate())
    if isinstance(random_generator, numpy.random.RandomState):
        state: Mapping[str, object] = random_generator.get_state(legacy=False)
    else:
        state = random_generator.bit_generator.state
    # Texts, because arrays cannot be compared by ==. Arrays and NumPy's numbers have tolist().
    return json.dumps(state, default=operator.methodcaller("tolist"))


def _is_user_class_with_attributes(value_class: type) -> bool:
    """Return whether a class may hold values that its user changes.

    A custom autograd function does not count, because its code runs in every pass.
    """
    is_users = _is_user_file(getattr(sys.modules.get(value_class.__module__), "__file__", None))
    return is_users and not issubclass(value_class, torch.autograd.Function)


def are_snapshots_equal(snapshot: object, other_snapshot: object) -> bool:
    """Return whether two snapshots made by `comparable_value_snapshot` are equal."""
    if snapshot is other_snapshot:
        return True
    if isinstance(snapshot, tuple) and isinstance(other_snapshot, tuple):
        return len(snapshot) == len(other_snapshot) and all(
            map(are_snapshots_equal, snapshot, other_snapshot)
        )
    if isinstance(snapshot, frozenset):
        return bool(snapshot == other_snapshot)
    # repr, because nan != nan.
    return (
        isinstance(snapshot, _SCALAR_TYPES)
        and type(snapshot) is type(other_snapshot)
        and repr(snapshot) == repr(other_snapshot)
    )


class StateValueSnapshots:
    """The values at places when this object was made."""

    def __init__(
        self,
        traced_model: nn.Module,
        state_paths: Iterable[StatePath],
        only_attributes_with_tensors: set[str] | None = None,
    ) -> None:
        layers = dict(traced_model.named_modules())
        self._names = only_attributes_with_tensors
        self._recorded_values = []
        for state_path in state_paths:
            own_values, class_values = _own_and_defining_class_mappings(layers, *state_path)
            value = own_values.get(state_path[1], class_values.get(state_path[1], MISSING_VALUE))
            self._recorded_values.append(
                (state_path, own_values, class_values, value, isinstance(value, _IMMUTABLE_TYPES))
            )
        self.snapshots = {
            state_path: comparable_value_snapshot(value, only_attributes_with_tensors)
            for state_path, *_, value, _ in self._recorded_values
        }

    def state_paths_with_changed_value(self) -> list[StatePath]:
        """Return the places whose value differs now."""
        differing_paths = []
        # If many places share one value, compare it only once.
        compared: dict[tuple[int, int], bool] = {}
        for state_path, own_values, class_values, value, is_immutable in self._recorded_values:
            new = own_values.get(state_path[1], class_values.get(state_path[1], MISSING_VALUE))
            if is_immutable and new is value:
                continue
            pair = id(value), id(new)
            if pair not in compared:
                compared[pair] = are_snapshots_equal(
                    self.snapshots[state_path], comparable_value_snapshot(new, self._names)
                )
            if not compared[pair]:
                differing_paths.append(state_path)
        return differing_paths


def _own_and_defining_class_mappings(
    layer_by_path: dict[str, nn.Module], layer_path_or_global_holder: str, value_name: str
) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Return the two mappings to search for a place, in this order.

    Layer: its own attributes, then the class that defines `value_name`. Global or environment: the second
    is empty.
    """
    if layer_path_or_global_holder.startswith(GLOBAL):
        module = sys.modules.get(layer_path_or_global_holder.removeprefix(GLOBAL))
        return (vars(module) if module else {}), {}
    if layer_path_or_global_holder == ENVIRONMENT:
        return os.environ, {}
    if layer_path_or_global_holder not in layer_by_path:
        return {}, {}
    class_dicts = (
        vars(class_dict) for class_dict in type(layer_by_path[layer_path_or_global_holder]).__mro__
    )
    return vars(layer_by_path[layer_path_or_global_holder]), next(
        (class_dict for class_dict in class_dicts if value_name in class_dict), {}
    )


@functools.cache
def _standard_library_and_package_folders() -> tuple[str, ...]:
    import site

    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({os.path.realpath(path) + os.sep for path in paths if path})


@functools.cache
def _is_user_file(file_name: object) -> bool:
    """Return whether a file is outside the standard library and the installed packages.

    Args:
        file_name: the `__file__` of a module or the file name of a code object.
    """
    # isabs: torch.ops has the file name `_ops.py` without a folder, and is not the user's.
    return (
        isinstance(file_name, str)
        and os.path.isabs(file_name)
        and not os.path.realpath(file_name).startswith(_standard_library_and_package_folders())
    )
