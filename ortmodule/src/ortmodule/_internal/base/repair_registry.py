"""The registry of repairs: name, sources, installation, and whether each is in force.

compat.py's table has the repairs that importing ORTModule needs, repairs.py's those of its
behaviour. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ortmodule._internal.base import source_guard

_applied: list[str] = []
_not_applied: dict[str, str] = {}


class Repair(NamedTuple):
    """A change to the behaviour of ORT or torch; a change to torch affects ORTModule alone."""

    name: str
    sources: tuple[str, ...] = ()
    """Functions of ORT and torch that it replaces or relies on, as source_guard names them."""
    install: Callable[[], bool | None] = lambda: None
    """Applies the changes beyond an export's steps (pipeline.py); False: nothing was to be done."""


def apply_fitting_repairs_and_record_others_once(
    repairs: Sequence[Repair], *omitted_names: str
) -> None:
    """Apply each repair once in a process, where all of its sources are known.

    omitted_names: names of repairs to omit, for tests.
    """
    for repair in repairs:
        # A second call must not wrap the same functions again.
        if repair.name in (*_applied, *_not_applied):
            continue
        unapplied_reason = (
            "left out"
            if repair.name in omitted_names
            else source_guard.source_mismatch_text_or_empty(repair.sources)
        )
        if unapplied_reason:
            record_unapplied_repair(repair.name, unapplied_reason)
        elif repair.install() is not False:
            _applied.append(repair.name)


def applied_repair_names() -> tuple[str, ...]:
    """Return the names of the repairs in force, in the order of application.

    Empty before `import_ortmodule_with_repairs_and_export_steps`.
    """
    return tuple(_applied)


def reason_by_unapplied_repair() -> dict[str, str]:
    """Return the repairs that were not applied, with the reason."""
    return dict(_not_applied)


def record_unapplied_repair(repair_name: str, reason: str) -> None:
    """Add a repair to `reason_by_unapplied_repair`."""
    _not_applied[repair_name] = reason
