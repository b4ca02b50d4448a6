"""Replace a model's gradient checkpointing by ORT's recomputation.

In the export a reentrant checkpoint fails, and any other one is lost.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.source_guard import owning_class_or_module

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction


def call_functions_of_ort_checkpoints_directly() -> None:
    """Make ORT's replacement of torch.utils.checkpoint call the function directly.

    The call is recorded.
    """
    ortmodule: Any = owning_class_or_module("__init__:")
    ortmodule._defined_from_envvar = functools.partial(
        _read_ort_variable_or_record_checkpoint_and_get_1, ortmodule._defined_from_envvar
    )


# One entry for each checkpointed call in the current export.
_checkpointed_calls: list[None] = []


def _read_ort_variable_or_record_checkpoint_and_get_1(
    read_ort_variable: AnyFunction, variable_name: str, *default_value: object
) -> Any:
    """Return ORT's environment value; 1 for the memory level, which means a direct call.

    ORT's replacement of torch.utils.checkpoint reads the level last, and only in an export.
    """
    if variable_name != "ORTMODULE_MEMORY_OPT_LEVEL":
        return read_ort_variable(variable_name, *default_value)
    _checkpointed_calls.append(None)
    return 1


@contextlib.contextmanager
def call_and_record_checkpoints_directly(export_context: ExportContext) -> Iterator[None]:
    """Call checkpointed functions directly, and record whether there were any."""
    _checkpointed_calls.clear()
    with _call_checkpointed_functions_directly_and_record():
        yield
    export_context.facts["checkpointed"] = bool(_checkpointed_calls)


@contextlib.contextmanager
def _call_checkpointed_functions_directly_and_record() -> Iterator[None]:
    """Call checkpointed functions directly.

    This also works if `checkpoint` was imported before ORT replaced it.
    """

    def record_and_yield(*args: object, **kwargs: object) -> Iterator[None]:
        _checkpointed_calls.append(None)
        # torch calls the function between the yield and the end of the generator.
        yield

    class DirectCheckpoint:
        @staticmethod
        def apply(function: AnyFunction, preserve_rng_state: bool, *args: object) -> Any:
            _checkpointed_calls.append(None)
            return function(*args)

    checkpoint_module: Any = torch.utils.checkpoint
    # The first is behind use_reentrant=True, the second behind use_reentrant=False.
    original_parts = (
        checkpoint_module.CheckpointFunction,
        checkpoint_module._checkpoint_without_reentrant_generator,
    )
    checkpoint_module.CheckpointFunction = DirectCheckpoint
    checkpoint_module._checkpoint_without_reentrant_generator = record_and_yield
    try:
        yield
    finally:
        (
            checkpoint_module.CheckpointFunction,
            checkpoint_module._checkpoint_without_reentrant_generator,
        ) = original_parts


def enable_ort_recomputation_if_checkpointed(export_context: ExportContext) -> None:
    """Turn on ORT's recomputation, at level 1, if the model has checkpoints."""
    options = export_context.options
    if (
        export_context.training
        and export_context.facts.get("checkpointed")
        and not options.memory_optimizer_is_enabled()
    ):
        options.memory_optimization_level = 1
        options.recompute_probe_config = "1:1"
        tally.add_end_note_once(
            "the model's gradient checkpointing became ONNX Runtime's recomputation: "
            "memory_optimization: 1"
        )
