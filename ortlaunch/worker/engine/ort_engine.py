"""The model in ONNX Runtime's ORTModule, tested once before step 1, and its record."""

from __future__ import annotations

import functools
import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

import ortmodule
from ortlaunch.base.errors import EngineError
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.engine_report import (
    GraphReport,
    OnnxRuntime,
    Postprocess,
    TorchCalls,
)
from ortlaunch.worker.data.user_data import import_user_function
from ortlaunch.worker.engine import ort_settings
from ortlaunch.worker.engine.ort_settings import launcher_error, ortmodule_settings
from ortlaunch.worker.engine.stepping import require_gradient
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.model.precision import narrow_dtype_or_none
from ortlaunch.worker.model.returned_values import loss_of_engine_output
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.user_frames import error_type_message_and_location
from ortlaunch.worker.tensor_batch import TensorBatch

if TYPE_CHECKING:
    from ortmodule.loops import PassAndGraphCounters

# With one row, ONNX Runtime would take the number of rows for a size that broadcasts.
_PROBE_ROWS = 2
_ADVICE = (
    "The run ends here, before step 1. Try engine.name=inductor or engine.name=eager, or "
    "engine.allow_fallback=true to train what ONNX Runtime cannot run in eager PyTorch, or "
)
_LAYER_ADVICE = {
    False: "engine.torch_modules=[PATH] for a layer that it cannot run",
    True: "name another layer, too, or the one around, in engine.torch_modules",
}


class OrtModuleOrFallback(NamedTuple):
    """A model on engine ort, or in plain PyTorch where ONNX Runtime cannot run it."""

    module: nn.Module
    witness: PassAndGraphCounters
    fallback_reason: str
    """Why plain PyTorch runs it; empty if ONNX Runtime does."""
    whole_batch_reason: str
    """Why the export ran a whole micro batch; empty if it ran a few rows of it."""
    export_seconds: float
    """Seconds of the export with its passes, on the slowest rank."""


def build_and_probe_ort_module_or_fall_back(
    recipe: Recipe,
    model: LossModule,
    group: DistributedContext,
    sample_batch: TensorBatch,
    few_rows: TensorBatch | None,
) -> OrtModuleOrFallback:
    """Build the model in ORTModule and run it once; all ranks make the same decision.

    The run takes a few rows if their graph is valid for a micro batch, too, and else a micro batch.

    Args:
        recipe: the run's recipe.
        model: the model that returns its loss.
        group: the ranks of the run.
        sample_batch: a micro batch.
        few_rows: a part of it that the model takes in its place; None: there is none.

    Raises:
        EngineError: ONNX Runtime cannot run the model and the recipe does not allow a fallback, or
            a setting has no effect.
        Exception: the model raises in plain PyTorch, too.
        MissingDependency: ORTModule cannot be imported.
    """
    from ortmodule.loops import PassAndGraphCounters

    witness = PassAndGraphCounters()
    witness.start_counting_in_this_process()
    # Once a host, because it takes seconds.
    on_gpu = group.device.type == "cuda" and group.local.local_rank == 0
    reason = (
        next((str(missing) for missing in ortmodule.check(on_gpu, computes=True)), "")
        if on_gpu
        else ""
    )
    started_at = time.perf_counter()
    module: nn.Module = model
    reason = _first_reason_of_ranks_or_empty(group, reason)
    whole_batch_reason = _first_reason_of_ranks_or_empty(
        group, "a value of the batch has not one row a sample" if few_rows is None else ""
    )
    if not reason and not whole_batch_reason:
        module, whole_batch_reason = _export_with_batch_or_reason_of_any_rank(
            recipe, model, group, few_rows or sample_batch, sample_batch
        )
    if not reason and whole_batch_reason:
        module, reason = _export_with_batch_or_reason_of_any_rank(
            recipe, model, group, sample_batch, None
        )
    if reason:
        module = model
        # A mistake of the user's own code raises here as itself.
        _run_probe_pass_and_restore_state(recipe, model, model, group, sample_batch)
    if reason and not recipe.engine.allow_fallback:
        raise EngineError(
            "ONNX Runtime cannot run this model: "
            f"{first_and_last_error_line(reason)}\n"
            f"{_ADVICE}{_LAYER_ADVICE[bool(recipe.engine.torch_modules)]}"
        )
    # The pass of `_probe` does not count as the run's.
    witness.reset_pass_fallback_and_torch_call_counts()
    seconds_by_rank = group.gather_numbers([time.perf_counter() - started_at])
    return OrtModuleOrFallback(
        module, witness, reason, "" if reason else whole_batch_reason, max(seconds_by_rank)[0]
    )


