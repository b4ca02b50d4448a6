"""Gradient checkpointing of a model, which ended the export (reentrant) or was lost in it: ORT recomputes instead."""

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
    """Let ORT's stand-in for torch.utils.checkpoint call what is checkpointed plainly, and note that it did."""
    ortmodule: Any = owner("__init__:")
    ortmodule._defined_from_envvar = functools.partial(_level, ortmodule._defined_from_envvar)


_checkpoints: list[None] = []


def _level(original: AnyFunction, name: str, *default: object) -> Any:
    """ORT's stand-in for torch.utils.checkpoint asks for the level last, and only in an export; 1: call it plainly."""
    if name != "ORTMODULE_MEMORY_OPT_LEVEL":
        return original(name, *default)
    _checkpoints.append(None)
    return 1


@contextlib.contextmanager
def called_plainly(export: Export) -> Iterator[None]:
    """While open, what is checkpointed is called plainly, and noted."""
    _checkpoints.clear()
    with _plain_checkpoints():
        yield
    export.seen["checkpointed"] = bool(_checkpoints)


@contextlib.contextmanager
def _plain_checkpoints() -> Iterator[None]:
    """Call what is checkpointed plainly, also where `checkpoint` was imported before ORT replaced it."""

    def unrecorded(*args: object, **kwargs: object) -> Iterator[None]:
        _checkpoints.append(None)
        yield  # torch calls the function between this and the end

    class Unrecorded:
        @staticmethod
        def apply(function: AnyFunction, preserve_rng_state: bool, *args: object) -> Any:
            _checkpoints.append(None)
            return function(*args)

    parts: Any = torch.utils.checkpoint
    before = parts.CheckpointFunction, parts._checkpoint_without_reentrant_generator
    parts.CheckpointFunction = Unrecorded
    parts._checkpoint_without_reentrant_generator = unrecorded
    try:
        yield
    finally:
        parts.CheckpointFunction, parts._checkpoint_without_reentrant_generator = before


def recompute(export: Export) -> None:
    """ORT's recomputation, at level 1, takes the place of the model's checkpoints."""
    options = export.options
    if (
        export.training
        and export.seen.get("checkpointed")
        and not options.memory_optimizer_is_enabled()
    ):
        options.memory_optimization_level = 1
        options.recompute_probe_config = "1:1"
        tally.note(
            "the model's gradient checkpointing became ONNX Runtime's recomputation: memory_optimization: 1"
        )
