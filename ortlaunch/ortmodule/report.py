"""The record of what ONNX Runtime really ran in this process, for engine.json and for own loops."""

from __future__ import annotations

from dataclasses import asdict

from ortlaunch.json_types import Json
from ortlaunch.ortmodule import options
from ortlaunch.ortmodule.base import registry, torch_calls
from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.witness import Witness


def report(witness: Witness) -> Json:
    """Return repairs, counts of passes, exports, graphs and fallbacks, and notes.

    The names are those of `OnnxRuntime` in docs/run-folder.md.
    """
    return {
        "repairs": list(registry.applied()),
        "repairs_not_applied": registry.not_applied(),
        "deepcopy_before_export": options.report().get("deepcopy_before_export"),
        "torch_calls": {
            name: asdict(calls) for name, calls in torch_calls.calls_from_graph().items()
        },
        "torch_share": round(torch_calls.share(), 4),
        **witness.counts(),
        **tally.truth(),
    }
