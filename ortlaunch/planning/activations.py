"""Activations that a layer of BERT or Llama keeps for its backward pass, in bytes a token.

Counted are the tensors that transformers 5 and torch 2.13 save
(tests/worker/model/test_activations.py compares), by the method of Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022), section 4.1.
"""

from __future__ import annotations

from ortlaunch.json_types import Json
from ortlaunch.machine import FUSED_ATTENTION_SCORES
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.families import DECODERS, Decoder

# Bytes that a dropout keeps for each value: torch on a CPU keeps the factor, others a boolean.
_SCALE = 4
_MASK = 1


def layer_bytes(recipe: Recipe, c: Json, length: int, width: int, device: str) -> int:
    """Return the bytes a token that one layer keeps.

    length: tokens of a sequence.
    width: bytes of a value, 4 or 2.
    """
    h = int(c["hidden_size"])
    i = int(c["intermediate_size"])
    heads = int(c["num_attention_heads"])
    attention = _attention(c)
    # Llama: norms with their inputs and outputs; gate, its SiLU, up, their product. BERT: two norms,
    # GELU's input and output.
    plain = ("bert", "deberta-v2", "vit", "whisper")
    numbers = attention + (4 * h + 2 * i if c["model_type"] in plain else 6 * h + 4 * i)
    # Norms of queries and keys, and Gemma's two norms more.
    own = DECODERS.get(c["model_type"], Decoder())
    numbers += attention // 2 * own.head_norms + 2 * h * own.norms
    dropped = 2 * h if c.get("hidden_dropout_prob") else 0
    # Scores grow with the square of the length, so a token's share grows with the length.
    scores = heads * length * _score(recipe, c, length, width, device)
    return width * numbers + _mask(recipe, width, device) * dropped + scores


def kept_beside_recomputation(recipe: Recipe, c: Json, length: int, width: int, device: str) -> int:
    """Return the bytes a token of a layer that stay although its activations are computed again.

    These are the tensors that torch's fused attention saves in a graph of ONNX Runtime, which
    recomputes only its own operators.
    """
    if recipe.engine.name != "ort" or not _fused(recipe, c, length, device):
        return 0
    return width * _attention(c)


def _attention(c: Json) -> int:
    """Return the number of values a token of queries, keys, values and the output of attention."""
    heads = int(c["num_attention_heads"])
    return 4 * heads * int(c.get("head_dim") or int(c["hidden_size"]) // heads)


def _mask(recipe: Recipe, width: int, device: str) -> int:
    """Return the bytes that a dropout keeps for each value."""
    return width if device == "cpu" and recipe.engine.name != "ort" else _MASK


def _score(recipe: Recipe, c: Json, length: int, width: int, device: str) -> int:
    """Return the bytes for each attention score; 0 in a fused kernel.

    Kept are the softmax and, with dropout, its mask and its output.
    """
    dropped = _drops(c)
    if c["model_type"] == "deberta-v2":
        # No fused kernel: scores of contents and of positions are summed step by step. Measured.
        return 4 * width
    if not _fused(recipe, c, length, device):
        return width + (width + _mask(recipe, width, device) if dropped else 0)
    # torch's fused kernels for CPUs have no dropout: with it, scores are computed in float32.
    return 3 * _SCALE if dropped and device == "cpu" else 0


def _drops(c: Json) -> bool:
    return bool(c.get("attention_probs_dropout_prob") or c.get("attention_dropout"))


def _fused(recipe: Recipe, c: Json, length: int, device: str) -> bool:
    """Return whether torch's scaled_dot_product_attention computes the scores.

    Engine ort writes short ones out in its graph, and on a CPU those with dropout.
    """
    engine = recipe.engine
    asked = recipe.model.attention
    written_out = asked == "eager" or (
        asked == "auto" and (engine.efficient_attention or engine.flash_attention)
    )
    if written_out or engine.name != "ort":
        return not written_out
    if engine.torch_operators != "auto" or (_drops(c) and device == "cpu"):
        return False
    return length * length >= FUSED_ATTENTION_SCORES
