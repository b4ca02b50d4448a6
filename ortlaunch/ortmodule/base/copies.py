"""Copies of an ORTModule by `copy.deepcopy` or pickle: as ORT means them, which is with a graph of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.source_guard import MANAGER, owner

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Manager

_ADDRESSES = ("_torch_alloc", "_torch_free", "_torch_empty_cache")
_OF_THE_GRAPH = ("_ortlaunch_key", "_ortlaunch_norms", "_ortlaunch_facts")


def fix_deepcopy_and_pickle() -> None:
    """ORT's copy of a module ended on a CPU, where there are no addresses of CUDA's allocator to leave out."""
    wrap_method(owner(MANAGER), "__getstate__", _state)


def _state(original: AnyFunction, manager: Manager) -> dict[str, object]:
    for name in _ADDRESSES:
        vars(manager).setdefault(name, None)
    state = original(manager)
    return {name: value for name, value in state.items() if name not in _OF_THE_GRAPH}
