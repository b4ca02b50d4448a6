"""The record of an evaluation, and its lines for a person."""

from __future__ import annotations

from dataclasses import fields

from ortlaunch.run_folder.records import Evaluation

_FIELDS = [each.name for each in fields(Evaluation) if each.name != "own"]


def record_of(step: int | None, samples: int, found: dict[str, float]) -> Evaluation:
    """What was measured, numbers of the user's own apart."""
    known = {name: value for name, value in found.items() if name in _FIELDS}
    own = {name: value for name, value in found.items() if name not in _FIELDS}
    return Evaluation(step, samples, **known, own=own or None)


def table(measured: Evaluation) -> list[str]:
    """A line for each number that there is."""
    rows = [(name.replace("_", " "), getattr(measured, name)) for name in _FIELDS]
    rows += (measured.own or {}).items()
    return [f"  {name:24}{value:>14,.6g}" for name, value in rows if value is not None]
