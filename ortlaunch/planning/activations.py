"""Activations of a rank at the peak: those that layers keep for the backward pass, and the logits.

Counted for a layer of BERT or Llama are the tensors that transformers 5 and torch 2.13 save
(tests/worker/model/test_activations.py compares), by the method of Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022), section 4.1.
"""

from __future__ import annotations

from ortlaunch.json_types import Json
from ortlaunch.machine import FUSED_ATTENTION_SCORES
from ortlaunch.planning.loss_chunks import chunked
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.families import DECODERS, Decoder

# Bytes that a dropout keeps for each value: torch on a CPU keeps the factor, others a boolean.
_SCALE = 4
_MASK = 1


def activation_bytes(recipe: Recipe, c: Json, micro: int, width: int, device: str) -> int:
    """Return the bytes of the activations of a rank that exist at the peak.

    Args:
        recipe: the recipe.
        c: the model's full config.
        micro: samples of a micro batch.
        width: bytes of a value, 4 or 2.
        device: cpu or cuda.
    """
    length = sample_tokens(recipe, c)
    layers = int(c["num_hidden_layers"])
    tokens = micro * length
    a_layer = tokens * _layer_bytes(recipe, c, length, width, device)
    logits = _logits(recipe, c, tokens, device)
    if recipe.model.gradient_checkpointing or recipe.engine.memory_optimization:
        # The inputs of all layers are kept. Beside them are either the logits or one recomputed
        # layer, but on a CPU both count: the heap keeps the blocks of one during the other.
        beside = a_layer + logits if device == "cpu" else max(a_layer, logits)
        kept = int(c["hidden_size"]) * width
        kept += _kept_beside_recomputation(recipe, c, length, width, device)
        return layers * tokens * kept + beside
    return layers * a_layer + logits


def sample_tokens(recipe: Recipe, c: Json) -> int:
    """Return the number of tokens of a sample; for images and audio the model's config has it."""
    return recipe.data.sequence_length or int(c.get("positions", 0))


def _logits(recipe: Recipe, c: Json, tokens: int, device: str) -> int:
    """Return the bytes of the logits and of the loss's other tensors."""
    if recipe.model.traits.label:
        return 0
    vocabulary = int(c["vocab_size"])
    chunk = chunked(recipe, tokens, vocabulary, device)
    # Four float32 tensors: the logits, their log-softmax, and the gradients of both. Measured on a
    # CPU with BERT and Llama, in fp32 and bf16.
    if not chunk:
        return 16 * tokens * vocabulary
    # The loss computes the gradient of the head during the forward pass and keeps it for the
    # backward pass. A logit takes 4 bytes in fp32, and 10 in a 16-bit precision, where it exists in
    # 16 bits, too.
    gradient_of_head = 0 if recipe.model.lora else 4 * vocabulary * int(c["hidden_size"])
    per_logit = 10 if recipe.format.is_narrow else 4
    return per_logit * min(chunk, tokens) * vocabulary + gradient_of_head


def _layer_bytes(recipe: Recipe, c: Json, length: int, width: int, device: str) -> int:
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
    # Tensors of the inner width: ReLU keeps its output alone, GPT-2's GELU is a formula of tensors
    # in PyTorch.
    inner = {"gpt2": 2 if recipe.engine.name == "ort" else 5, "opt": 1}.get(c["model_type"], 2)
    gated = c["model_type"] in (*DECODERS, "modernbert")
    numbers = attention + (6 * h + 4 * i if gated else 4 * h + inner * i)
    # Norms of queries and keys, and Gemma's two norms more.
    own = DECODERS.get(c["model_type"], Decoder())
    numbers += attention // 2 * own.head_norms + 2 * h * own.norms
    dropped = 2 * h if c.get("hidden_dropout_prob") else 0
    # Scores grow with the square of the length, so a token's share grows with the length.
    scores = heads * length * _score(recipe, c, length, width, device)
    return width * numbers + _mask(recipe, width, device) * dropped + scores


def _kept_beside_recomputation(
    recipe: Recipe, c: Json, length: int, width: int, device: str
) -> int:
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
