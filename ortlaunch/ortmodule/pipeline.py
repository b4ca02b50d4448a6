"""The steps of an export in their order: a trace under contexts, passes over the graph, verdicts.

Each step belongs to a repair (repairs.py) and runs only if that is applied. No graph is cached
between runs. A trace depends on everything that Python code reads (closures, globals, classes,
files), so the only sound key would be the traced graph itself, and the steps after the trace are
not worth a cache (docs/repairs.md).
"""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import onnx
import torch

from ortlaunch.ortmodule.base import counters, custom_functions, gradients, patching
from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.export import Export, export_of
from ortlaunch.ortmodule.base.ort_types import AnyFunction
from ortlaunch.ortmodule.base.registry import applied
from ortlaunch.ortmodule.base.source_guard import TRANSITION, owner
from ortlaunch.ortmodule.graph_repairs import (
    bfloat16,
    broadcasts,
    constant_outputs,
    convolutions,
    copied_inputs,
    gradient_names,
    padding,
    postprocess,
)
from ortlaunch.ortmodule.state import buffers, model_state, unsupported, weight_changes
from ortlaunch.ortmodule.state import python_values as values
from ortlaunch.ortmodule.torch_in_graph import (
    attention,
    head_loss,
    operator_table,
    operator_translation,
    torch_modules,
)
from ortlaunch.ortmodule.tracing import (
    aliases,
    checkpointing,
    cross_entropy,
    escapes,
    grad_mode,
    tracing,
)

_OURS = str(Path(__file__).parent)
Step = TypeVar("Step")
Trace = AnyFunction

# 1. Contexts of the plain pass, which gives ORT the model's outputs, and of the trace; the
# outermost first.
_CONTEXTS: tuple[tuple[str, Callable[[Export], AbstractContextManager[None]]], ...] = (
    ("detect_traced_values", values.watched),
    ("export_smoothed_cross_entropy", cross_entropy.written_out),
    ("skip_ignored_labels", cross_entropy.ignored_labels_left_out),
    ("map_gradient_checkpointing", checkpointing.called_plainly),
    ("refuse_weight_changes", weight_changes.weights_kept),
    ("follow_model_state", model_state.noted_state),
    ("stop_gradient_under_no_grad", grad_mode.noted),
    ("keep_buffers_exact", buffers.buffers_kept),
    ("detect_kept_tensors", escapes.noted),
)
# 2. Wrappers of the trace alone, the innermost first.
_TRACE: tuple[tuple[str, Callable[[Trace], Trace]], ...] = (
    ("export_with_torchscript", tracing.by_torchscript),
    ("refuse_custom_backward", custom_functions.without_inlining),
    ("export_exact_forms", operator_table.with_forms),
    ("keep_constants_apart", tracing.with_own_constants),
    ("trace_swapped_weights", tracing.with_swapped_weights),
    # Inside the next one, which must track the tensors that this one computes.
    ("propagate_inplace_views", aliases.following_changes),
    ("stop_gradient_under_no_grad", grad_mode.following_grad_mode),
    ("infer_shapes_without_weights", tracing.without_weights),
    ("silence_export_warnings", tracing.quiet),
    ("keep_buffers_exact", buffers.with_each_mode),
)
# 3. Passes over the exported graph.
_PASSES: tuple[tuple[str, Callable[[Export, onnx.ModelProto], None]], ...] = (
    ("keep_buffers_exact", buffers.put_out_batch_sizes),
    ("skip_ignored_labels", cross_entropy.shrink),
    ("export_grouped_conv1d_as_conv2d", convolutions.rewrite),
    ("keep_broadcast_sizes", broadcasts.note_sizes),
    ("concatenate_constants", gradient_names.keep_constants_apart),
    ("sum_repeated_weights", copied_inputs.use_weights_once),
    ("export_smoothed_cross_entropy", copied_inputs.compute_scores),
    ("compute_constant_outputs", constant_outputs.compute_outputs),
)
# 4. Selection of the inputs and weights that get a gradient.
_GRADIENTS: tuple[tuple[str, Callable[[Export, onnx.ModelProto, list[str]], list[str]]], ...] = (
    ("skip_frozen_gradients", gradients.without_frozen),
    ("skip_unreached_weights", gradients.without_unreached),
)
# 5. Consequences of the trace: reported, stored in options, or an error.
_VERDICTS: tuple[tuple[str, Callable[[Export], None]], ...] = (
    ("map_gradient_checkpointing", checkpointing.recompute),
    ("skip_ignored_labels", cross_entropy.report_density),
    ("detect_traced_values", values.judge),
)


