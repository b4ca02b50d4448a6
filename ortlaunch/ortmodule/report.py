"""The record of what ONNX Runtime really ran in this process, for engine.json and for own loops."""

from __future__ import annotations

from dataclasses import asdict

from ortlaunch.json_types import Json
from ortlaunch.ortmodule import options
from ortlaunch.ortmodule.base import registry, torch_calls
from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.witness import Witness


def process_report(witness: Witness) -> Json:
    """Return repairs, counts of passes, exports, graphs and fallbacks, and notes.

    The names are those of `OnnxRuntime` in docs/run-folder.md.
    """
    return {
        "repairs": list(registry.applied_repairs()),
        "repairs_not_applied": registry.unapplied_repair_reasons(),
        "deepcopy_before_export": options.decisions_record().get("deepcopy_before_export"),
        "torch_calls": {
            name: asdict(calls) for name, calls in torch_calls.counts_of_called().items()
        },
        "torch_share": round(torch_calls.torch_share_of_pass_time(), 4),
        **witness.counts_record(),
        **tally.counts_record(),
    }
