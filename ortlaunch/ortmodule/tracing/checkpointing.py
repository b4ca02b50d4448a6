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
from ortlaunch.ortmodule.base.source_guard import owner

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction


def see_ort_checkpoints() -> None:
    """Make ORT's replacement of torch.utils.checkpoint call the function directly.

    The call is recorded.
    """
    ortmodule: Any = owner("__init__:")
    ortmodule._defined_from_envvar = functools.partial(_level, ortmodule._defined_from_envvar)


# One entry for each checkpointed call in the current export.
_checkpoints: list[None] = []


def _level(original: AnyFunction, name: str, *default: object) -> Any:
    """Return ORT's environment value; 1 for the memory level, which means a direct call.

    ORT's replacement of torch.utils.checkpoint reads the level last, and only in an export.
    """
    if name != "ORTMODULE_MEMORY_OPT_LEVEL":
        return original(name, *default)
    _checkpoints.append(None)
    return 1


@contextlib.contextmanager
def called_plainly(export: Export) -> Iterator[None]:
    """Call checkpointed functions directly, and record whether there were any."""
    _checkpoints.clear()
    with _plain_checkpoints():
        yield
    export.facts["checkpointed"] = bool(_checkpoints)


@contextlib.contextmanager
def _plain_checkpoints() -> Iterator[None]:
    """Call checkpointed functions directly.

    This also works if `checkpoint` was imported before ORT replaced it.
    """

    def unrecorded(*args: object, **kwargs: object) -> Iterator[None]:
        _checkpoints.append(None)
        # torch calls the function between the yield and the end of the generator.
        yield

    class Unrecorded:
        @staticmethod
        def apply(function: AnyFunction, preserve_rng_state: bool, *args: object) -> Any:
            _checkpoints.append(None)
            return function(*args)

    parts: Any = torch.utils.checkpoint
    # The first is behind use_reentrant=True, the second behind use_reentrant=False.
    before = parts.CheckpointFunction, parts._checkpoint_without_reentrant_generator
    parts.CheckpointFunction = Unrecorded
    parts._checkpoint_without_reentrant_generator = unrecorded
    try:
        yield
    finally:
        parts.CheckpointFunction, parts._checkpoint_without_reentrant_generator = before


def recompute(export: Export) -> None:
    """Turn on ORT's recomputation, at level 1, if the model has checkpoints."""
    options = export.options
    if (
        export.training
        and export.facts.get("checkpointed")
        and not options.memory_optimizer_is_enabled()
    ):
        options.memory_optimization_level = 1
        options.recompute_probe_config = "1:1"
        tally.note(
            "the model's gradient checkpointing became ONNX Runtime's recomputation: "
            "memory_optimization: 1"
        )
