"""Settings that single families of transformers need at toy size, and the batches of each task."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]

_STAGES = {"hidden_sizes": (16, 24, 32, 48), "depths": (1, 1, 1, 1)}
_SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 1),
    "num_heads": (2, 4),
}
_PYRAMID = {
    **_STAGES,
    "image_size": 64,
    "hidden_sizes": (16, 24, 40, 48),
    "num_attention_heads": (1, 2, 5, 8),
    "decoder_hidden_size": 16,
}
_GEMMA = {"layer_types": ["sliding_attention", "full_attention"]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Any id below the vocabulary's size of 99 that _ids never draws (it draws 3 to 89).
_AUDIO_TOKEN = {"audio_token_id": 97}
_WAVES = {
    "hidden_size": 16,
    "num_filters": 8,
    "downsampling_ratios": (4, 4, 4),
    "depths": (1, 1, 1, 1),
}
_PARAKEET = {"model_type": "parakeet_encoder", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 64, "num_mel_bins": 16, "subsampling_conv_channels": 16,
             "max_position_embeddings": 64}  # fmt: skip

# Arguments without which a config cannot be created.
NEEDED: dict[str, dict[str, Any]] = {
    "speech-encoder-decoder": {
        "encoder": {"model_type": "wav2vec2"},
        "decoder": {"model_type": "bert"},
    },
}
# Reasons why a class cannot be trained, where its own error would not name them.
UNTRAINED = {"shieldgemma2": "the class computes no loss"}
# Settings of single families, in addition to the sizes that all families have.
OWN: dict[str, dict[str, Any]] = {
    **{key: {"rotary_dim": 4} for key in ("codegen", "gptj")},
    **{key: {"mamba_n_heads": 8, "mamba_n_groups": 1} for key in ("bamba", "granitemoehybrid")},
    **{key: {"patch_size": 4, "image_size": 64, **_STAGES} for key in ("convnext", "convnextv2")},
    # A smooth activation: near the kink of a ReLU, a rounding error would change gradients, and
    # many normalizations over few values bring activations there.
    **{key: {"image_size": 64, "depth_multiplier": 0.25, "hidden_act": "silu"}
       for key in ("mobilenet_v1", "mobilenet_v2")},
    **dict.fromkeys(("swin", "swinv2", "donut-swin"), _SWIN),
    **dict.fromkeys(("pvt", "pvt_v2", "segformer"), _PYRAMID),
    **{key: {**_AUDIO_TOKEN, "encoder_config": {"hidden_dim": 32, "context_size": 8, "max_pos_emb": 16},
             "projector_config": {"encoder_hidden_size": 32}} for key in ("granite_speech", "granite_speech_plus")},
    **{key: {"text_config": _GEMMA} for key in ("gemma3", "gemma4", "gemma3n", "gemma4_unified")},
    **dict.fromkeys(("gemma3_text", "gemma4_text", "gemma3n_text", "gemma4_unified_text"), _GEMMA),
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4],
            "encoder_config": {"hidden_size_global": 32}, "decoder_config": {"hidden_size_global": 32}},
    "bit": {**_STAGES, "embedding_size": 16, "num_groups": 4, "image_size": 64},
    "canary": {"decoder_config": {"pad_token_id": 0}, "encoder_config": _PARAKEET},
    "canine": {"local_transformer_stride": 8, "num_hash_buckets": 64},
    "cohere_asr": {"encoder_config": _PARAKEET},
    "cohere_compass_text": {**_GEMMA,
                            "rope_parameters": dict.fromkeys(_GEMMA["layer_types"], _ROPE)},
    "cvt": {"embed_dim": (16, 24, 48), "num_heads": (1, 2, 3), "depth": (1, 2, 3)},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}},
    "dia": {"decoder_config": {"num_channels": 3, "cross_hidden_size": 32, "cross_num_attention_heads": 4,
                               "cross_num_key_value_heads": 4, "cross_head_dim": 8, "pad_token_id": 0},
            "delay_pattern": [0, 1, 2]},
    "dots1": {"mlp_layer_types": ["dense", "sparse"]},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320,
                     "image_size": 64},
    "focalnet": {"embed_dim": 16, "depths": (1, 1), "image_size": 32, "patch_size": 4, "hidden_sizes": (16, 32),
                 "focal_levels": (2, 2), "focal_windows": (3, 3)},
    "fun_asr_nano": {**_AUDIO_TOKEN, "adaptor_config": {"intermediate_size": 8}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_speech5_ctc": {"vocab_size": 99, "encoder_config": {"context_size": 8, "vocab_size": 99}},
    "kyutai_speech_to_text": {"num_codebooks": 3, "codebook_vocab_size": 99, "audio_pad_token_id": 396,
                              "audio_bos_token_id": 98, "codec_config": {"upsample_groups": 32}},
    "hgnet_v2": {"stem_channels": (3, 8, 12), "stage_in_channels": (12, 16, 24, 32), "image_size": 64,
                 "stage_mid_channels": (8, 8, 12, 12), "stage_out_channels": (16, 24, 32, 48), "embedding_size": 12,
                 "hidden_sizes": (16, 24, 32, 48), "stage_numb_of_layers": (2, 2, 2, 2), "depths": (1, 1, 1, 1),
                 "stage_num_blocks": (1, 1, 1, 1), "hidden_act": "silu"},
    "hiera": {"embed_dim": 16, "image_size": (64, 64), "depths": (1, 1, 2, 1),
              "num_heads": (1, 1, 2, 2)},
    "imagegpt": {"n_positions": 64, "vocab_size": 99},
    "layoutlmv3": {"input_size": 32, "coordinate_size": 5, "shape_size": 6},
    "levit": {"image_size": 64, "patch_size": 16, "hidden_sizes": (16, 24, 32), "num_attention_heads": (2, 3, 4),
              "depths": (1, 1, 1), "key_dim": (8, 8, 8)},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "mobilevit": {"image_size": 64, "patch_size": 2, "hidden_sizes": (16, 24, 32), "num_attention_heads": 4,
                  "neck_hidden_sizes": (8, 8, 16, 16, 24, 32, 48)},
    "mobilevitv2": {"image_size": 64, "patch_size": 2, "width_multiplier": 0.25,
                    "n_attn_blocks": (1, 1, 1)},
    "moonshine_streaming": {"num_key_value_heads": 4,
                            "encoder_config": {"sliding_windows": [[16, 4], [16, 0]]}},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
                  "num_cross_attention_heads": 4},
    "phi4_multimodal": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    **{key: {"decoder_start_token_id": 0} for key in ("pop2piano", "t5", "mt5", "umt5")},
    "pp_lcnet": {"scale": 0.25, "class_expand": 64, "image_size": 64},
    "qwen3_asr": {**_AUDIO_TOKEN,
                  "audio_config": {"n_window_infer": 100, "downsample_hidden_size": 16}},
    "reformer": {"axial_pos_embds": False, "attn_layers": ("local", "lsh"), "num_buckets": 4},
    "regnet": {**_STAGES, "embedding_size": 16, "groups_width": 8, "image_size": 64},
    "resnet": {**_STAGES, "embedding_size": 16, "image_size": 64},
    "speech-encoder-decoder": {
        "pad_token_id": 0, "decoder_start_token_id": 1,
        "encoder": {"model_type": "wav2vec2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "intermediate_size": 64, "conv_dim": (16,) * 7, "num_conv_pos_embeddings": 16},
        "decoder": {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "intermediate_size": 64, "vocab_size": 99, "is_decoder": True, "add_cross_attention": True},
    },
    "speech_to_text": {"conv_channels": 32},
    "speecht5": {"max_speech_positions": 64, "max_text_positions": 64},
    "swiftformer": {"image_size": 64, "embed_dims": (16, 24, 32, 48), "depths": (1, 1, 1, 1)},
    "textnet": {"image_size": (64, 64), "stem_out_channels": 8, "hidden_sizes": (8, 8, 16, 16, 24)},
    "t5gemma": {"encoder": _GEMMA, "decoder": _GEMMA},
    "vibevoice": {**_AUDIO_TOKEN, "audio_config": _WAVES, "semantic_model_config": _WAVES},
    "vibevoice_asr": {**_AUDIO_TOKEN, "acoustic_tokenizer_encoder_config": _WAVES, "acoustic_tokenizer_chunk_size": 640,
                      "semantic_tokenizer_encoder_config": _WAVES},
    "voxtral": _AUDIO_TOKEN,
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def batch(task: str, family: str, config: Any, model: nn.Module) -> Batch:
    """Return the inputs of one step: the model's labels, and a padding mask if it accepts one."""
    takes = set(inspect.signature(model.forward).parameters)
    if family in _OWN_BATCHES.get(task, {}):
        return _OWN_BATCHES[task][family](config, model)
    if task == "image-classification":
        return _images(family, config)
    if task == "ctc":
        return {**_sound(takes, config, frames=40), "labels": _ids(2, 4)}
    if task == "speech-seq2seq":
        return _speech(takes, config, model)
    return _text(task, takes)


