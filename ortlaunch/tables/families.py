"""The table of model families that ortlaunch counts without transformers, by model type.

Typo checks, memory estimates and FLOP counts on the control side use it; a test compares it with
transformers. The worker checks other model types against transformers itself. Code reads a property
of the row, not the family's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, cast

# Fields of every transformers config (PretrainedConfig).
COMMON_FIELDS = {
    "model_type", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id",
    "id2label", "label2id", "num_labels", "problem_type", "tie_word_embeddings", "use_cache", "dtype", "torch_dtype",
    "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "transformers_version",
    "is_decoder", "add_cross_attention", "is_encoder_decoder", "cross_attention_hidden_size", "name_or_path",
}  # fmt: skip

# Only fields whose type is checked: the rules derive a field's type from its default.
COMMON_DEFAULTS: dict[str, object] = {
    "num_labels": 2,
    "tie_word_embeddings": True,
    "use_cache": True,
    "is_decoder": False,
    "add_cross_attention": False,
}
# Defaults of transformers' BertConfig, which are BERT-base, uncased.
BERT_DEFAULTS: dict[str, object] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
    "classifier_dropout": None,
}
# Defaults of transformers' LlamaConfig, which are Llama 1 with 7 billion parameters.
LLAMA_DEFAULTS: dict[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "intermediate_size": 11008,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "pretraining_tp": 1,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "head_dim": None,
}
_SIZE_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"),
)
_TABLES = ("max_position_embeddings", "type_vocab_size")


class PlannedConfig(TypedDict, total=False):
    """The fields of a config that a plan reads, by transformers' usual names."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    head_dim: int | None
    vocab_size: int
    embedding_rows: int
    """Rows of the embeddings and of the output layer, where tensor parallelism slices them; absent:
    all."""
    type_vocab_size: int
    max_position_embeddings: int
    positions: int
    """Tokens of an image or of audio, and of families whose positions have a name of their own."""
    position_buckets: int
    embedding_size: int
    patch_size: int
    num_mel_bins: int
    max_target_positions: int
    encoder_layers: int
    decoder_layers: int
    relative_attention_num_buckets: int
    feed_forward_proj: str
    num_labels: int
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    hidden_dropout_prob: float
    attention_probs_dropout_prob: float
    attention_dropout: float


@dataclass(frozen=True)
class Family:
    """One row of the table."""

    shape: str
    """`module:function` that counts the tensors of a model."""
    layer_names: tuple[str, ...]
    """The linear layers of a layer, by the last part of their name, in the order of `shape`."""
    size_fields: tuple[str, ...] = _SIZE_FIELDS
    """Fields that a config must have for a plan."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the fields beside sizes that a plan reads, under the plan's names."""
    has_all_fields: bool = False
    """Whether `defaults` has all fields, with sizes: others are typos, and adapters have no other
    linear layers. Tests compare the family on engine ort with plain PyTorch in many forms."""
    own_names: Mapping[str, str] = field(default_factory=dict)
    """Names of fields that a plan reads -> the family's own."""
    more_sizes: Callable[[Mapping[str, Any]], Mapping[str, Any] | None] = lambda config: {}
    """Sizes that a plan reads and that follow from others; None: they cannot be counted."""
    sees_later_tokens: bool | None = None
    """Whether attention sees the tokens behind a token; None: the model's input is no text."""
    is_gated: bool = False
    """Whether a layer multiplies its inner values by a gate."""
    has_llama_layers: bool = False
    """Whether the layers are Llama's, with RMSNorm and rotary positions: many nodes in a graph."""
    extra_norms: int = 0
    """Norms of a layer beside two."""
    has_head_norms: bool = False
    """Whether queries and keys of each head have a norm."""
    inner_tensors: int = 2
    """Tensors of the inner width that a layer without a gate keeps for the backward pass."""
    inner_tensors_on_ort: int = 2
    """The same on engine ort."""
    tasks: tuple[str, ...] = ()
    """The only tasks whose head is counted; (): all that it can predict."""
    writes_text: bool = False
    """Whether a decoder reads the encoder's text and writes another."""
    score_tensors: int = 0
    """Tensors of attention scores that are kept whatever the kernel; 0: those of the kernel."""

    def can_predict(self, tokens: str) -> bool:
        """Return whether a model of the family predicts `masked` or `next` tokens; "": no tokens."""
        if tokens == "masked":
            return self.sees_later_tokens is True
        return not tokens or self.sees_later_tokens is not None


