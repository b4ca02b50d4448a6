"""Activations of a rank at the peak: those that layers keep for the backward pass, and the logits.

Counted for a layer of BERT or Llama are the tensors that transformers 5 and torch 2.13 save
(tests/worker/model/test_activations.py compares), by the method of Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models" (2022), section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ortlaunch.base.machine import FUSED_ATTENTION_SCORES
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.compared_texts import Reranker
from ortlaunch.recipe.fields.data import Corpus, SpanCorruption
from ortlaunch.recipe.rules.document_mask import (
    LONGEST_MASKED_SAMPLE,
    document_mask_reason_or_empty,
)
from ortlaunch.recipe.rules.loss_chunks import loss_chunk_rows_if_recipe_allows
from ortlaunch.tables.families import FAMILIES, PlannedConfig

# Bytes that a dropout keeps for each value: torch on a CPU keeps the factor, others a boolean.
_FLOAT32_BYTES = 4
# Cosines, scores without copies of right documents, their log-softmax, and the gradients. Measured.
_BYTES_PER_TEXT_SCORE = 16
_MASK_BYTES = 1


def peak_activation_bytes_of_rank(
    recipe: Recipe, model_config: PlannedConfig, micro_samples: int, value_bytes: int, device: str
) -> int:
    """Return the bytes of the activations of a rank that exist at the peak.

    Args:
        recipe: the recipe.
        model_config: the model's full config.
        micro_samples: samples of a micro batch.
        value_bytes: bytes of a value, 4 or 2.
        device: cpu or cuda.
    """
    if FAMILIES[model_config["model_type"]].writes_text:
        return _peak_activation_bytes_of_t5(recipe, model_config, micro_samples, value_bytes)
    sample_token_count = sample_tokens(recipe, model_config)
    layer_count = int(model_config["num_hidden_layers"])
    token_count = sample_token_count * _sequences_at_once(recipe, micro_samples)
    bytes_of_layer = token_count * _activation_bytes_per_layer_and_token(
        recipe, model_config, sample_token_count, value_bytes, device
    )
    bytes_of_logits = _logits_and_loss_bytes(recipe, model_config, token_count, device)
    bytes_of_logits += _text_score_bytes(recipe, micro_samples)
    mask_bytes = _document_mask_bytes(recipe, model_config, token_count, value_bytes)
    if recipe.model.gradient_checkpointing or recipe.engine.memory_optimization:
        # The inputs of all layers are kept. Beside them are either the logits or one recomputed
        # layer, but on a CPU both count: the heap keeps the blocks of one during the other.
        other_bytes = (
            bytes_of_layer + bytes_of_logits
            if device == "cpu"
            else max(bytes_of_layer, bytes_of_logits)
        )
        kept_per_token = int(model_config["hidden_size"]) * value_bytes
        kept_per_token += _attention_bytes_kept_at_recomputation(
            recipe, model_config, sample_token_count, value_bytes, device
        )
        return layer_count * token_count * kept_per_token + other_bytes + mask_bytes
    return layer_count * bytes_of_layer + bytes_of_logits + mask_bytes


def _peak_activation_bytes_of_t5(
    recipe: Recipe, model_config: PlannedConfig, micro_samples: int, value_bytes: int
) -> int:
    """Return the bytes of the activations of T5, whose layers keep their scores.

    Its position bias has a gradient, for which torch has no fused kernel of self-attention.
    """
    width, head_count = model_config["hidden_size"], model_config["num_attention_heads"]
    attention_width = head_count * (model_config["head_dim"] or 0)
    read_tokens = sample_tokens(recipe, model_config)
    written_tokens = _tokens_to_write(recipe)
    has_dropout = bool(model_config["hidden_dropout_prob"])
    # Without dropout the softmax is kept; with it the mask and the output, too.
    score_values = head_count * (1 + 2 * has_dropout)
    is_gated = model_config["feed_forward_proj"].startswith("gated")
    inner_tensor_count = 1 + 6 * is_gated + has_dropout * (2 - is_gated)
    inner_values = model_config["intermediate_size"] * inner_tensor_count
    # Each norm keeps three tensors, each dropout of a sum one.
    values_of_block = 3 * width + has_dropout * width
    encoder_values = 2 * values_of_block + 4 * attention_width + inner_values
    encoder_values += score_values * read_tokens
    decoder_values = 3 * values_of_block + 6 * attention_width + inner_values
    decoder_values += score_values * written_tokens
    # Attention to what was read has a kernel, if without dropout.
    decoder_values += has_dropout * score_values * read_tokens
    encoder_layer = value_bytes * micro_samples * read_tokens * encoder_values
    decoder_layer = (
        value_bytes
        * micro_samples
        * (written_tokens * decoder_values + 2 * read_tokens * attention_width)
    )
    logits_bytes = 16 * micro_samples * written_tokens * model_config["vocab_size"]
    encoder_layers, decoder_layers = model_config["encoder_layers"], model_config["decoder_layers"]
    if recipe.model.gradient_checkpointing or recipe.engine.memory_optimization:
        kept_tokens = encoder_layers * read_tokens + decoder_layers * written_tokens
        kept_bytes = value_bytes * micro_samples * kept_tokens * width
        return kept_bytes + max(encoder_layer, decoder_layer) + logits_bytes
    return encoder_layers * encoder_layer + decoder_layers * decoder_layer + logits_bytes


def _tokens_to_write(recipe: Recipe) -> int:
    """Return the tokens that the decoder writes for a sample."""
    if not recipe.model.traits.leaves_spans_out:
        return recipe.data.target_length
    spans = recipe.data.span_corruption or SpanCorruption()
    # For each token of the text; see worker/data/masked/span_corruption.py.
    marks = spans.noise_density / spans.mean_span_length
    read_share = 1 - spans.noise_density + marks
    return (
        round((recipe.data.sequence_length or 0) / read_share * (spans.noise_density + marks)) + 1
    )


def _sequences_at_once(recipe: Recipe, micro_samples: int) -> int:
    """Return the sequences of a pass: samples, or the texts of samples that have several."""
    settings = recipe.model.text_comparison
    source = recipe.data.parts[0].source
    if recipe.model.traits.label == "choice" and isinstance(source, Corpus):
        # One column may hold a list, of which SWAG's has four.
        return micro_samples * max(
            len(source.choice_columns), 4 * (len(source.choice_columns) == 1)
        )
    if settings is None:
        return micro_samples
    # A column may hold a list of texts, which only the data show.
    text_count = len(source.text_columns) if isinstance(source, Corpus) else 3
    sequence_count = micro_samples * max(1, text_count - isinstance(settings, Reranker))
    mini_batch = getattr(settings, "mini_batch", None)
    return min(mini_batch or sequence_count, sequence_count)


def _text_score_bytes(recipe: Recipe, micro_samples: int) -> int:
    """Return the bytes of scores between the samples of a step, which some losses of texts compute."""
    settings = recipe.model.text_comparison
    if settings is None or not settings.traits.is_over_batch:
        return 0
    source = recipe.data.parts[0].source
    document_count = len(source.text_columns) - 1 if isinstance(source, Corpus) else 2
    all_samples = recipe.batch.global_size or micro_samples
    rows = min(getattr(settings, "mini_batch", None) or micro_samples, micro_samples)
    return _BYTES_PER_TEXT_SCORE * rows * all_samples * max(document_count, 1)


def sample_tokens(recipe: Recipe, config: PlannedConfig) -> int:
    """Return the number of tokens of a sample; for images and audio the model's config has it."""
    return recipe.data.sequence_length or int(config.get("positions", 0))


