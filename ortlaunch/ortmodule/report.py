"""The record of what ONNX Runtime really ran in this process, for engine.json and for own loops."""

from __future__ import annotations

from dataclasses import asdict

from ortlaunch.base.json_types import Json
from ortlaunch.ortmodule import options
from ortlaunch.ortmodule.base import repair_registry, torch_calls
from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.pass_counters import PassAndGraphCounters


def process_wide_ort_report(active_counters: PassAndGraphCounters) -> Json:
    """Return repairs, counts of passes, exports, graphs and fallbacks, and notes.

    The names are those of `OnnxRuntime` in docs/run-folder.md.
    """
    return {
        "repairs": list(repair_registry.applied_repair_names()),
        "repairs_not_applied": repair_registry.reason_by_unapplied_repair(),
        "deepcopy_before_export": options.deepcopy_decision_record().get("deepcopy_before_export"),
        "torch_calls": {
            name: asdict(calls) for name, calls in torch_calls.call_counts_by_called_name().items()
        },
        "torch_share": round(torch_calls.torch_fraction_of_pass_time(), 4),
        **active_counters.pass_and_graph_counts_record(),
        **tally.counts_and_notes_record(),
    }
