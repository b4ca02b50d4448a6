"""Exports of a model: each start makes its own, counts it, and copies no large weights for it.

No graph is kept for a later start. A trace reads whatever Python's code reads (closures, globals, classes, files), so
the one sound key is the traced graph itself, and what follows the trace is not worth a cache (docs/repairs.md).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from ortlaunch.ortmodule.known import TRANSITION, owner
from ortlaunch.ortmodule.patching import wrap_method
from ortlaunch.ortmodule.tally import tally, traced

_INFERENCE = "_jit_pass_onnx_graph_shape_type_inference"
_SMALL = 1024


def export_every_time() -> None:
    """ORT's own cache runs the training graph in evaluation, and takes every model of one structure for the same."""
    wrap_method(owner(TRANSITION), "_get_exported_model", _anew)


def _anew(original: Callable[..., Any], **kwargs: Any) -> Any:
    traced(kwargs["stage3_param_handle"]).clear()
    if kwargs["ortmodule_cache_dir"]:
        tally.note("ORTMODULE_CACHE_DIR is not used: ORT would take a graph of another mode or model from it")
        kwargs["ortmodule_cache_dir"] = ""
    began = time.perf_counter()
    exported = original(**kwargs)
    tally.exports += 1
    tally.export_seconds += time.perf_counter() - began
    return exported


def without_weights(export: Callable[..., Any]) -> Callable[..., Any]:
    """An export whose shape inference gets no large weights: torch copies each one, twice, for its shape alone."""

    @functools.wraps(export)
    def export_without_weights(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch._C, _INFERENCE, functools.partial(_inferred, getattr(torch._C, _INFERENCE))):
            return export(*args, **kwargs)

    return export_without_weights


def _inferred(infer: Callable[..., None], graph: Any, weights: dict[str, Any], opset: int) -> None:
    """Small ones stay: a buffer's numbers may be the sizes of a view."""
    infer(graph, {name: weight for name, weight in weights.items() if not _is_large(weight)}, opset)


def _is_large(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and weight.numel() > _SMALL