def _document_mask_bytes(
    recipe: Recipe, model_config: PlannedConfig, token_count: int, value_bytes: int
) -> int:
    """Return the bytes of the masks that keep packed documents apart, one for each type of layer."""
    length = sample_tokens(recipe, model_config)
    is_auto = recipe.engine.name == "auto" and length <= LONGEST_MASKED_SAMPLE
    may_be_ort = is_auto and recipe.data.separates_documents
    if not may_be_ort and not document_mask_reason_or_empty(recipe):
        return 0
    layer_types = cast(Sequence[str], model_config.get("layer_types") or ("full_attention",))
    mask_count = len({*layer_types})
    return mask_count * token_count * length * value_bytes


def _logits_and_loss_bytes(
    recipe: Recipe, model_config: PlannedConfig, token_count: int, device: str
) -> int:
    """Return the bytes of the logits and of the loss's other tensors."""
    if recipe.model.traits.label or recipe.model.traits.compares:
        return 0
    vocabulary_size = int(model_config["vocab_size"])
    rows_per_chunk = loss_chunk_rows_if_recipe_allows(recipe, token_count, vocabulary_size, device)
    # Four float32 tensors: the logits, their log-softmax, and the gradients of both. Measured on a
    # CPU with BERT and Llama, in fp32 and bf16.
    if not rows_per_chunk:
        return 16 * token_count * vocabulary_size
    # The loss computes the gradient of the head during the forward pass and keeps it for the
    # backward pass. A logit takes 4 bytes in fp32, and 10 in a 16-bit precision, where it exists in
    # 16 bits, too.
    head_gradient_bytes = (
        0 if recipe.model.lora else 4 * vocabulary_size * int(model_config["hidden_size"])
    )
    bytes_per_logit = 10 if recipe.format.is_narrow else 4
    return (
        bytes_per_logit * min(rows_per_chunk, token_count) * vocabulary_size + head_gradient_bytes
    )