def _ids(*sizes: int) -> torch.Tensor:
    return torch.randint(3, 90, sizes)


def _text(task: str, takes: set[str]) -> Batch:
    """Return a text batch whose last row is shorter and padded at its end."""
    rows = 8 if task == "sequence-classification" else 2
    ids = _ids(rows, 12)
    mask = torch.ones(rows, 12, dtype=torch.long)
    # The end token: some classes pool the sequence at its position.
    ids[:, -1] = 2
    # One end token and three padding tokens; the mask leaves out the latter.
    ids[-1, -4:] = torch.tensor([2, 0, 0, 0])
    mask[-1, -3:] = 0
    # -100 is the label that cross_entropy ignores.
    labels = (
        torch.arange(rows) % 3
        if task == "sequence-classification"
        else ids.masked_fill(mask == 0, -100)
    )
    given = {"input_ids": ids, "labels": labels}
    return {**given, "attention_mask": mask} if "attention_mask" in takes else given


def _images(family: str, config: Any) -> Batch:
    # Classes for images and text keep the image sizes in an inner config.
    inner = getattr(config, "vision_config", config)
    side = OWN.get(family, {}).get("image_size", getattr(inner, "image_size", 32))
    sides = side if isinstance(side, (list, tuple)) else (side, side)
    channels = getattr(inner, "num_channels", 3)
    return {"pixel_values": torch.randn(8, channels, *sides), "labels": torch.arange(8) % 3}


