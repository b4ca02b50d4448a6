"""Every repair: what it is called, what it replaces or relies on, how it is made, and whether it is in force.

The tables are compat.py's (what importing ORTModule takes) and repairs.py's (what it does). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ortlaunch.ortmodule.base import source_guard

_applied: list[str] = []
_not_applied: dict[str, str] = {}


class Repair(NamedTuple):
    """A change of what ORT or torch does, for ORTModule alone where it is torch's."""

    name: str
    sources: tuple[str, ...] = ()
    """Functions of ORT and torch that it replaces or whose inner working it relies on, as source_guard names them."""
    install: Callable[[], bool | None] = lambda: None
    """What it changes beside the steps of an export (pipeline.py); False: nothing was to be done here."""


def apply(repairs: Sequence[Repair], *left_out: str) -> None:
    """Make each once in a process, where all of its sources are known; `left_out` names those a test wants to miss."""
    for repair in repairs:
        if repair.name in (*_applied, *_not_applied):
            continue
        why = "left out" if repair.name in left_out else source_guard.unknown(repair.sources)
        if why:
            leave_out(repair.name, why)
        elif repair.install() is not False:
            _applied.append(repair.name)


def applied() -> tuple[str, ...]:
    """Names of the repairs in force, in the order they were applied; empty before `import_ortmodule`."""
    return tuple(_applied)


def not_applied() -> dict[str, str]:
    """Repairs that were not made, with the reason."""
    return dict(_not_applied)


def leave_out(name: str, why: str) -> None:
    """Add a repair to `not_applied`."""
    _not_applied[name] = why
