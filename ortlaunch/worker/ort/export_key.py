"""The key of an exported graph: everything that an export of a model depends on, or why that cannot be told.

A key too narrow costs an export, one too wide would run another model's graph. So a model with anything in it that is
not known to be plain data or code is not cached.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ortlaunch.worker.ort import IMPORTED, patching
from ortlaunch.worker.ort.cross_entropy import sparse
from ortlaunch.worker.ort.plain import NotPlain, Plain

_FORMAT = 2
# Of a module: described apart, or without meaning for a forward pass.
_APART = {"_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks", "_output_schema"}
_APART |= {"_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")


def key_of(export: dict[str, Any]) -> str:
    """The key of what `GraphTransitionManager._get_exported_model(**export)` would return.

    Raises:
        NotPlain: the model holds something that a key cannot hold.
    """
    module, info = export["flattened_module"], export["model_info_for_export"]
    plain = Plain(_registered(module))
    described = {
        "format": _FORMAT,
        "call": _call(plain, info, export["flatten_module_inputs"]),
        "settings": _settings(export["stage3_param_handle"]._runtime_options, export["device"].type),
        "modules": [_module(plain, path, child) for path, child in module.named_modules(remove_duplicate=False)],
        "parameters": [_parameter(plain, name, p) for name, p in module.named_parameters(remove_duplicate=False)],
        "buffers": [_buffer(path, child) for path, child in module.named_modules()],
        "repairs": (sorted(patching.applied()), sorted(patching.not_applied())),
        "installed": installed(),
        "sources": dict(_sources()),
        "globals": _globals(plain),
        "symbolics": _symbolics(plain),
    }
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _symbolics(plain: Plain) -> list[Any]:
    """Translations of operators to ONNX that somebody else than torch and ORT registered in this process."""
    try:
        from torch.onnx._internal.torchscript_exporter import registration
    except ImportError:  # before torch 2.9
        from torch.onnx._internal import registration
    found = []
    for name, group in sorted(registration.registry._registry.items()):
        for opset, function in sorted(group._functions._overrides.items()):
            if not getattr(function, "__module__", "").startswith("onnxruntime."):
                found.append((name, opset, plain(function, f"the ONNX translation of {name}")))
    return found


def _registered(module: nn.Module) -> dict[int, str]:
    """Names of what is described in its own place, wherever else it is referred to."""
    names: dict[int, str] = {}
    for found in (module.named_modules(), module.named_parameters(), module.named_buffers()):
        for name, thing in found:
            names[id(thing)] = name
    return names


def _call(plain: Plain, info: Any, inputs: list[Any]) -> Any:
    """Mode, names, types and ranks, numbers and words of the call. Of sizes only 0 and 1, which broadcast."""
    tensors = [
        (name, plain(value) if name in info.onnx_graph_input_const_as_tensor else _tensor(value))
        for name, value in zip(info.onnx_graph_input_names, inputs)
    ]
    schemas = plain((info.onnx_graph_input_arg_schema, info.onnx_graph_input_kwarg_schema, info.export_extra_kwargs))
    return str(info.export_mode), tensors, len(inputs), schemas, plain(info.onnx_graph_input_dynamic_axes_map)


def _tensor(value: torch.Tensor) -> Any:
    sizes = tuple(min(size, 2) for size in value.shape)
    return str(value.dtype), sizes, str(value.device), value.requires_grad, sparse(value)


def _settings(options: Any, device: str) -> Any:
    """ORT's options and torch's state. The memory optimizer's file is one of this process, and not the export's."""
    ours = {
        name: repr(value)
        for name, value in vars(options).items()
        if name not in ("_logger", "memory_optimizer_config_file_path")
    }
    casts = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    environment = sorted(item for item in os.environ.items() if item[0].startswith(("ORTMODULE_", "ORT_", "PYTORCH_")))
    state = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), str(casts)
    return ours, str(state), environment, sys.version


def _module(plain: Plain, path: str, module: nn.Module) -> Any:
    kind = type(module)
    for parent in kind.__mro__:
        if parent.__module__ not in ("builtins",) and not _source_of(parent.__module__):
            raise NotPlain(f"{parent.__module__}.{parent.__qualname__} has no source file")
    attributes = {
        name: list(value.values()) if name.endswith("_hooks") and isinstance(value, dict) else value  # numbered anew
        for name, value in vars(module).items()
        if name not in _APART
    }
    return path, f"{kind.__module__}.{kind.__qualname__}", plain(attributes, path or "the model")


def _parameter(plain: Plain, name: str, value: torch.Tensor) -> Any:
    """With its first name where it is shared."""
    tied = plain.registered[id(value)]
    return name, tied, str(value.dtype), tuple(value.shape), str(value.device), value.requires_grad


def _buffer(path: str, module: nn.Module) -> Any:
    """With its content, on which a forward pass may decide; BatchNorm's changes in every step and decides nothing."""
    counted = isinstance(module, _BatchNorm)
    return [
        (path, name, _tensor(value), tuple(value.shape), None if counted else Plain.content(value))
        for name, value in module._buffers.items()
        if value is not None
    ]


@functools.cache
def installed() -> tuple[str, ...]:
    """Every installed package with its version, as the name of its folder of metadata says it."""
    folders = {Path(entry) for entry in sys.path if _is_installed(entry)}
    found = (path.name for folder in folders if folder.is_dir() for path in folder.iterdir())
    return tuple(sorted(name for name in found if name.endswith((".dist-info", ".egg-info"))))


@functools.cache
def _roots() -> tuple[str, ...]:
    import site

    paths = [sysconfig.get_path(name) for name in _PATHS] + site.getsitepackages() + [site.getusersitepackages()]
    return tuple({os.path.realpath(path) + os.sep for path in paths if path})


@functools.cache
def _is_installed(path: str) -> bool:
    """Whether a file is of the standard library or an installed package, which its version describes."""
    return (os.path.realpath(path) + os.sep).startswith(_roots())


def is_users(file: Any) -> TypeGuard[str]:
    """Whether what a module or code object says of its file names one of the user's, or ortlaunch's own."""
    return isinstance(file, str) and os.path.isabs(file) and not _is_installed(file)


def _sources() -> Iterator[tuple[str, str]]:
    """(file, sha256) of every loaded module that no version describes: the user's, and ortlaunch's own."""
    for _, _, file in _users_modules():
        yield file, _digest(file)


def _users_modules() -> Iterator[tuple[str, Any, str]]:
    """Loaded modules (name, module, file) outside the standard library and the installed packages."""
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # torch.ops says that its file is `_ops.py`, in no folder.
        if is_users(file):
            yield name, module, file


@functools.cache
def _digest(file: str) -> str:
    """Once in a process, because a file that changes later is not what runs."""
    try:
        if file.endswith(".py") and os.stat(file).st_mtime > IMPORTED:
            raise NotPlain(f"{file} changed after this process had started")
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise NotPlain(f"{file} cannot be read: {error}") from None


def _source_of(module: str) -> str | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file if isinstance(file, str) and os.path.exists(file) else None


def _globals(plain: Plain) -> list[Any]:
    """Plain data at the top of the user's modules, which may have come from the environment; other data is skipped."""
    found = []
    for name, module, _ in _users_modules():
        if name.partition(".")[0] == "ortlaunch":
            continue
        for variable, value in sorted(vars(module).items()):
            if not variable.startswith("__") and isinstance(value, Plain.DATA):
                try:
                    found.append((name, variable, plain(value)))
                except NotPlain:
                    continue
    return found
