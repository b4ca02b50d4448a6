"""Descriptions of objects, from which the keys of exported graphs are made."""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.worker.ort.plain import NotPlain, Plain


def test_a_plain_description_is_equal_exactly_for_equal_things() -> None:
    """Numbers of another kind, another order, another code or another content are other things."""

    def function(offset: int) -> Callable[[int], int]:
        return lambda x: x + offset

    things: list[Any] = [1, True, 1.0, "1", b"1", None, (1,), [1], {1}, {1: 2, 3: 4}, {3: 4, 1: 2}, {"a": [1, {}]}]
    things += [torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32), torch.ones(2), torch.float32]
    things += [function(1), function(2), functools.partial(function, 1), functools.partial(function, 2)]
    things += [types.SimpleNamespace(a=1), types.SimpleNamespace(a=2), Path("a"), Path("b"), slice(1), slice(2), len]
    texts = [repr(Plain({})(thing)) for thing in things]
    assert len(set(texts)) == len(texts)
    assert texts == [repr(Plain({})(copy.copy(thing))) for thing in things]
    circle: list[Any] = []
    circle.append(circle)
    assert "again" in repr(Plain({})(circle))
    with pytest.raises(NotPlain, match="here holds"):
        Plain({})(threading.Lock(), "here")