def _image_sizes(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # The tokens of an image, with the one of its class.
    positions = int((config["image_size"] // config["patch_size"]) ** 2 + 1)
    return {"vocab_size": 0, "positions": positions}


def _unprojected_sizes_or_none(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    # OPT's embeddings are projected in one published size.
    width = config["hidden_size"]
    return {} if config.get("word_embed_proj_dim", width) == width else None


def _t5_layer_counts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    decoder_layers = config.get("num_decoder_layers") or config["num_layers"]
    return {
        "decoder_layers": decoder_layers,
        "num_hidden_layers": config["num_layers"] + decoder_layers,
    }


_MODULE = "ortlaunch.planning.model_sizes"
_QKV = ("q_proj", "k_proj", "v_proj")
_DROPOUTS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_BERT = Family(
    f"{_MODULE}:bert_shape",
    ("query", "key", "value", "dense", "dense", "dense"),
    defaults=BERT_DEFAULTS,
    has_all_fields=True,
    sees_later_tokens=True,
)
_ROBERTA = Family(
    f"{_MODULE}:roberta_shape",
    _BERT.layer_names,
    (*_SIZE_FIELDS, *_TABLES),
    _DROPOUTS,
    sees_later_tokens=True,
)
_LLAMA = Family(
    f"{_MODULE}:llama_shape",
    (*_QKV, "o_proj", "gate_proj", "up_proj", "down_proj"),
    defaults=LLAMA_DEFAULTS,
    has_all_fields=True,
    sees_later_tokens=False,
    is_gated=True,
    has_llama_layers=True,
)


def _like_llama(own_defaults: Mapping[str, Any], **other_columns: Any) -> Family:
    """Return a decoder like Llama, of which only transformers knows the other fields.

    Args:
        own_defaults: the defaults of its config class that differ from Llama's and count in a plan.
        other_columns: columns of the table that differ from Llama's row.
    """
    defaults = {**LLAMA_DEFAULTS, "tie_word_embeddings": False, **own_defaults}
    return replace(_LLAMA, defaults=defaults, has_all_fields=False, **other_columns)


FAMILIES = {
    "bert": _BERT,
    "llama": _LLAMA,
    "mistral": _like_llama({"num_key_value_heads": 8, "max_position_embeddings": 131072}),
    "phi3": _like_llama(
        {"max_position_embeddings": 4096},
        layer_names=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    ),
    "qwen3": _like_llama(
        {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        has_head_norms=True,
    ),
    "gemma3_text": _like_llama(
        {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        extra_norms=2,
        has_head_norms=True,
    ),
    "deberta-v2": Family(
        f"{_MODULE}:deberta_shape",
        ("query_proj", "key_proj", "value_proj", "dense", "dense", "dense"),
        (*_SIZE_FIELDS, "position_buckets"),
        sees_later_tokens=True,
        # No fused kernel: scores of contents and of positions are summed step by step. Measured.
        score_tensors=4,
    ),
    "distilbert": Family(
        f"{_MODULE}:distilbert_shape",
        ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"),
        ("dim", "hidden_dim", "n_heads", "n_layers", "vocab_size", "max_position_embeddings"),
        _DROPOUTS,
        own_names={
            "hidden_size": "dim",
            "intermediate_size": "hidden_dim",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        sees_later_tokens=True,
    ),
    # Its embeddings may be narrower than its layers.
    "electra": replace(_ROBERTA, size_fields=(*_SIZE_FIELDS, *_TABLES, "embedding_size")),
    "gpt2": Family(
        f"{_MODULE}:gpt2_shape",
        ("c_attn", "c_proj", "c_fc", "c_proj"),
        ("n_embd", "n_head", "n_layer", "n_positions", "vocab_size"),
        _DROPOUTS,
        own_names={
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "positions": "n_positions",
            "hidden_dropout_prob": "resid_pdrop",
            "attention_probs_dropout_prob": "attn_pdrop",
        },
        more_sizes=lambda config: {
            "intermediate_size": config.get("n_inner") or 4 * config["n_embd"]
        },
        sees_later_tokens=False,
        # Its GELU is a formula of tensors in PyTorch.
        inner_tensors=5,
    ),
    "modernbert": Family(
        f"{_MODULE}:modernbert_shape",
        ("Wqkv", "Wo", "Wi", "Wo"),
        sees_later_tokens=True,
        is_gated=True,
    ),
    "opt": Family(
        f"{_MODULE}:opt_shape",
        (*_QKV, "out_proj", "fc1", "fc2"),
        (
            *("hidden_size", "ffn_dim", "num_attention_heads", "num_hidden_layers"),
            *("vocab_size", "max_position_embeddings"),
        ),
        {"hidden_dropout_prob": 0.1},
        own_names={
            "intermediate_size": "ffn_dim",
            "hidden_dropout_prob": "dropout",
            "attention_probs_dropout_prob": "attention_dropout",
        },
        more_sizes=_unprojected_sizes_or_none,
        sees_later_tokens=False,
        # ReLU keeps its output alone.
        inner_tensors=1,
        inner_tensors_on_ort=1,
    ),
    "roberta": _ROBERTA,
    "vit": Family(
        f"{_MODULE}:vit_shape",
        (*_QKV, "o_proj", "fc1", "fc2"),
        (*_SIZE_FIELDS[:-1], "image_size", "patch_size"),
        more_sizes=_image_sizes,
    ),
    "whisper": Family(
        f"{_MODULE}:whisper_shape",
        (*_QKV, "out_proj", "fc1", "fc2"),
        (
            *("d_model", "encoder_ffn_dim", "encoder_layers", "decoder_layers", "num_mel_bins"),
            *("vocab_size", "encoder_attention_heads", "max_source_positions"),
            "max_target_positions",
        ),
        own_names={
            "hidden_size": "d_model",
            "intermediate_size": "encoder_ffn_dim",
            "num_attention_heads": "encoder_attention_heads",
            "positions": "max_source_positions",
        },
        more_sizes=lambda config: {
            "num_hidden_layers": config["encoder_layers"] + config["decoder_layers"]
        },
    ),
    "t5": Family(
        f"{_MODULE}:t5_shape",
        ("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"),
        ("d_model", "d_kv", "d_ff", "num_layers", "num_heads", "vocab_size"),
        {
            "hidden_dropout_prob": 0.1,
            "relative_attention_num_buckets": 32,
            "feed_forward_proj": "relu",
        },
        own_names={
            "hidden_size": "d_model",
            "intermediate_size": "d_ff",
            "num_attention_heads": "num_heads",
            "head_dim": "d_kv",
            "encoder_layers": "num_layers",
            "hidden_dropout_prob": "dropout_rate",
        },
        more_sizes=_t5_layer_counts,
        tasks=("seq2seq", "span-corruption"),
        writes_text=True,
    ),
}
CONFIG_FIELDS = COMMON_FIELDS | set(BERT_DEFAULTS) | set(LLAMA_DEFAULTS)


def family_with_all_fields_or_none(model_type: object) -> Family | None:
    """Return the row of a model type whose config fields are all known here."""
    family = FAMILIES.get(str(model_type))
    return family if family is not None and family.has_all_fields else None


def planned_config_or_none(model_config: Mapping[str, Any] | None) -> PlannedConfig | None:
    """Return a config with the names of sizes that a plan reads, and with its family's defaults.

    None for other model types, or if a size is unknown: only families whose fields are all known
    have defaults of sizes.
    """
    config = model_config or {}
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not (
        family.has_all_fields or all(config.get(name) is not None for name in family.size_fields)
    ):
        return None
    renamed_fields = {
        name: config[own_name] for name, own_name in family.own_names.items() if own_name in config
    }
    more_sizes = family.more_sizes(config)
    if more_sizes is None:
        return None
    return cast(PlannedConfig, {**family.defaults, **config, **renamed_fields, **more_sizes})
