"""Families of transformers at toy size, by task: a model with random weights and a batch for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_TASKS = {
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
}
# Names that configs have for the same size, with a toy's value.
_SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embedding_size": 32, "emb_dim": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "n_inner": 64, "ffn_dim": 64,
    "hidden_dim": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_ff": 64, "d_kv": 8, "head_dim": 8,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "image_size": 32, "patch_size": 8,
    "num_channels": 3, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "n_routed_experts": 4, "num_labels": 3, "attn_implementation": "sdpa", "max_source_positions": 24,
    "max_target_positions": 24, "num_mel_bins": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "use_cache": False, "apply_spec_augment": False, "chunk_size": 8,
    "mamba_chunk_size": 8, "entity_vocab_size": 50, "entity_emb_size": 8,
}  # fmt: skip
# What configs compute of other sizes, or mean otherwise; tried one after the other.
_LEFT_OUT: tuple[tuple[str, ...], ...] = (
    (),
    ("head_dim",),
    ("head_dim", "num_key_value_heads"),
    ("head_dim", "num_key_value_heads", "num_hidden_layers", "num_heads", "n_heads"),
)
# What single families want beside.
_OWN: dict[str, dict[str, Any]] = {
    **{key: {"rotary_dim": 4} for key in ("codegen", "gptj")},
    **{key: {"mamba_n_heads": 8, "mamba_n_groups": 1} for key in ("bamba", "granitemoehybrid")},
    **{key: {"patch_size": 4, "image_size": 64} for key in ("convnext", "convnextv2")},
    **{key: {"image_size": 64} for key in ("bit", "cvt", "hgnet_v2", "mobilenet_v1", "mobilenet_v2", "mobilevit")},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 64, "image_size": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
_FEATURES = {"seamless_m4t": (48, 160), "seamless_m4t_v2": (48, 160), "speech_to_text": (48, 80), "pop2piano": (16, 32)}


def cases(task: str) -> dict[str, Callable[[], Any]]:
    """By name of the family."""
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, _TASKS[task])
    return {
        family: lambda f=family, k=kind: made(task, f, k) for family, kind in names.items() if isinstance(kind, str)
    }


def made(task: str, family: str, kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The first of the sizes that run in eager; the error of the last, where none does."""
    for left_out in _LEFT_OUT:
        try:
            model, batch = _sized(task, family, kind, {n: size for n, size in _SIZES.items() if n not in left_out})
            model(**batch).backward()
            model.zero_grad()
            return model, batch
        except Exception as error:
            last = error
    raise last


def _sized(task: str, family: str, kind: str, sizes: dict[str, Any]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers

    plain = transformers.AutoConfig.for_model(family)
    known = {name: size for name, size in sizes.items() if name == "num_labels" or _has(plain, name)}
    for name, inner in getattr(plain, "sub_configs", {}).items():
        if "config" in name and inner is not transformers.AutoConfig:
            known[name] = {n: size for n, size in sizes.items() if _has(inner(), n)}
    if hasattr(plain, "kv_lora_rank"):
        known["num_key_value_heads"] = sizes.get("num_attention_heads", 4)  # each head has its own, made of few numbers
    known.update(_OWN.get(family, {}))
    if hasattr(plain, "conv_dim"):
        known["conv_dim"] = tuple(16 for _ in plain.conv_dim)
    drops = [n for n in vars(plain) if "drop" in n and _is_rate(plain, n)]
    config = transformers.AutoConfig.for_model(family, **known)
    for name in drops:
        setattr(config, name, 0.0)
    for name in ("mask_time_prob", "mask_feature_prob"):  # drawn by NumPy, which is refused
        if hasattr(config, name):
            setattr(config, name, 0.0)
    config.num_labels = 3
    if hasattr(config, "problem_type"):
        config.problem_type = None
    if task == "causal-lm" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in getattr(transformers, kind)(config).parameters())
    if size > 60_000_000:
        raise ValueError(f"{size:,} parameters: the toy sizes are not this config's")
    model = getattr(transformers, kind)(config)
    for weight in model.parameters():  # a router of zeros chooses among equals, as it likes
        if weight.dim() > 1 and not weight.any():
            nn.init.normal_(weight, std=0.02)
    return Loss(model), _batch(task, family, config, model)


def _has(config: Any, name: str) -> bool:
    kind = inspect.getattr_static(type(config), name, None)
    return hasattr(config, name) and not (isinstance(kind, property) and kind.fset is None)


def _is_rate(config: Any, name: str) -> bool:
    return isinstance(getattr(config, name), float)


class Loss(nn.Module):
    """The loss alone, which is what a run trains on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss


def _batch(task: str, family: str, config: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (2, 12))
    if task == "sequence-classification":
        ids[:, -1] = 2  # the end, by which some find the sentence
    takes = inspect.signature(model.forward).parameters
    batch: dict[str, torch.Tensor] = {}
    if task == "image-classification":
        side = _OWN.get(family, {}).get("image_size", getattr(config, "image_size", 32))
        sides = side if isinstance(side, (list, tuple)) else (side, side)
        return {
            "pixel_values": torch.randn(8, getattr(config, "num_channels", 3), *sides),
            "labels": torch.arange(8) % 3,
        }
    if task == "ctc":
        values = {"input_features": torch.randn(2, 40, getattr(config, "feature_projection_input_dim", 160))}
        if "input_values" in takes:
            values = {"input_values": torch.randn(2, 4000)}
        return {**values, "labels": ids[:, :4].contiguous()}
    if task == "speech-seq2seq":
        name = "input_features" if "input_features" in takes else "input_values"
        found = torch.randn(2, *_FEATURES.get(family, (16, 48))) if name == "input_features" else torch.randn(2, 4000)
        return {name: found, "labels": ids[:, :6].contiguous()}
    batch["input_ids"] = ids
    if "attention_mask" in takes:
        batch["attention_mask"] = torch.ones_like(ids)
    batch["labels"] = torch.tensor([0, 2]) if task == "sequence-classification" else ids
    return batch
