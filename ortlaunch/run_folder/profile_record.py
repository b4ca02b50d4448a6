"""profile.json as types, and its table as text: where the time of a step goes.

The text under a field is its manual, as in records.py. Of ortlaunch it imports units alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ortlaunch.base.units import aligned_table_lines


@dataclass
class OperatorCost:
    """The cost of all calls of an operator in a step."""

    library: str
    """`torch` or `ONNX Runtime`."""
    operator: str
    """The library's name of it. Of torch also `reading` (of a batch), `step` (a step's time outside
    of all operators: Python and waiting) and the parts of a pass that torch's profiler names."""
    calls: float
    """Calls in a step."""
    seconds: float
    """Seconds in a step: of torch without the operators that this one calls. An operator of torch
    that calls ONNX Runtime includes the time of its nodes, as does a node that calls torch."""
    share: float
    """`seconds` by the duration of a profiled step; operators of several threads may sum to more
    than 1."""


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
    operators: list[OperatorCost]
    """The ten operators that take longest, the longest first."""


def profile_text_lines(profile: dict[str, Any]) -> list[str]:
    """Return the profile as text: the profiler's own cost, and the table of operators."""
    seconds, seconds_without = profile["seconds"], profile["seconds_without"]
    rows = [
        (f"{cost['share']:.1%}", f"{cost['seconds']:.4f}", f"{cost['calls']:g}", cost["library"], cost["operator"])
        for cost in profile["operators"]
    ]  # fmt: skip
    return [
        f"profile of engine {profile['engine']}, steps {', '.join(map(str, profile['steps']))}",
        f"the profiler's own cost: {seconds / seconds_without - 1:+.1%} ({seconds:.4g} s a step with it, "
        f"{seconds_without:.4g} s without)"
        if seconds_without
        else f"{seconds:.4g} s a step with the profiler; no step was measured without it",
        *aligned_table_lines([("share", "seconds", "calls", "library", "operator"), *rows]),
    ]
