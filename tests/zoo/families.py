"""Families of transformers at toy size, by task.

Each case is a model with random weights and a batch for it (toys.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.zoo import toys

_TASKS = {
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
}
# Names that configs use for sizes, with the value at toy size.
_SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32,
    "embedding_size": 32, "emb_dim": 32, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2,
    "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4,
    "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "n_inner": 64, "ffn_dim": 64, "hidden_dim": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "d_ff": 64, "d_kv": 8, "head_dim": 8, "max_position_embeddings": 64, "n_positions": 64,
    "n_ctx": 64, "image_size": 32, "patch_size": 8, "num_channels": 3,
    "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_routed_experts": 4, "num_labels": 3,
    "attn_implementation": "sdpa", "max_source_positions": 24, "max_target_positions": 24,
    "num_mel_bins": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "use_cache": False, "apply_spec_augment": False, "chunk_size": 8,
    "mamba_chunk_size": 8, "entity_vocab_size": 50, "entity_emb_size": 8,
}  # fmt: skip
# More names, of single kinds of models; a second attempt leaves them out.
_MORE: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "index_topk": 8, "index_head_dim": 16,
    "index_n_heads": 32, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "laurel_rank": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99, "num_kv_shared_layers": 0,
    "projection_dim": 32, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "ssm_state_size": 8, "mamba_num_heads": 8,
    "mamba_head_dim": 8, "n_groups": 1, "sliding_window": 8, "output_dim": 32,
    "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "num_decoder_layers": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "intermediate_size_mlp": 64,
    "vision_use_head": True, "num_conv_pos_embeddings": 16,
}  # fmt: skip
# Sizes that some configs derive from others or define differently: left out one set after the other.
_LEFT_OUT: tuple[tuple[str, ...], ...] = (
    (),
    ("head_dim",),
    ("head_dim", "num_key_value_heads"),
    ("head_dim", "num_key_value_heads", "num_hidden_layers", "num_heads", "n_heads"),
)
# Parameters; more of them show that the toy sizes did not reach the config.
_BIG = 60_000_000


def cases(task: str) -> dict[str, Callable[[], Any]]:
    """Return the cases by family name; a family with several classes for a task gives the first."""
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, _TASKS[task])
    return {
        family: lambda f=family, k=kind: made(task, f, k if isinstance(k, str) else k[0])
        for family, kind in names.items()
    }


def made(task: str, family: str, kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return model and batch of the first set of sizes that trains in eager PyTorch.

    Raises:
        Exception: no set trains; the error of the first set.
    """
    if family in toys.UNTRAINED:
        raise ValueError(toys.UNTRAINED[family])
    errors: list[Exception] = []
    for sizes in _tried_sizes():
        try:
            model, batch = _sized(task, family, kind, sizes)
            # Only a step in eager shows whether these sizes fit together.
            model(**batch).backward()
            model.zero_grad()
            return model, batch
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _tried_sizes() -> Iterator[dict[str, Any]]:
    for known in ({**_SIZES, **_MORE}, _SIZES):
        for left_out in _LEFT_OUT:
            yield {name: size for name, size in known.items() if name not in left_out}


def _sized(
    task: str, family: str, kind: str, sizes: dict[str, Any]
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers

    made_by = getattr(transformers, kind)
    config = _config(
        made_by.config_class or type(transformers.AutoConfig.for_model(family)), family, sizes
    )
    config.num_labels = 3
    if hasattr(config, "problem_type"):
        config.problem_type = None
    if task == "causal-lm" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    # Every case starts from the same weights, also when it runs alone.
    torch.manual_seed(0)
    # Count parameters without memory: a config of full size might not fit.
    with torch.device("meta"):
        size = sum(weight.numel() for weight in made_by(config).parameters())
    if size > _BIG:
        raise ValueError(f"{size:,} parameters: the toy sizes are not this config's")
    model = made_by(config)
    # A router of zeros would choose among equal scores, which each engine may do differently.
    for weight in model.parameters():
        if weight.dim() > 1 and not weight.any():
            nn.init.normal_(weight, std=0.02)
    return Loss(model), toys.batch(task, family, config, model)


def _config(kind: Any, family: str, sizes: dict[str, Any]) -> Any:
    """Return a config of toy size without random operations."""
    plain = kind(**toys.NEEDED.get(family, {}))
    known = _known(plain, sizes)
    if hasattr(plain, "conv_dim"):
        known["conv_dim"] = tuple(16 for _ in plain.conv_dim)
    config = kind(**_merged(known, toys.OWN.get(family, {})))
    _draw_nothing(config)
    return config


def _known(plain: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that a config has, also in its inner configs."""
    known = {
        name: size
        for name, size in sizes.items()
        if name == "num_labels" or _has(plain, name, size)
    }
    if hasattr(plain, "kv_lora_rank"):
        # Latent attention: each head has its own keys and values, computed from a small latent.
        known["num_key_value_heads"] = sizes.get("num_attention_heads", 4)
    for name in getattr(plain, "sub_configs", {}):
        inner = getattr(plain, name, None) or _default(plain.sub_configs[name])
        if inner is not None:
            found = {key: size for key, size in _known(inner, sizes).items() if key != "num_labels"}
            known[name] = {
                **({"model_type": inner.model_type} if inner.model_type else {}),
                **found,
            }
    return known


def _default(kind: Any) -> Any:
    try:
        return kind()
    # AutoConfig, and configs with required arguments.
    except Exception:
        return None


def _merged(known: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes with the family's own settings on top, also in the inner configs."""
    found = {**known, **own}
    for name, value in own.items():
        if isinstance(value, dict) and isinstance(known.get(name), dict):
            # Sizes of another model type do not fit: the own settings replace them.
            kind = known[name].get("model_type")
            found[name] = (
                _merged(known[name], value) if value.get("model_type", kind) == kind else value
            )
    return found


def _has(config: Any, name: str, size: Any) -> bool:
    # Properties without a setter follow from other sizes.
    kind = inspect.getattr_static(type(config), name, None)
    if not hasattr(config, name) or (isinstance(kind, property) and kind.fset is None):
        return False
    value = getattr(config, name)
    return name.endswith("token_id") or not isinstance(value, (list, tuple, dict))


def _draw_nothing(config: Any) -> None:
    """Switch off dropout, router noise and masks drawn by NumPy, which engine ort refuses."""
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _draw_nothing(value)
        elif any(
            word in name for word in ("drop", "jitter", "mask_time_prob", "mask_feature_prob")
        ):
            if isinstance(value, float):
                setattr(config, name, 0.0)
            elif isinstance(value, (list, tuple)) and all(isinstance(v, float) for v in value):
                setattr(config, name, type(value)(0.0 for _ in value))


class Loss(nn.Module):
    """A model that returns only its loss, as a run needs it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor | None = getattr(self.model(**batch), "loss", None)
        if loss is None:
            raise ValueError("the class computes no loss")
        return loss