def _activation_bytes_per_layer_and_token(
    recipe: Recipe, model_config: PlannedConfig, sequence_tokens: int, value_bytes: int, device: str
) -> int:
    """Return the bytes a token that one layer keeps.

    sequence_tokens: tokens of a sequence.
    value_bytes: bytes of a value, 4 or 2.
    """
    hidden_size = int(model_config["hidden_size"])
    inner_size = int(model_config["intermediate_size"])
    head_count = int(model_config["num_attention_heads"])
    attention_values = _attention_values_per_token(model_config)
    family = FAMILIES[model_config["model_type"]]
    is_on_ort = recipe.engine.name == "ort"
    inner_tensor_count = family.inner_tensors_on_ort if is_on_ort else family.inner_tensors
    # Llama: norms with their inputs and outputs; gate, its SiLU, up, their product. BERT: two norms,
    # GELU's input and output.
    value_count = attention_values + (
        6 * hidden_size + 4 * inner_size
        if family.is_gated
        else 4 * hidden_size + inner_tensor_count * inner_size
    )
    # Norms of queries and keys, and Gemma's two norms more.
    value_count += (
        attention_values // 2 * family.has_head_norms + 2 * hidden_size * family.extra_norms
    )
    dropped_values = 2 * hidden_size if model_config.get("hidden_dropout_prob") else 0
    # Scores grow with the square of the length, so a token's share grows with the length.
    score_bytes = (
        head_count
        * sequence_tokens
        * _kept_bytes_per_attention_score(
            recipe, model_config, sequence_tokens, value_bytes, device
        )
    )
    return (
        value_bytes * value_count
        + _dropout_mask_bytes(recipe, value_bytes, device) * dropped_values
        + score_bytes
    )


def _attention_bytes_kept_at_recomputation(
    recipe: Recipe, model_config: PlannedConfig, sequence_tokens: int, value_bytes: int, device: str
) -> int:
    """Return the bytes a token of a layer that stay although its activations are computed again.

    These are the tensors that torch's fused attention saves in a graph of ONNX Runtime, which
    recomputes only its own operators.
    """
    if recipe.engine.name != "ort" or not _uses_fused_attention(
        recipe, model_config, sequence_tokens, device
    ):
        return 0
    return value_bytes * _attention_values_per_token(model_config)


def _attention_values_per_token(config: PlannedConfig) -> int:
    """Return the number of values a token of queries, keys, values and the output of attention."""
    head_count = int(config["num_attention_heads"])
    return 4 * head_count * int(config.get("head_dim") or int(config["hidden_size"]) // head_count)


def _dropout_mask_bytes(recipe: Recipe, value_bytes: int, device: str) -> int:
    """Return the bytes that a dropout keeps for each value."""
    return value_bytes if device == "cpu" and recipe.engine.name != "ort" else _MASK_BYTES


def _kept_bytes_per_attention_score(
    recipe: Recipe, model_config: PlannedConfig, sequence_tokens: int, value_bytes: int, device: str
) -> int:
    """Return the bytes for each attention score; 0 in a fused kernel.

    Kept are the softmax and, with dropout, its mask and its output.
    """
    has_dropout = _has_attention_dropout(model_config)
    if score_tensors := FAMILIES[model_config["model_type"]].score_tensors:
        return score_tensors * value_bytes
    if not _uses_fused_attention(recipe, model_config, sequence_tokens, device):
        return value_bytes + (
            value_bytes + _dropout_mask_bytes(recipe, value_bytes, device) if has_dropout else 0
        )
    # torch's fused kernels for CPUs have no dropout: with it, scores are computed in float32.
    return 3 * _FLOAT32_BYTES if has_dropout and device == "cpu" else 0


def _has_attention_dropout(config: PlannedConfig) -> bool:
    return bool(config.get("attention_probs_dropout_prob") or config.get("attention_dropout"))


def _uses_fused_attention(
    recipe: Recipe, model_config: PlannedConfig, sequence_tokens: int, device: str
) -> bool:
    """Return whether torch's scaled_dot_product_attention computes the scores.

    Engine ort writes short ones out in its graph, and on a CPU those with dropout.
    """
    engine = recipe.engine
    requested_attention = recipe.model.attention
    is_written_out = requested_attention == "eager"
    if is_written_out or engine.name != "ort":
        return not is_written_out
    if engine.torch_operators != "auto" or (
        _has_attention_dropout(model_config) and device == "cpu"
    ):
        return False
    return sequence_tokens * sequence_tokens >= FUSED_ATTENTION_SCORES