def _export_with_batch_or_reason_of_any_rank(
    recipe: Recipe,
    model: LossModule,
    group: DistributedContext,
    export_batch: TensorBatch,
    later_batch_or_none: TensorBatch | None,
) -> tuple[nn.Module, str]:
    """Export a graph by a pass of one batch; return why it cannot run it or a later one, on any rank."""
    module: nn.Module = model
    try:
        ort_module: Any = wrap_model_in_ortmodule(recipe, model, group)
        module = ort_module
        _run_probe_pass_and_restore_state(recipe, ort_module, model, group, export_batch)
        reason = ""
        if later_batch_or_none is not None:
            with _autocast_of_recipe(recipe, group.device.type):
                reason = ort_module.reason_for_another_export(**later_batch_or_none)
    except ortmodule.ORTModuleError as error:
        raise launcher_error(error) from error
    # ONNX Runtime and the exporter raise many types of exceptions: all of them are reasons.
    except Exception as error:
        reason = error_type_message_and_location(error)
    return module, _first_reason_of_ranks_or_empty(group, reason)


def _first_reason_of_ranks_or_empty(group: DistributedContext, reason: str) -> str:
    return next((text for text in group.gather(reason) if text), "")


def first_two_rows_or_none(batch: TensorBatch) -> TensorBatch | None:
    """Return the first two rows of a batch; None unless every value has one row a sample.

    A batch that has no more rows is returned itself.
    """
    row_counts = {len(value) if value.dim() else 0 for value in batch.values()}
    if len(row_counts) > 1 or 0 in row_counts:
        return None
    return {name: value[:_PROBE_ROWS] for name, value in batch.items()}


def _autocast_of_recipe(recipe: Recipe, device_type: str) -> torch.autocast:
    # DeepSpeed casts the weights themselves, so that autocast is not used with it.
    dtype = narrow_dtype_or_none(recipe.precision) if recipe.zero is None else None
    return torch.autocast(device_type, dtype, enabled=dtype is not None)


def wrap_model_in_ortmodule(
    recipe: Recipe, model: nn.Module, group: DistributedContext
) -> nn.Module:
    """Wrap the model in ORTModule with the recipe's settings."""
    # The state that transformers' models read does not change between steps. A model class of the
    # user may change its state in any pass.
    follows_model_state = recipe.model.factory is not None
    postprocess_name = recipe.engine.postprocess
    settings = ortmodule_settings(
        recipe.engine,
        free_memory_bytes=ort_settings.free_memory_bytes_of_rank(group.local.local_world_size),
        follow_model_state=follows_model_state,
        postprocess=import_user_function("engine.postprocess", postprocess_name)
        if postprocess_name
        else None,
    )
    wrap = functools.partial(ortmodule.ORTModule, settings=settings)
    # A model that replays random numbers is wrapped with its loss.
    return model.with_engine_of(wrap) if isinstance(model, LossModule) else wrap(model)


def _run_probe_pass_and_restore_state(
    recipe: Recipe,
    module: nn.Module,
    model: LossModule,
    group: DistributedContext,
    sample_batch: TensorBatch,
) -> None:
    """Run one forward and backward pass without effect on buffers, gradients or random state."""
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    devices = [group.device] if group.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        _autocast_of_recipe(recipe, group.device.type),
        # A rank that fails must not wait for the others in the loss.
        model.compute_loss_of_own_rank(),
    ):
        loss = loss_of_engine_output(module(**sample_batch))
        require_gradient(loss)
        loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])


def first_and_last_error_line(error_text: str) -> str:
    """Return the first line of an exporter's message and its last error, in 600 characters."""
    lines = [line.strip() for line in error_text.splitlines() if line.strip()]
    raised = [line for line in lines[1:] if re.match(r"[\w.]*(Error|Exception): ", line)]
    return " ".join([*lines[:1], *raised[-1:]])[:600]


def onnxruntime_report_so_far(recipe: Recipe, witness: PassAndGraphCounters) -> OnnxRuntime:
    """Return the report of ONNX Runtime so far."""
    record = ortmodule.report(witness)
    postprocess_record = record["postprocess"]
    typed = {
        "postprocess": postprocess_record and Postprocess(**postprocess_record),
        "torch_calls": {name: TorchCalls(**calls) for name, calls in record["torch_calls"].items()},
    }
    graphs = {
        name: record[name] and GraphReport(**record[name])
        for name in ("training_graph", "evaluation_graph")
    }
    return OnnxRuntime(
        **{**record, **typed, **graphs}, **ort_settings.recipe_settings_and_ort_variables(recipe)
    )


def unapplied_repair_and_export_notes() -> tuple[str, ...]:
    """Return notes for the user: repairs that were not applied, and notes of the export."""
    record = ortmodule.report()
    unapplied_repairs = (
        f"ONNX Runtime's {name} is not repaired: {reason}"
        for name, reason in record["repairs_not_applied"].items()
    )
    return (*unapplied_repairs, *record["notes"])
