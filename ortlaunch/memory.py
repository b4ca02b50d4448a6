"""Parameters, bytes per rank and FLOPs of a recipe, from its numbers alone. Pure.

Weights, gradients and optimizer state are exact counts; activations are an estimate after Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.1.
Only BERT and Llama configs are counted here; other models give None and are counted by the worker.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ortlaunch.recipe import Recipe
from ortlaunch.recipe.families import complete
from ortlaunch.recipe.models import Lora, TokenizerTraining

_STATE_BYTES = {"fused_adam": 8, "adamw": 8, "lamb": 8}  # two float32 moments


class Bytes(NamedTuple):
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self)


class Memory(NamedTuple):
    """What a plan says about memory: parameter counts, bytes per rank by ZeRO stage, bytes of a checkpoint."""

    parameters: int
    trainable: int
    by_stage: tuple[tuple[str, Bytes], ...]
    chosen: str
    checkpoint: int


def padded_vocabulary(size: int) -> int:
    """The vocabulary rounded up to a multiple of 8, which tensor cores like."""
    return (size + 7) // 8 * 8


def full_config(recipe: Recipe) -> dict[str, Any] | None:
    """The model's config with every default, or None where it cannot be known without transformers."""
    config = complete(recipe.model.config)
    if config is None or recipe.model.pretrained:
        return None
    tokenizer = recipe.data.tokenizer
    if isinstance(tokenizer, TokenizerTraining) and "vocab_size" not in (recipe.model.config or {}):
        config["vocab_size"] = padded_vocabulary(tokenizer.vocab_size)
    return config


def count_parameters(config: dict[str, Any], task: str) -> int:
    """Parameters of a BERT or Llama model with the head of `task`; tied weights count once."""
    return _bert(config, task) if config["model_type"] == "bert" else _llama(config, task)


def _bert(c: dict[str, Any], task: str) -> int:
    h, i, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    embeddings = (vocab + c["max_position_embeddings"] + c["type_vocab_size"] + 2) * h
    layer = 4 * (h * h + h) + (h * i + i) + (i * h + h) + 4 * h
    pooler = h * h + h
    words = h * h + h + 2 * h + vocab + (0 if c.get("tie_word_embeddings", True) else vocab * h + vocab)
    labels = c.get("num_labels", 2)
    heads = {
        "pretraining": pooler + words + 2 * h + 2,
        "masked-lm": words,
        "causal-lm": words,
        "sequence-classification": pooler + labels * h + labels,
    }
    total: int = embeddings + c["num_hidden_layers"] * layer + heads[task]
    return total


def _llama(c: dict[str, Any], task: str) -> int:
    h, i, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"] or c["num_attention_heads"]
    width = c["head_dim"] or h // heads
    attention = 2 * h * heads * width + 2 * h * kv * width
    attention += (heads * width + 2 * kv * width + h) if c["attention_bias"] else 0
    mlp = 3 * h * i + ((2 * i + h) if c["mlp_bias"] else 0)
    head = c.get("num_labels", 2) * h if task == "sequence-classification" else vocab * h
    if task != "sequence-classification" and c.get("tie_word_embeddings", False):
        head = 0
    total: int = vocab * h + c["num_hidden_layers"] * (attention + mlp + 2 * h) + h + head
    return total


def estimate(recipe: Recipe, micro_samples: int, ranks: int) -> Memory | None:
    """Bytes per rank of a recipe on `ranks` data-parallel ranks, or None for models not known here."""
    config = full_config(recipe)
    if config is None or (config["model_type"] == "llama" and recipe.model.task in ("pretraining", "masked-lm")):
        return None
    parameters = trainable = count_parameters(config, recipe.model.task)
    if recipe.model.lora:
        adapters = _lora_parameters(recipe.model.lora, config)
        if adapters is None:
            return None
        parameters, trainable = parameters + adapters, adapters
    activations = _activations(recipe, config, micro_samples)
    stages: list[tuple[str, Bytes]] = [("DDP", _plain(recipe, parameters, trainable, activations))]
    for stage in range(4):
        stages.append((f"ZeRO {stage}", _zero(recipe, parameters, trainable, activations, stage, ranks)))
    chosen = f"ZeRO {recipe.zero.stage}" if recipe.zero else "DDP"
    return Memory(parameters, trainable, tuple(stages), chosen, _checkpoint(recipe, trainable))


def _state_bytes(recipe: Recipe) -> int:
    """Bytes of optimizer state a trained parameter."""
    if recipe.optimizer.name == "sgd":
        return 4 if recipe.optimizer.momentum else 0
    return _STATE_BYTES[recipe.optimizer.name]


def _plain(recipe: Recipe, parameters: int, trainable: int, activations: int) -> Bytes:
    """Without DeepSpeed weights stay float32 and lower precision is autocast's."""
    return Bytes(4 * parameters, 4 * trainable, _state_bytes(recipe) * trainable, activations)


def _zero(recipe: Recipe, parameters: int, trainable: int, activations: int, stage: int, ranks: int) -> Bytes:
    width = 4 if recipe.precision == "fp32" else 2
    # DeepSpeed keeps a float32 master copy beside the weights, also in fp32 from stage 1 on.
    master = 0 if stage == 0 and width == 4 else 4
    optimizer = (master + _state_bytes(recipe)) * trainable
    return Bytes(
        weights=-(-width * parameters // (ranks if stage == 3 else 1)),
        gradients=-(-width * trainable // (ranks if stage >= 2 else 1)),
        optimizer=-(-optimizer // (ranks if stage >= 1 else 1)),
        activations=activations,
    )


def _checkpoint(recipe: Recipe, trainable: int) -> int:
    """Bytes of one checkpoint, all ranks together; frozen weights come from where they came from."""
    if recipe.zero is None:
        return (4 + _state_bytes(recipe)) * trainable
    whole = _zero(recipe, trainable, trainable, 0, recipe.zero.stage, 1)
    return whole.weights + whole.optimizer


def _lora_parameters(lora: Lora, c: dict[str, Any]) -> int | None:
    """Parameters of the adapters, or None where a target module is not known here."""
    h, i, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    width = (c.get("head_dim") or h // heads) * heads
    narrow = width // heads * (c.get("num_key_value_heads") or heads)
    llama = {
        "q_proj": (h, width), "k_proj": (h, narrow), "v_proj": (h, narrow), "o_proj": (width, h),
        "gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h),
    }  # fmt: skip
    shapes = llama if c["model_type"] == "llama" else {"query": (h, h), "key": (h, h), "value": (h, h)}
    if not set(lora.target_modules) <= set(shapes):
        return None
    total: int = c["num_hidden_layers"] * sum(lora.r * sum(shapes[name]) for name in set(lora.target_modules))
    return total


def _activations(recipe: Recipe, c: dict[str, Any], micro: int) -> int:
    s, h, layers = recipe.data.sequence_length or 0, c["hidden_size"], c["num_hidden_layers"]
    width = 2 if recipe.precision == "fp32" else 1  # the paper counts 16-bit activations
    scores = 0.0 if recipe.model.attention == "sdpa" else 5.0 * c["num_attention_heads"] * s / h
    a_layer = s * micro * h * (34 + scores) * width
    kept = layers * a_layer if not recipe.engine.memory_optimization else layers * 2 * s * micro * h * width + a_layer
    logits = 0 if recipe.model.task == "sequence-classification" else micro * s * c["vocab_size"] * 8
    return int(kept + logits)
