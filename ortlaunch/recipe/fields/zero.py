"""The section `zero` of a recipe: DeepSpeed ZeRO."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ortlaunch.recipe.fields.section import APPLIED, Section, Text


class Offload(Section, resume_rule=APPLIED):
    """Optimizer state and weights that DeepSpeed keeps outside GPU memory."""

    optimizer: Literal["cpu", "nvme"] | None = None
    """Location of master weights, optimizer state and the optimizer step: host memory, or files
    below `nvme_path` (stage 3 only). Stages 1 to 3. The step is torch's AdamW on the CPU."""
    parameters: Literal["cpu", "nvme"] | None = None
    """Location of weights that no layer uses at the moment: host memory, or files below
    `nvme_path`. Stage 3."""
    # Required with nvme, refused without it: deepspeed_keys.py.
    nvme_path: Text | None = None
    """Folder on a fast local disk of every host, for `nvme`."""
    pin_memory: bool = False
    """Use host memory that the GPU reads directly: faster copies, but such memory cannot be swapped
    out."""


class Zero(Section, resume_rule=APPLIED):
    """DeepSpeed ZeRO. null instead of this section: no DeepSpeed, DistributedDataParallel."""

    # Not a Literal, which would accept true for 1 and 2.0 for 2.
    stage: Annotated[int, Field(ge=0, le=3)] = 1
    """Shard over the ranks: 1 optimizer state, 2 also gradients, 3 also weights (not with engine
    ort)."""
    fused_gradient_norm: bool = True
    """Stages 1 and 2: compute the overflow check and the gradient norm in one pass over the
    gradients, instead of DeepSpeed's several. Several times faster, equal to double precision
    within 1e-6, no memory. engine.json records whether it runs, or why not. False: DeepSpeed's
    own."""
    offload: Offload | None = None
    """Keep optimizer state or weights in host memory or on a disk; null: everything is on the
    GPU."""
    deepspeed: dict[str, Any] = {}
    """Raw DeepSpeed settings, merged last; keys that the recipe owns are refused."""
