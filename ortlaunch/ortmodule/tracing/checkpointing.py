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

from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.base.source_guard import function_owner

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction


def bypass_ort_checkpoints() -> None:
    """Make ORT's replacement of torch.utils.checkpoint call the function directly.

    The call is recorded.
    """
    ortmodule: Any = function_owner("__init__:")
    ortmodule._defined_from_envvar = functools.partial(
        _record_and_get_level, ortmodule._defined_from_envvar
    )


# One entry for each checkpointed call in the current export.
_checkpointed_calls: list[None] = []


def _record_and_get_level(original: AnyFunction, variable_name: str, *default_value: object) -> Any:
    """Return ORT's environment value; 1 for the memory level, which means a direct call.

    ORT's replacement of torch.utils.checkpoint reads the level last, and only in an export.
    """
    if variable_name != "ORTMODULE_MEMORY_OPT_LEVEL":
        return original(variable_name, *default_value)
    _checkpointed_calls.append(None)
    return 1


@contextlib.contextmanager
def call_checkpoints_directly(export: Export) -> Iterator[None]:
    """Call checkpointed functions directly, and record whether there were any."""
    _checkpointed_calls.clear()
    with _replace_torch_checkpoints():
        yield
    export.facts["checkpointed"] = bool(_checkpointed_calls)


@contextlib.contextmanager
def _replace_torch_checkpoints() -> Iterator[None]:
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


def enable_ort_recomputation(export: Export) -> None:
    """Turn on ORT's recomputation, at level 1, if the model has checkpoints."""
    options = export.options
    if (
        export.training
        and export.facts.get("checkpointed")
        and not options.memory_optimizer_is_enabled()
    ):
        options.memory_optimization_level = 1
        options.recompute_probe_config = "1:1"
        tally.add_note_once(
            "the model's gradient checkpointing became ONNX Runtime's recomputation: "
            "memory_optimization: 1"
        )
