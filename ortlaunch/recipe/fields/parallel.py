"""The section `parallel` of a recipe: torch's FSDP2, and tensor parallelism."""

from __future__ import annotations

from ortlaunch.recipe.fields.section import (
    APPLIED,
    Positive,
    PositiveOrAuto,
    Section,
    Text,
    Words,
)


class Parallel(Section, resume_rule=APPLIED):
    """Weights, gradients and optimizer state divided over the ranks by torch's FSDP2
    (`fully_shard`) and tensor parallelism, for engines eager and inductor. null instead of this section: every rank has
    all of them, unless `zero` divides them. Beside `zero` (stages 0 to 2) there can be `tensor` with its plan,
    by DeepSpeed's AutoTP."""

    shard: PositiveOrAuto = "auto"
    """Parts of one copy of the model. `auto`: as many as a host holds, or as all hosts hold with
    `replicate: 1`."""
    replicate: PositiveOrAuto = "auto"
    """Copies of the model, each on `shard` x `tensor` ranks that follow each other (HSDP): ranks =
    replicate x shard x tensor. `auto`: as many as the ranks hold."""
    tensor: Positive = 1
    """Ranks that compute each layer together (tensor parallelism). They follow each other on one
    host, and read the same samples: the batch is divided by replicate x shard. Each has a slice of
    the attention heads and of the inner width of a layer, which this number must divide."""
    tensor_plan: dict[Text, Text] = {}
    """How layers are divided over the ranks of `tensor`: a pattern of the layer's name in the model,
    with `*` for numbers, and `colwise`, `rowwise` or another style of transformers. These come beside
    the plan that transformers has for the model, and before it."""
    across_hosts: bool = False
    """Let the ranks of `tensor` be on several hosts, whose network then carries activations of each
    layer."""
    blocks: Words = ()
    """Classes of the layers whose weights are gathered together, one layer after another, such as
    `LlamaDecoderLayer`. Empty: those that transformers names for the model, else the layers of its
    lists."""
    offload: bool = False
    """Keep weights, gradients, optimizer state and the optimizer step in host memory (CUDA)."""
