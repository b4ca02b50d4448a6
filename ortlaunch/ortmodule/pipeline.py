"""What happens in an export, from top to bottom: a trace under contexts, passes over the graph, the verdict.

Each step belongs to a repair (repairs.py) and is taken where that is in force. No graph is kept for a later start: a
trace reads whatever Python's code reads (closures, globals, classes, files), so the one sound key is the traced graph
itself, and what follows the trace is not worth a cache (docs/repairs.md).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from unittest import mock

import torch

from ortlaunch.ortmodule import buffers, checkpointing, convolutions, cross_entropy, gradients, model_state, patching
from ortlaunch.ortmodule import python_values as values
from ortlaunch.ortmodule.export import Export, export_of
from ortlaunch.ortmodule.known import TRANSITION, owner
from ortlaunch.ortmodule.tally import tally

Step = TypeVar("Step")

# 1. Around the plain pass by which ORT learns what the model returns, and the trace; the outermost first.
_CONTEXTS: tuple[tuple[str, Callable[[Export], AbstractContextManager[None]]], ...] = (
    ("watch_python_values", values.watched),
    ("export_every_cross_entropy", cross_entropy.written_out),
    ("leave_out_ignored_labels", cross_entropy.ignored_labels_left_out),
    ("map_gradient_checkpointing", checkpointing.called_plainly),
    ("follow_model_state", model_state.noted_state),
    ("keep_buffers_exact", buffers.buffers_kept),
)
# 2. Over the exported graph.
_PASSES: tuple[tuple[str, Callable[[Export, Any], None]], ...] = (
    ("keep_buffers_exact", buffers.put_out_batch_sizes),
    ("leave_out_ignored_labels", cross_entropy.shrink),
    ("convolve_in_two_dimensions", convolutions.rewrite),
)
# 3. Which inputs and weights get a gradient.
_GRADIENTS: tuple[tuple[str, Callable[[Export, Any, list[str]], list[str]]], ...] = (
    ("skip_frozen_gradients", gradients.without_frozen),
    ("skip_unreached_weights", gradients.without_unreached),
)
# 4. What the trace showed: told, taken over into options, or refused.
_VERDICTS: tuple[tuple[str, Callable[[Export], None]], ...] = (
    ("map_gradient_checkpointing", checkpointing.recompute),
    ("leave_out_ignored_labels", cross_entropy.tell_density),
    ("watch_python_values", values.judge),
)


def install() -> None:
    """Let ORT's exports go this way; once in a process."""
    patching.wrap_method(owner(TRANSITION), "_get_exported_model", _traced)
    patching.wrap_method(owner(TRANSITION), "_export_model", _exported)


def _exported(original: Callable[..., Any], **arguments: Any) -> Any:
    """ORT's `_export_model`: steps 1 to 4."""
    model, schema, names, differentiable = original(**arguments)  # calls _traced
    export = export_of(arguments)
    for narrowed in _in_force(_GRADIENTS):
        differentiable = narrowed(export, model, differentiable)
    for judge in _in_force(_VERDICTS):
        judge(export)
    return model, schema, names, differentiable


def _traced(original: Callable[..., Any], **arguments: Any) -> Any:
    """ORT's `_get_exported_model`: steps 1 and 2."""
    if arguments["ortmodule_cache_dir"] and "export_every_time" in patching.applied():
        tally.note("ORTMODULE_CACHE_DIR is not used: ORT would take a graph of another mode or model from it")
        arguments["ortmodule_cache_dir"] = ""
    export = export_of(arguments)
    export.seen.clear()
    with _counted():
        with contextlib.ExitStack() as contexts:
            for context in _in_force(_CONTEXTS):
                contexts.enter_context(context(export))
            model, schema = original(**arguments)
        for rewrite in _in_force(_PASSES):
            rewrite(export, model)
    return model, schema


def _in_force(steps: tuple[tuple[str, Step], ...]) -> Iterator[Step]:
    applied = patching.applied()
    return (step for name, step in steps if name in applied)


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    began = time.perf_counter()
    yield
    tally.exports += 1
    tally.export_seconds += time.perf_counter() - began


# ------------------------------------------------------------------------------------------- shape inference

_INFERENCE = "_jit_pass_onnx_graph_shape_type_inference"
_SMALL = 1024


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
