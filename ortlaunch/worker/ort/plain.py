"""Python objects as text that is the same in every process exactly when they are: for keys, where pickle will not do.

Tells what it is asked for or raises: never `repr` of an unknown object, whose address would change and whose state
would not show.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class NotPlain(Exception):
    """An object whose state cannot be told; says where it is."""


class Plain:
    """Describes objects; those in `registered`, by id, only by their names there."""

    ATOMS = (type(None), bool, int, float, complex, str, bytes, range, type(...), torch.dtype, torch.device)
    DATA = (*ATOMS, list, tuple, dict, set, frozenset, torch.Tensor, enum.Enum)

    def __init__(self, registered: dict[int, str]) -> None:
        self.registered = registered
        # With the objects, because an id is another's once its object is gone.
        self._seen: dict[int, tuple[int, Any]] = {}

    def __call__(self, value: Any, where: str = "") -> Any:
        """Nested tuples of words."""
        if isinstance(value, self.ATOMS) and type(value) in self.ATOMS:
            return type(value).__name__, repr(value)
        if id(value) in self.registered:
            return "registered", self.registered[id(value)]
        if id(value) in self._seen:
            return "again", self._seen[id(value)][0]
        self._seen[id(value)] = len(self._seen), value
        return _name(type(value)), self._parts(value, where)

    def _parts(self, value: Any, where: str) -> Any:
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, (set, frozenset)):
            # Apart from each other, so that the order in which they come means nothing.
            return sorted(repr(Plain(self.registered)(item, where)) for item in value)
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape), str(value.device), value.requires_grad, self.content(value)
        if isinstance(value, (torch.memory_format, torch.layout)):
            return repr(value)
        if isinstance(value, (type, types.ModuleType, logging.Logger)):
            return _name(value)
        if isinstance(value, types.FunctionType):
            return self._function(value, where)
        if isinstance(value, types.MethodType):
            return self(value.__func__, where), self(value.__self__, where)
        if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            return value.__qualname__, self(value.__self__, where)
        if isinstance(value, functools.partial):
            return self(value.func, where), self(value.args, where), self(value.keywords, where)
        if isinstance(value, nn.Module):
            raise NotPlain(f"{where} holds a {_name(type(value))} that is no part of the model")
        return self._object(value, where)

    def _object(self, value: Any, where: str) -> Any:
        """Containers, and objects by the state that they would be copied with, next to their attributes."""
        inner = f"{where}: {type(value).__name__}"
        attributes = self._mapping(vars(value), inner) if hasattr(value, "__dict__") else ()
        if isinstance(value, Mapping):
            return self._mapping(value, where), attributes
        if isinstance(value, (list, tuple)):
            return tuple(self(item, where) for item in value), attributes
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:  # whatever a class has against being copied
            raise NotPlain(f"{where} holds a {_name(type(value))}: {error}") from None
        if isinstance(reduced, str):
            return reduced, attributes
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        parts = [arguments, None if state is getattr(value, "__dict__", None) else state]
        parts += [None if items is None else list(items), None if pairs is None else list(pairs)]
        return self(make, inner), tuple(self(part, inner) for part in parts), attributes

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        return tuple((self(key, where), self(item, f"{where}.{key}")) for key, item in value.items())

    def _function(self, value: types.FunctionType, where: str) -> Any:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        captured = tuple(self(part, f"{where}: {value.__qualname__}") for part in (value.__defaults__, cells))
        return value.__module__, value.__qualname__, _code(value.__code__), captured, self(value.__kwdefaults__, where)

    @staticmethod
    def content(tensor: torch.Tensor) -> str:
        """sha256 of a tensor's numbers."""
        if tensor.layout != torch.strided or tensor.is_meta:
            raise NotPlain(f"a tensor of layout {tensor.layout} on {tensor.device}")
        whole = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        return hashlib.sha256(whole.numpy().tobytes()).hexdigest()


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', getattr(thing, 'name', thing))}"


def _code(code: types.CodeType) -> Any:
    """What a function does; not where it stands."""
    constants = tuple(_code(part) if isinstance(part, types.CodeType) else repr(part) for part in code.co_consts)
    return code.co_code.hex(), code.co_names, code.co_varnames, constants
