"""profile.json as types, and its table as text: where the time of a step goes.

The text under a field is its manual, as in records.py. Of ortlaunch it imports units alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ortlaunch.base.units import aligned_table_lines

KINDS = ("operators", "reading", "copying", "communication", "waiting", "Python")
COMPUTING, READING, COPYING, COMMUNICATION, WAITING, PYTHON = KINDS
# Key of a cost -> the title of its column, and the form of its values.
_COLUMNS = {
    "share": ("share", "{:.1%}"),
    "seconds": ("seconds", "{:.4f}"),
    "calls": ("calls", "{:g}"),
    "matrix_share": ("of matmul rate", "{:.0%}"),
    "bandwidth_share": ("of bandwidth", "{:.0%}"),
    "phase": ("phase", "{}"),
    "operator": ("operator", "{}"),
    "module": ("module", "{}"),
    "source": ("source", "{}"),
}


@dataclass
class Profile:
    """The costs of a step of rank 0 (`log.profile_steps`)."""

    engine: str
    """The engine that ran."""
    steps: list[int]
    """Steps that were profiled; those between them ran without the profiler."""
    seconds: float
    """Median duration of a profiled step."""
    seconds_without: float | None
    """Median duration of the steps between them; null: there is none."""
    matrix_rate: float
    """Operations per second of a large matmul, measured on this machine."""
    bandwidth: float
    """Bytes per second of a large copy, read and written, measured on this machine."""
    kinds: dict[str, float]
    """Share of each kind of time in a step, from 0 to 1. `communication` is that of the rank that
    waited least for the others; `waiting` is what this rank spent beyond that."""
    costs: list[dict[str, Any]]
    """The ten largest costs, the largest first: the calls of an operator from one line of a layer.
    Each has `phase` (forward, backward, optimizer or empty), `operator` (torch's or ONNX Runtime's
    name, `reading` or `Python`), `module` (path of the layer in the model, with `*` for the number
    of a repeated layer; unknown: the profile does not show it), `source` (FILE:LINE of the model's
    code, or unknown), `kind` (as in `kinds`), and for a step `calls`, `seconds` without other
    operators inside this one, and `share` of the step, from 0 to 1. `matrix_share` is the share of
    `matrix_rate` (null: no matmul); `bandwidth_share` that of `bandwidth` by the bytes of inputs
    and results (null: unknown; above 1 the data came from a cache)."""


def profile_text_lines(profile: dict[str, Any]) -> list[str]:
    """Return the profile as text: kinds of time, the profiler's own cost, and the table."""
    seconds, seconds_without = profile["seconds"], profile["seconds_without"]
    cells = [[title for title, _ in _COLUMNS.values()]] + [
        [form.format(cost[key]) if cost[key] else "-" for key, (_, form) in _COLUMNS.items()]
        for cost in profile["costs"]
    ]
    kinds = ", ".join(f"{kind} {share:.1%}" for kind, share in profile["kinds"].items())
    return [
        f"profile of engine {profile['engine']}, steps {', '.join(map(str, profile['steps']))}",
        f"time of a step: {kinds}",
        f"the profiler's own cost: {seconds / seconds_without - 1:+.1%} ({seconds:.4g} s a step with it, "
        f"{seconds_without:.4g} s without)"
        if seconds_without
        else f"{seconds:.4g} s a step with the profiler; no step was measured without it",
        f"measured here: matmul {profile['matrix_rate'] / 1e9:,.0f} GFLOP/s, "
        f"memory {profile['bandwidth'] / 1e9:,.1f} GB/s",
        *aligned_table_lines(cells),
    ]
