"""Frozen base weights in 4 or 8 bits (`model.quantize`), by transformers and bitsandbytes.

Only this module imports bitsandbytes, where a recipe needs it. Weights are quantized on the CPU, so
that every device trains beside the same ones.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ortlaunch.base.errors import InputError, MissingDependency
from ortlaunch.recipe.fields.model import Model, Quantize
from ortlaunch.worker.model.precision import dtype_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# A layer of a repeated block, such as model.layers.0.mlp.up_proj.
_IN_BLOCK = re.compile(r"\.\d+\.")


def import_bitsandbytes_or_refuse(field_text: str, extra_name: str) -> Any:
    """Return the package.

    Args:
        field_text: the field of the recipe that needs it, with its value.
        extra_name: the extra of ortlaunch that brings it.

    Raises:
        MissingDependency: it is not installed.
    """
    # It prints one line for each layer and pass, and one for kernels that it does not find.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingDependency(
            f'{field_text} needs bitsandbytes: {error}; type: pip install "ortlaunch[{extra_name}]"'
        ) from None
    return bitsandbytes


def quantized_loading_options(
    model_fields: Model, config: PreTrainedConfig, auto_class: Any
) -> Mapping[str, object]:
    """Return the arguments of `from_pretrained` for `model.quantize`; none without it.

    Raises:
        InputError: the model is stored in another quantized form, or its layers cannot be
            quantized.
        MissingDependency: bitsandbytes is not installed.
    """
    stored: Any = getattr(config, "quantization_config", None) or {}
    quantize = model_fields.quantize
    _refuse_other_stored_form(quantize, stored if isinstance(stored, dict) else stored.to_dict())
    if quantize is None:
        return {}
    import_bitsandbytes_or_refuse("model.quantize", "qlora")
    if stored:
        return {"device_map": {"": "cpu"}}
    from transformers import BitsAndBytesConfig

    whole_layers = _names_of_whole_layers_or_refuse(model_fields, config, auto_class)
    four_bits = quantize.type == "nf4"
    return {
        "device_map": {"": "cpu"},
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=four_bits,
            load_in_8bit=not four_bits,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=quantize.double,
            llm_int8_skip_modules=whole_layers,
        ),
    }


def _refuse_other_stored_form(quantize: Quantize | None, stored: Mapping[str, Any]) -> None:
    """Refuse a model that is stored in another quantized form than the recipe's.

    Raises:
        InputError: it is.
    """
    is_bitsandbytes = stored.get("quant_method") in ("bitsandbytes", "bitsandbytes_4bit")
    # transformers reads the forms of others by itself, some of them as whole weights.
    if not stored or (quantize is None and not is_bitsandbytes):
        return
    stored_type = str(stored.get("quant_method"))
    if is_bitsandbytes:
        stored_type = str(stored["bnb_4bit_quant_type"]) if stored.get("load_in_4bit") else "int8"
    doubled = bool(stored.get("bnb_4bit_use_double_quant")) if stored_type == "nf4" else True
    if quantize is not None and (quantize.type, quantize.double) == (stored_type, doubled):
        return
    form = f"{{type: {stored_type}{'' if doubled else ', double: false'}}}"
    remedy = (
        f"set model.quantize: {form} beside model.lora"
        if stored_type in ("nf4", "int8")
        else "give the model that it was made of, in 16 or 32 bits"
    )
    raise InputError(f"model.pretrained: its weights are stored in {stored_type}; {remedy}")


def _names_of_whole_layers_or_refuse(
    model_fields: Model, config: PreTrainedConfig, auto_class: Any
) -> list[str]:
    """Return the linear layers that are not quantized: heads, and all that is in no block.

    transformers' own choice quantizes heads for labels, which are new and trained whole.

    Raises:
        InputError: no layer is left, or the layers are of GPT-2's kind.
    """
    with torch.device("meta"):
        model = auto_class.from_config(config)
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear or type(layer).__name__ == "Conv1D"
    }
    saved = model_fields.lora.modules_to_save if model_fields.lora else ()
    quantized = [
        name
        for name in layers
        if _IN_BLOCK.search(name) and not f".{name}".endswith(tuple(f".{one}" for one in saved))
    ]
    if not quantized:
        raise InputError(
            f"model.quantize: {type(model).__name__} has no linear layer in a repeated block; "
            "leave it out"
        )
    if any(type(layers[name]).__name__ == "Conv1D" for name in quantized):
        raise InputError(
            f"model.quantize: the layers of {type(model).__name__} are Conv1D, whose weights lie "
            "across, and transformers cannot export them again; leave it out"
        )
    return [name for name in layers if name not in quantized]


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and layer of each layer with quantized weights."""
    for name, layer in model.named_modules():
        if type(layer).__module__.startswith("bitsandbytes."):
            yield name, layer


