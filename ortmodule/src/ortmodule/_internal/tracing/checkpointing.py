"""Replace a model's gradient checkpointing by ORT's recomputation.

In the export a reentrant checkpoint fails, and any other one is lost.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.patching import replace_attribute_temporarily
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, TRAINING, repair
from ortmodule._internal.tracing.observer import facts_of_observed_trace_or_none

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction


@repair(
    "map_gradient_checkpointing",
    "install",
    70,
    replaces="__init__:_defined_from_envvar",
    fault="A reentrant gradient checkpoint ends the export, and the recomputation of any other "
    "one is lost without a message.",
    example="test_repairs.py::test_checkpointing_becomes_recomputation[0-False]",
    sources={
        **EXPORT_SOURCES,
        f"{TRAINING}._create_execution_agent": "d25d6cd3c6333ed3",
        "__init__:_override_gradient_checkpoint": "cec15e65a7037fcf",
        "options:_RuntimeOptions.memory_optimizer_is_enabled": "b490d1ca93ec18c7",
        "torch.utils.checkpoint:checkpoint": (
            "CheckpointFunction.apply(function, preserve, *args)",
            "_checkpoint_without_reentrant_generator(",
        ),
        "torch.utils.checkpoint:_checkpoint_without_reentrant_generator": ("yield",),
    },
)
def _read_ort_variable_or_record_checkpoint_and_get_1(
    read_ort_variable: AnyFunction, variable_name: str, *default_value: object
) -> Any:
    """Return ORT's environment value; 1 for the memory level, which means a direct call.

    ORT's replacement of torch.utils.checkpoint reads the level last, and only in an export. It then
    calls the function directly.
    """
    if variable_name != "ORTMODULE_MEMORY_OPT_LEVEL":
        return read_ort_variable(variable_name, *default_value)
    # ORT's flag of an export is the process's, so that passes of other threads get here, too.
    if facts := facts_of_observed_trace_or_none():
        facts.has_checkpoints = True
    return 1


@repair("map_gradient_checkpointing", "context", 40)
@contextlib.contextmanager
def call_and_record_checkpoints_directly(export_context: ExportContext) -> Iterator[None]:
    """Call checkpointed functions directly, and record whether there were any.

    This also works if `checkpoint` was imported before ORT replaced it.
    """

    def record_and_yield(*args: object, **kwargs: object) -> Iterator[None]:
        export_context.facts.has_checkpoints = True
        # torch calls the function between the yield and the end of the generator.
        yield

    class DirectCheckpoint:
        @staticmethod
        def apply(function: AnyFunction, preserve_rng_state: bool, *args: object) -> Any:
            export_context.facts.has_checkpoints = True
            return function(*args)

    checkpoint_module = torch.utils.checkpoint
    # The first is behind use_reentrant=True, the second behind use_reentrant=False.
    with (
        replace_attribute_temporarily(checkpoint_module, "CheckpointFunction", DirectCheckpoint),
        replace_attribute_temporarily(
            checkpoint_module, "_checkpoint_without_reentrant_generator", record_and_yield
        ),
    ):
        yield


@repair("map_gradient_checkpointing", "verdict", 10)
def enable_ort_recomputation_if_checkpointed(export_context: ExportContext) -> None:
    """Turn on ORT's recomputation, at level 1, if the model has checkpoints."""
    options = export_context.options
    if (
        export_context.training
        and export_context.facts.has_checkpoints
        and not options.memory_optimizer_is_enabled()
    ):
        options.memory_optimization_level = 1
        options.recompute_probe_config = "1:1"
        tally.add_end_note_once(
            "the model's gradient checkpointing became ONNX Runtime's recomputation: "
            "memory_optimization: 1"
        )


@repair(
    "restore_checkpoint_functions",
    "before import",
    20,
    fault="`import onnxruntime.training` leaves a replacement of "
    "`torch.utils.checkpoint.checkpoint` behind, which the import of ORTModule replaces once "
    "more: its calls fail.",
    example="tracing/test_compat.py::test_each_check_passes[checkpoint]",
)
def restore_checkpoint_functions() -> bool:
    """Restore `checkpoint` of torch and DeepSpeed after a failed import of ORTModule.

    `import onnxruntime.training`, as for its FusedAdam, also imports ORTModule. On torch 2.9 and
    later that fails without an error, after `checkpoint` has been replaced. A second import would
    replace the replacement, which then passes its own arguments on to the layer.
    """
    restored_flags = [
        _undo_ort_checkpoint_replacement(name)
        for name in ("torch.utils.checkpoint", "deepspeed")
        if name in sys.modules
    ]
    # After the list, not in place of it: `any` would stop at the first one that was restored.
    return any(restored_flags)


def _undo_ort_checkpoint_replacement(patched_module_name: str) -> bool:
    module: Any = sys.modules[patched_module_name]
    module = (
        getattr(module, "checkpointing", None) if patched_module_name == "deepspeed" else module
    )
    checkpoint_before: Any = getattr(module, "checkpoint", None)
    unwrapped_checkpoint = checkpoint_before
    # ORT's replacement is a closure over the original function.
    while getattr(unwrapped_checkpoint, "__qualname__", "").startswith(
        "_override_gradient_checkpoint."
    ):
        unwrapped_checkpoint = inspect.getclosurevars(unwrapped_checkpoint).nonlocals[
            "original_checkpoint"
        ]
    if unwrapped_checkpoint is not checkpoint_before:
        module.checkpoint = unwrapped_checkpoint
    return unwrapped_checkpoint is not checkpoint_before
