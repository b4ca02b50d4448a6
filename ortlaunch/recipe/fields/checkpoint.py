"""The section `checkpoint` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ortlaunch.recipe.fields.best import KeepBest
from ortlaunch.recipe.fields.section import APPLIED, Positive, Section, convert_list_to_tuple


class Checkpoint(Section, resume_rule=APPLIED):
    """Checkpoints: saved state to continue from."""

    every_minutes: Annotated[float, Field(gt=0)] | None = 30
    """Minutes since the last save after which the next save follows, by rank 0's clock; null: not
    by time. A checkpoint is always written at the end."""
    every_steps: Positive | None = None
    """Also save after every this many steps; null: not by steps."""
    every_epochs: Annotated[float, Field(gt=0)] | None = None
    """The same in passes over the training data, as 0.5: a save follows the step that completes
    each further half of a pass. Instead of `every_steps`."""
    keep: Positive | None = 3
    """Number of newest checkpoints to keep; null keeps all."""
    keep_every: Positive | None = None
    """Of the checkpoints that `keep` would delete, keep one for good every this many steps: the
    first at or after each multiple."""
    keep_best: KeepBest | None = None
    """Save after each evaluation that is the best so far, and keep the best checkpoint in addition
    to those of `keep`, as `{metric: f1_macro}`; null: none."""
    export: Annotated[
        tuple[Literal["huggingface", "onnx"], ...], BeforeValidator(convert_list_to_tuple)
    ] = ()
    """Also write each checkpoint as a model, as [huggingface, onnx], into `exports/`, as `ortlaunch
    export` does (an ONNX model is run and compared with PyTorch). One process beside rank 0 does so
    on the CPU while training goes on, and the end of the run waits for it. An export is deleted
    with its checkpoint (`keep`). One that fails is printed and recorded (exports.jsonl), and
    training goes on. Costs that process's CPU time, and on rank 0's host memory for a copy of the
    model and of the data."""
    on_failure: Literal["stop", "continue"] = "stop"
    """Response to a save that fails (a full disk, a folder that became read-only); older
    checkpoints stay unchanged. `stop`: the run ends. `continue`: the run prints the failure, counts
    it in summary.json, trains on and tries again at the next save; where the save at the end fails
    the export is written, and the run has failed."""
    # `async` is a keyword of Python, so no plain assignment can declare the field; the description
    # below stands for the docstring.
    __annotations__["async"] = Annotated[
        bool | None,
        Field(
            default=None,
            description="Copy the state into memory and write it while training goes on; another save waits for it, "
            "and so does the end of the run. Saves that a stop or `ortlaunch checkpoint` asks "
            "for, and the last, are "
            "written at once. Takes memory of the host for one more copy of weights and "
            "optimizer state. null: on "
            "GPUs.",
        ),
    ]
