"""Tools for training loops on ORTModule: counters, profiles, gradient norms, ORT's modules."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortmodule._internal.base.counters import watch_builds
    from ortmodule._internal.deepspeed.gradient_norm import fuse_gradient_norm_or_get_reason
    from ortmodule._internal.deepspeed.sum_of_squares import float64_sum_of_squares
    from ortmodule._internal.fused_adam import (
        build_torch_adamw,
        reason_tensor_is_too_large_or_empty,
    )
    from ortmodule._internal.node_profile import NodeRun, ProfiledOrtSessions
    from ortmodule._internal.ort_artifacts import import_ort_training_artifacts
    from ortmodule._internal.pass_counters import PassAndGraphCounters

__all__ = [
    "NodeRun",
    "PassAndGraphCounters",
    "ProfiledOrtSessions",
    "build_torch_adamw",
    "float64_sum_of_squares",
    "fuse_gradient_norm_or_get_reason",
    "import_ort_training_artifacts",
    "reason_tensor_is_too_large_or_empty",
    "watch_builds",
]

_MODULE_BY_NAME = {
    "NodeRun": "node_profile",
    "PassAndGraphCounters": "pass_counters",
    "ProfiledOrtSessions": "node_profile",
    "build_torch_adamw": "fused_adam",
    "float64_sum_of_squares": "deepspeed.sum_of_squares",
    "fuse_gradient_norm_or_get_reason": "deepspeed.gradient_norm",
    "import_ort_training_artifacts": "ort_artifacts",
    "reason_tensor_is_too_large_or_empty": "fused_adam",
    "watch_builds": "base.counters",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ortmodule._internal.{_MODULE_BY_NAME[name]}"), name)