def _sound(takes: set[str], config: Any, frames: int) -> Batch:
    """Return a waveform, or its spectrogram over time with an attention mask."""
    if "input_values" in takes:
        return {"input_values": torch.randn(2, 4000)}
    inner = getattr(config, "encoder_config", config)
    # Names that configs use for the number of frequency bins; the first that exists counts.
    sizes = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "d_model")
    bins = next(getattr(inner, size) for size in sizes if hasattr(inner, size))
    given = {"input_features": torch.randn(2, frames, bins)}
    return (
        {**given, "attention_mask": torch.ones(2, frames, dtype=torch.long)}
        if "attention_mask" in takes
        else given
    )


def _speech(takes: set[str], config: Any, model: nn.Module) -> Batch:
    return {**_sound(takes, config, frames=48), "labels": _ids(2, 6)}


def _spectrum_first(config: Any, model: nn.Module) -> Batch:
    """Return a batch in Whisper's layout: frequency bins first, then time."""
    return {"input_features": torch.randn(2, 16, 48), "labels": _ids(2, 6)}


def _with_sound(sound: Callable[[Any], Batch]) -> Callable[[Any, nn.Module], Batch]:
    """Return a batch function whose text has one placeholder token for each audio embedding."""

    def given(config: Any, model: Any) -> Batch:
        heard = sound(config)
        with torch.no_grad():
            hears = model if hasattr(model, "get_audio_features") else model.model
            pieces = hears.get_audio_features(**heard, return_dict=True).pooler_output
        # Embeddings of one of the two samples: the model decides how many it makes.
        count = pieces.numel() // pieces.shape[-1] // 2
        ids = _ids(2, count + 8)
        ids[:, 1 : 1 + count] = config.audio_token_id
        # Placeholders are no text to predict.
        labels = ids.masked_fill(ids == config.audio_token_id, -100)
        return {**heard, "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    return given


def _masked(order: str, frames: int, bins: int) -> Callable[[Any], Batch]:
    sizes = (2, frames, bins) if order == "time first" else (2, bins, frames)
    return lambda config: {
        "input_features": torch.randn(*sizes),
        "input_features_mask": torch.ones(2, frames, dtype=torch.long),
    }


def _wave(config: Any) -> Batch:
    """Return a waveform batch with sampling switched off."""
    # The model would add random noise, which differs between the engines.
    mask = torch.ones(2, 640, dtype=torch.long)
    return {"input_values": torch.randn(2, 1, 640), "padding_mask": mask, "sample": False}


def _delayed(config: Any, model: Any) -> Batch:
    """Return a text that runs along with the audio: one token for a fixed number of frames."""
    ids = _ids(2, 64 // config.audio_length_per_tok)
    return {"input_ids": ids, "input_features": torch.randn(2, 16, 64), "labels": ids}


def _dia(config: Any, model: nn.Module) -> Batch:
    # Dia reads the labels of all channels as rows of one batch.
    codes = _ids(2, 7, config.decoder_config.num_channels)
    labels = codes.transpose(1, 2).reshape(-1, 7).contiguous()
    return {"input_ids": _ids(2, 12), "decoder_input_ids": codes, "labels": labels}


def _codes(config: Any, model: nn.Module) -> Batch:
    """Return several audio codes and one text token for each moment."""
    ids = _ids(2, 12, config.num_codebooks + 1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones(2, 12, dtype=torch.long),
        "labels": ids[..., 0].contiguous(),
    }


def _musicgen(config: Any, model: nn.Module) -> Batch:
    # MusicGen reads codebooks as rows of the batch; its labels have them as the last axis.
    ids = _ids(2 * config.num_codebooks, 12)
    return {
        "input_ids": ids,
        "labels": ids.reshape(2, config.num_codebooks, 12).transpose(1, 2).contiguous(),
    }


def _pixels(config: Any, model: nn.Module) -> Batch:
    return {"input_ids": _ids(8, config.n_positions), "labels": torch.arange(8) % 3}


def _patches(config: Any, model: nn.Module) -> Batch:
    inner = config.vision_config
    return {
        "pixel_values": torch.randn(8, 16, inner.num_channels * inner.patch_size**2),
        "pixel_attention_mask": torch.ones(8, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * 8),
        "labels": torch.arange(8) % 3,
    }


def _stacked(config: Any, model: nn.Module) -> Batch:
    """Return a spectrogram that stacks four frames in one."""
    return {
        "input_features": torch.randn(2, 40, 4 * config.encoder_config.num_mel_bins),
        "labels": _ids(2, 4),
    }


_OWN_BATCHES: dict[str, dict[str, Callable[[Any, Any], Batch]]] = {
    "ctc": {"granite_speech5_ctc": _stacked},
    "image-classification": {"imagegpt": _pixels, "siglip2": _patches},
    "causal-lm": {"musicgen": _musicgen, "musicgen_melody": _musicgen},
    "speech-seq2seq": {
        "dia": _dia,
        "fun_asr_nano": _with_sound(_masked("time first", 12, 112)),
        "granite_speech": _with_sound(lambda config: {"input_features": torch.randn(2, 30, 16)}),
        "granite_speech_plus": _with_sound(
            lambda config: {"input_features": torch.randn(2, 30, 16)}
        ),
        "kyutai_speech_to_text": _codes,
        "qwen3_asr": _with_sound(_masked("bins first", 200, 16)),
        "vibevoice": _with_sound(_wave),
        "vibevoice_asr": _with_sound(_wave),
        "voxtral_realtime": _delayed,
        "voxtral": _with_sound(lambda config: {"input_features": torch.randn(2, 16, 48)}),
        "whisper": _spectrum_first,
    },
}