def install() -> None:
    """Install these steps in ORT's export, once in a process."""
    patching.replace_ort_export(_trace)
    patching.wrap_method(owner(TRANSITION), "_get_exported_model", _traced)
    patching.wrap_method(owner(TRANSITION), "_export_model", _exported)
    # Inside the next one, which exports again if an operator has no kernel.
    bfloat16.install()
    operator_translation.install()
    unsupported.install()


def _exported(original: AnyFunction, **arguments: object) -> object:
    """Run steps 1 to 5; a replacement for ORT's `_export_model`."""
    with counters.while_building():
        model, schema, names, differentiable = original(**arguments)  # calls _traced
        export = export_of(arguments)
        for narrowed in _in_force(_GRADIENTS):
            differentiable = narrowed(export, model, differentiable)
        for judge in _in_force(_VERDICTS):
            judge(export)
    return model, schema, names, differentiable


def _traced(original: AnyFunction, **arguments: object) -> object:
    """Run steps 1 to 3; a replacement for ORT's `_get_exported_model`."""
    if arguments["ortmodule_cache_dir"] and "ignore_ort_export_cache" in applied():
        tally.note(
            "ORTMODULE_CACHE_DIR is not used: ORT would take a graph of another mode or model from "
            "it"
        )
        arguments["ortmodule_cache_dir"] = ""
    export = export_of(arguments)
    unsupported.refuse_weights(export.module)
    # Each retry marks one more layer to run as torch, so the loop ends with the last layer.
    while True:
        try:
            return _traced_once(export, original, arguments)
        except torch_modules.OnceMore:
            continue


def _traced_once(export: Export, original: AnyFunction, arguments: dict[str, object]) -> object:
    export.facts.clear()
    with _counted():
        with contextlib.ExitStack() as contexts:
            for context in _in_force(_CONTEXTS):
                contexts.enter_context(context(export))
            contexts.enter_context(padding.padding_exactly(export))
            contexts.enter_context(unsupported.uncompiled(export.module))
            contexts.enter_context(attention.without_causal_masks(export))
            contexts.enter_context(attention.padded_with_zeros())
            contexts.enter_context(operator_translation.operators_as_torch(export))
            contexts.enter_context(torch_modules.called(export))
            with _refusals_alone():
                model, schema = original(**arguments)  # calls _trace
        bfloat16.correct_casts(model)
        for rewrite in _in_force(_PASSES):
            rewrite(export, model)
        model = postprocess.apply(export, model)
    return model, schema


# wraps, because ORT reads the function's signature.
@functools.wraps(torch.onnx.export)
def _trace(*args: object, **kwargs: object) -> object:
    """Run step 2; a replacement for `torch.onnx.export` in ORT."""
    return tracing.with_autocasts_cache(_tracer())(*args, **kwargs)


@functools.cache
def _tracer() -> Trace:
    # Not a repair, because the operator is ortlaunch's own.
    export = head_loss.calling_chunked_loss(torch.onnx.export)
    for name, around in _TRACE:
        if name in applied():
            export = around(export)
    return export


def _in_force(steps: tuple[tuple[str, Step], ...]) -> Iterator[Step]:
    return (step for name, step in steps if name in applied())


@contextlib.contextmanager
def _refusals_alone() -> Iterator[None]:
    """Raise a refusal of this package as it is, without the traceback that ORT puts around it.

    The exception keeps ORT's type, by which it decides about its fallback.
    """
    try:
        yield
    except Exception as error:
        inner: BaseException | None = error
        while inner is not None:
            frames = traceback.extract_tb(inner.__traceback__)[-1:]
            if inner is not error and any(one.filename.startswith(_OURS) for one in frames):
                raise type(error)(str(inner)) from inner
            inner = inner.__context__
        raise


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    began = time.perf_counter()
    yield
    tally.exports += 1
    tally.export_seconds += time.perf_counter() - began
