"""The model of a run: a transformers model from config or weights, or the user's own, with a loss as its only output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ortlaunch.errors import InputError, MissingDependency
from ortlaunch.memory import padded_vocabulary
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.dialects import closest
from ortlaunch.recipe.models import Lora
from ortlaunch.worker.data import Data, LabelledTexts, call

_AUTO_CLASSES = {
    "pretraining": "AutoModelForPreTraining",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
}


class LossModule(nn.Module):
    """`forward(**batch)` -> the loss, a scalar: nothing else has to leave the engine's graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        output = self.model(**batch)
        if isinstance(output, torch.Tensor):
            return output
        loss: torch.Tensor = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", None)
        return output[0] if loss is None else loss


def build_model(recipe: Recipe, data: Data) -> LossModule:
    """The model in float32 on the CPU; the same seed gives the same weights on every rank and engine."""
    torch.manual_seed(recipe.seed)
    if recipe.model.task == "custom":
        model = call("model.factory", str(recipe.model.factory), recipe.model.arguments)
        if not isinstance(model, nn.Module):
            raise InputError(f"model.factory returned {type(model).__name__}; it must return a torch.nn.Module")
    else:
        model = _transformers_model(recipe, data)
    if recipe.model.lora:
        model = _with_adapters(model, recipe.model.lora)
    return LossModule(model.train())


def _transformers_model(recipe: Recipe, data: Data) -> nn.Module:
    import transformers

    config = _config(recipe, data)
    attention = attention_of(recipe, config)
    auto = getattr(transformers, _AUTO_CLASSES[recipe.model.task])
    try:
        if recipe.model.pretrained is None:
            model: nn.Module = auto.from_config(config, attn_implementation=attention)
        else:
            model = auto.from_pretrained(
                recipe.model.pretrained, config=config, attn_implementation=attention, torch_dtype=torch.float32
            )
    except (OSError, ValueError) as error:
        raise InputError(f"model: {str(error).splitlines()[0]}") from error
    return model


def _config(recipe: Recipe, data: Data) -> Any:
    from transformers import AutoConfig

    fields = dict(recipe.model.config or {})
    if recipe.model.pretrained is None:
        kind = fields.pop("model_type")
        try:
            config = AutoConfig.for_model(kind)
        except ValueError:
            raise InputError(f"model.config.model_type: transformers knows no {kind!r}") from None
    else:
        try:
            config = AutoConfig.from_pretrained(recipe.model.pretrained)
        except (OSError, ValueError) as error:
            raise InputError(f"model.pretrained: {str(error).splitlines()[0]}") from None
    _refuse_unknown(fields, config)
    fields.setdefault("use_cache", False)
    fields.update(_from_data(recipe, data, fields))
    merged = {**config.to_dict(), **fields} if recipe.model.pretrained is None else fields
    if recipe.model.pretrained is None:
        merged.pop("model_type", None)
        return AutoConfig.for_model(kind, **fields)
    config.update(merged)
    return config


def _refuse_unknown(fields: dict[str, Any], config: Any) -> None:
    """transformers takes any name without a word; here an unknown one is an error."""
    known = {*config.to_dict(), *getattr(config, "attribute_map", {}), "num_labels", "tie_word_embeddings", "head_dim"}
    for name in fields:
        if name not in known and not hasattr(config, name):
            guess = closest(name, known)
            raise InputError(f"model.config.{name}: unknown key" + (f"; did you mean {guess}?" if guess else ""))


def _from_data(recipe: Recipe, data: Data, fields: dict[str, Any]) -> dict[str, Any]:
    """What the tokenizer and the labels decide; a model that is too small for them is an error."""
    found: dict[str, Any] = {}
    if data.tokenizer is not None and recipe.model.pretrained is None:
        size = len(data.tokenizer)
        found["vocab_size"] = fields.get("vocab_size", padded_vocabulary(size))
        if found["vocab_size"] < size:
            raise InputError(f"model.config.vocab_size: got {found['vocab_size']}, and the tokenizer has {size} words")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(data.tokenizer, name, None) is not None:
                found[name] = fields.get(name, getattr(data.tokenizer, name))
    if isinstance(data.train, LabelledTexts):
        found["num_labels"] = fields.get("num_labels", max(2, data.train.classes))
        if found["num_labels"] < data.train.classes:
            raise InputError(
                f"model.config.num_labels: got {found['num_labels']}, and the data has {data.train.classes} classes"
            )
    return found


def attention_of(recipe: Recipe, config: Any) -> str:
    """`auto` decided: sdpa, but eager where ONNX Runtime meets attention dropout."""
    if recipe.model.attention != "auto":
        return recipe.model.attention
    names = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
    dropout = max((getattr(config, name, None) or 0.0 for name in names), default=0.0)
    return "eager" if recipe.engine.name == "ort" and dropout > 0 else "sdpa"


def _with_adapters(model: nn.Module, lora: Lora) -> nn.Module:
    try:
        import peft
    except ImportError:
        raise MissingDependency('model.lora needs peft: pip install "ortlaunch[lora]"') from None
    config = peft.LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.target_modules)
    )
    try:
        adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        raise InputError(f"model.lora.target_modules: {error}") from None
    return adapted
