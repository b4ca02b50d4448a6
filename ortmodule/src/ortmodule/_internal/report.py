"""The record of what ONNX Runtime really ran in this process, for engine.json and for own loops."""

from __future__ import annotations

from dataclasses import asdict

from ortmodule._internal.base import repair_registry, torch_calls
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.json_types import Json
from ortmodule._internal.pass_counters import PassAndGraphCounters, get_or_start_pass_counters


def report(counters: PassAndGraphCounters | None = None) -> Json:
    """Return repairs, counts of passes, exports, graphs and fallbacks, and notes.

    docs/ortmodule.md lists the names.
    """
    return {
        "repairs": list(repair_registry.applied_repair_names()),
        "repairs_not_applied": repair_registry.reason_by_unapplied_repair(),
        "torch_calls": {
            name: asdict(calls) for name, calls in torch_calls.call_counts_by_called_name().items()
        },
        "torch_share": round(torch_calls.torch_fraction_of_pass_time(), 4),
        **(counters or get_or_start_pass_counters()).pass_and_graph_counts_record(),
        **tally.counts_and_notes_record(),
    }
