"""Copies of an ORTModule by `copy.deepcopy` or pickle: each copy builds its own graph, as in ORT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortmodule._internal.base.attached import RECORD_ATTRIBUTE
from ortmodule._internal.base.repair_registry import MANAGER, repair

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction, Manager

_ALLOCATOR_ADDRESSES = ("_torch_alloc", "_torch_free", "_torch_empty_cache")


@repair(
    "fix_deepcopy_and_pickle",
    "install",
    60,
    replaces=f"{MANAGER}.__getstate__",
    fault="On a CPU `copy.deepcopy` and pickle of a module that has run end in `KeyError: "
    "'_torch_alloc'`.",
    example="base/test_copies.py::test_a_copy_of_a_built_module_trains_apart[deepcopy]",
    sources={
        f"{MANAGER}.__getstate__": "8c59e5cbc2348a1c",
    },
)
def _set_missing_addresses_and_get_graphless_state(
    original_getstate: AnyFunction, manager: Manager
) -> dict[str, object]:
    for name in _ALLOCATOR_ADDRESSES:
        # ORT deletes these attributes from the state without a check that they exist.
        vars(manager).setdefault(name, None)
    state: dict[str, object] = original_getstate(manager)
    # The copy builds its own graph, and the record is about the original's.
    state.pop(RECORD_ATTRIBUTE, None)
    return state
