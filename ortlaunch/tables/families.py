"""Config fields of the model families that ortlaunch counts without transformers.

All fields and defaults of BERT, Llama and some decoders like Llama; of others the sizes alone.

Typo checks, memory estimates and FLOP counts on the control side use them; a test compares them
with transformers. The worker checks other model types against transformers itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Fields of every transformers config (PretrainedConfig).
COMMON_FIELDS = {
    "model_type", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id",
    "id2label", "label2id", "num_labels", "problem_type", "tie_word_embeddings", "use_cache", "dtype", "torch_dtype",
    "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "transformers_version",
    "is_decoder", "add_cross_attention", "is_encoder_decoder", "cross_attention_hidden_size", "name_or_path",
}  # fmt: skip

# Only fields whose type is checked: the rules derive a field's type from its default.
COMMON_DEFAULTS: dict[str, Any] = {
    "num_labels": 2,
    "tie_word_embeddings": True,
    "use_cache": True,
    "is_decoder": False,
    "add_cross_attention": False,
}
# Defaults of transformers' BertConfig, which are BERT-base, uncased.
BERT_DEFAULTS: dict[str, Any] = {
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
LLAMA_DEFAULTS: dict[str, Any] = {
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
FAMILIES = {"bert": BERT_DEFAULTS, "llama": LLAMA_DEFAULTS}


class DecoderTraits(NamedTuple):
    """Parameters of a model type beside those of Llama."""

    norms: int = 0
    """Norms of a layer beside Llama's two."""
    head_norms: bool = False
    """Whether queries and keys of each head have a norm."""
    tied: bool = False
    """Whether the head has the weights of the embeddings by default."""


# Their plans count memory; only transformers knows their other fields.
DECODERS = {
    "llama": DecoderTraits(),
    "mistral": DecoderTraits(),
    "phi3": DecoderTraits(),
    "qwen3": DecoderTraits(head_norms=True),
    "gemma3_text": DecoderTraits(norms=2, head_norms=True, tied=True),
}
SIZE_FIELDS = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"
}  # fmt: skip
_ENCODER = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
_TABLES = ("vocab_size", "max_position_embeddings", "type_vocab_size")
_WHISPER = ("d_model", "encoder_ffn_dim", "encoder_layers", "decoder_layers", "num_mel_bins", "vocab_size",
            "encoder_attention_heads", "max_source_positions", "max_target_positions")  # fmt: skip
# Families whose tensors planning/model_sizes.py counts, with the fields that a config must have.
SIZE_FIELDS_BY_TYPE: dict[str, tuple[str, ...]] = {
    "deberta-v2": (*_ENCODER, "vocab_size", "position_buckets"),
    "distilbert": (
        "dim",
        "hidden_dim",
        "n_heads",
        "n_layers",
        "vocab_size",
        "max_position_embeddings",
    ),
    "electra": (*_ENCODER, *_TABLES, "embedding_size"),
    "gpt2": ("n_embd", "n_head", "n_layer", "n_positions", "vocab_size"),
    "modernbert": (*_ENCODER, "vocab_size"),
    "opt": (
        "hidden_size",
        "ffn_dim",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
        "max_position_embeddings",
    ),
    "roberta": (*_ENCODER, *_TABLES),
    "vit": (*_ENCODER, "image_size", "patch_size"),
    "whisper": _WHISPER,
}
# Names of sizes that a plan reads, with a family's own names.
_FIELD_NAMES_BY_TYPE = {
    "distilbert": {
        "hidden_size": "dim", "intermediate_size": "hidden_dim", "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers", "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    "gpt2": {
        "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer", "positions": "n_positions",
        "hidden_dropout_prob": "resid_pdrop", "attention_probs_dropout_prob": "attn_pdrop",
    },
    "opt": {
        "intermediate_size": "ffn_dim", "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    },
}  # fmt: skip
_DROPOUT_OF_ONE_TENTH = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
# Their defaults in transformers, of families without a table of all fields.
_DROPOUTS = {
    **dict.fromkeys(("distilbert", "electra", "gpt2", "roberta"), _DROPOUT_OF_ONE_TENTH),
    "opt": {"hidden_dropout_prob": 0.1},
}
CONFIG_FIELDS = COMMON_FIELDS | set(BERT_DEFAULTS) | set(LLAMA_DEFAULTS)
# Linear layers that can get a low-rank adapter, by the last part of their name.
LINEAR_LAYERS = {
    "bert": ("query", "key", "value", "dense"),
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def known_fields(model_type: object) -> set[str] | None:
    """Return the field names of a config of this type; None where only transformers knows them."""
    family = FAMILIES.get(str(model_type))
    return None if family is None else COMMON_FIELDS | set(family)


def config_with_family_defaults_or_none(
    model_config: dict[str, Any] | None,
) -> dict[str, Any] | None:
    """Return the config with the family's defaults filled in, or None for other model types.

    Types like Llama have Llama's defaults, but none for their sizes.
    """
    model_type = str((model_config or {}).get("model_type"))
    if model_config is None or model_type not in (*FAMILIES, *DECODERS):
        return None
    if model_type in FAMILIES:
        return {**FAMILIES[model_type], **model_config}
    defaults = {**LLAMA_DEFAULTS, "tie_word_embeddings": DECODERS[model_type].tied}
    return {**defaults, **model_config} if set(model_config) >= SIZE_FIELDS else None


def config_with_planned_size_names_or_none(model_config: dict[str, Any]) -> dict[str, Any] | None:
    """Return a config of a family of `SIZE_FIELDS_BY_TYPE` with the names of sizes that a plan reads.

    None for other model types, or if a size is unknown: nothing is filled in.
    """
    model_type = model_config.get("model_type")
    if model_type not in SIZE_FIELDS_BY_TYPE or not all(
        model_config.get(name) is not None for name in SIZE_FIELDS_BY_TYPE[model_type]
    ):
        return None
    if model_type == "vit":
        # The tokens of an image, with the one of its class.
        positions = int((model_config["image_size"] // model_config["patch_size"]) ** 2 + 1)
        return {**model_config, "vocab_size": 0, "positions": positions}
    if model_type != "whisper":
        own_names = _FIELD_NAMES_BY_TYPE.get(str(model_type), {})
        renamed_sizes = {
            name: model_config[own_name]
            for name, own_name in own_names.items()
            if own_name in model_config
        }
        if model_type == "gpt2":
            renamed_sizes["intermediate_size"] = (
                model_config.get("n_inner") or 4 * model_config["n_embd"]
            )
        # Its embeddings are projected, as those of one published size are.
        if (
            model_type == "opt"
            and model_config.get("word_embed_proj_dim", model_config["hidden_size"])
            != model_config["hidden_size"]
        ):
            return None
        return {**_DROPOUTS.get(str(model_type), {}), **model_config, **renamed_sizes}
    return {
        **model_config,
        "hidden_size": model_config["d_model"],
        "intermediate_size": model_config["encoder_ffn_dim"],
        "num_attention_heads": model_config["encoder_attention_heads"],
        "num_hidden_layers": model_config["encoder_layers"] + model_config["decoder_layers"],
        "positions": model_config["max_source_positions"],
    }
