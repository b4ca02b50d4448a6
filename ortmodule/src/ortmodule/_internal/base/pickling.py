"""Copies of an ORTModule by `copy.deepcopy` or pickle: each copy builds its own graph, as in ORT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortmodule._internal.base.patching import replace_method_by_wrapper
from ortmodule._internal.base.source_guard import MANAGER, owning_class_or_module

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction, Manager

_ALLOCATOR_ADDRESSES = ("_torch_alloc", "_torch_free", "_torch_empty_cache")
_GRAPH_ATTRIBUTES = ("_ortmodule_key", "_ortmodule_norms", "_ortmodule_facts")


def fix_deepcopy_and_pickle() -> None:
    """Let ORT copy a module on a CPU.

    ORT's `__getstate__` deletes the addresses of CUDA's allocator, and fails where they do not
    exist.
    """
    replace_method_by_wrapper(
        owning_class_or_module(MANAGER),
        "__getstate__",
        _set_missing_addresses_and_get_graphless_state,
    )


def _set_missing_addresses_and_get_graphless_state(
    original_getstate: AnyFunction, manager: Manager
) -> dict[str, object]:
    for name in _ALLOCATOR_ADDRESSES:
        # ORT deletes these attributes from the state without a check that they exist.
        vars(manager).setdefault(name, None)
    state = original_getstate(manager)
    # The copy builds its own graph, so facts about the original's graph would be wrong for it.
    return {name: value for name, value in state.items() if name not in _GRAPH_ATTRIBUTES}
