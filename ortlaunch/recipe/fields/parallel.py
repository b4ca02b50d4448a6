"""The section `parallel` of a recipe: torch's FSDP2."""

from __future__ import annotations

from ortlaunch.recipe.fields.section import APPLIED, PositiveOrAuto, Section, Words


class Parallel(Section, resume_rule=APPLIED):
    """Weights, gradients and optimizer state divided over the ranks by torch's FSDP2
    (`fully_shard`), for engines eager and inductor. null instead of this section: every rank has
    all of them, unless `zero` divides them."""

    shard: PositiveOrAuto = "auto"
    """Ranks that share one copy of the model. `auto`: all ranks of a host, or all ranks with
    `replicate: 1`."""
    replicate: PositiveOrAuto = "auto"
    """Copies of the model, each on `shard` ranks that follow each other (HSDP): ranks = shard x
    replicate. `auto`: as many as the ranks hold."""
    blocks: Words = ()
    """Classes of the layers whose weights are gathered together, one layer after another, such as
    `LlamaDecoderLayer`. Empty: those that transformers names for the model, else the layers of its
    lists."""
    offload: bool = False
    """Keep weights, gradients, optimizer state and the optimizer step in host memory (CUDA)."""