def settle_quantized_layers(model: nn.Module, compute: str) -> None:
    """Give the quantized layers the number format of their products, and keep them trainable.

    Args:
        model: the model.
        compute: the number format, a key of the table of precisions.
    """
    for _, layer in quantized_layers(model):
        if state := _nf4_state_or_none(layer):
            layer.compute_dtype = state.dtype = dtype_of(compute)
            layer.compute_type_is_set = True
            # In an evaluation on a CPU with AVX-512 it would pack the weights anew, for a product
            # without a gradient; all later training steps would then silently learn nothing.
            layer.support_avx512bf16_for_cpu = False
        else:
            layer.init_8bit_state()


def _nf4_state_or_none(layer: Any) -> Any:
    """Return the scales of a layer in nf4; FSDP2's parameters lack them."""
    return getattr(layer, "quant_state", None)


def move_quantized_scales(model: nn.Module, device: torch.device) -> None:
    """Move what belongs to quantized weights and is no parameter to the device of the model."""
    for _, layer in quantized_layers(model):
        (_nf4_state_or_none(layer) or layer).to(device)


def scale_tensors(layer: Any) -> list[torch.Tensor]:
    """Return the tensors of a quantized layer that turn its packed weight into numbers."""
    state = _nf4_state_or_none(layer)
    if state is None:
        return [layer.weight.SCB if layer.state.SCB is None else layer.state.SCB]
    nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *nested]


def parameter_element_count(parameter: torch.Tensor) -> int:
    """Return the elements of a parameter; of a packed one those that it stands for."""
    state = getattr(parameter, "quant_state", None)
    return int(parameter.numel() if state is None else state.shape.numel())


def quantized_form_and_count_text_or_none(
    quantize: Quantize | None, model: nn.Module
) -> str | None:
    """Return the form of the quantized weights and their count; None without them."""
    layers = [layer for _, layer in quantized_layers(model)]
    if quantize is None or not layers:
        return None
    form: str = quantize.type
    if state := _nf4_state_or_none(layers[0]):
        scales = "double scales" if state.nested else "float32 scales"
        form += f" with {scales}, computed in {str(state.dtype).removeprefix('torch.')}"
    count = sum(parameter_element_count(layer.weight) for layer in layers)
    total = sum(map(parameter_element_count, model.parameters()))
    return f"{form}: {count:,} of {total:,} parameters, in {len(layers):,} layers"


def replace_quantized_layers_by_whole_ones(model: Any) -> Any:
    """Return a model of transformers with its quantized weights in float32."""
    from bitsandbytes.nn.modules import fix_4bit_weight_quant_state_from_module

    for _, layer in quantized_layers(model):
        if state := _nf4_state_or_none(layer):
            state.to(layer.weight.device)
            state.dtype = torch.float32
            # FSDP2's whole weights are plain parameters.
            fix_4bit_weight_quant_state_from_module(layer)
    logging.getLogger("transformers.integrations.bitsandbytes").setLevel(logging.ERROR)
    return model.dequantize(dtype=torch.float32)
