"""Rules of `model` and its demands on `data`: (paths involved, message) for each broken rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ortlaunch.recipe.fields.data import TokenizerTraining
from ortlaunch.recipe.fields.families import (
    COMMON_DEFAULTS,
    FAMILIES,
    LINEAR_LAYERS,
    complete,
    known_fields,
)
from ortlaunch.recipe.fields.model import Model
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.section import MOST
from ortlaunch.recipe.text.place import Problem
from ortlaunch.recipe.text.words import closest

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
# Counts that must be at least 1.
_COUNTS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings", "type_vocab_size", "head_dim", "num_labels",
)  # fmt: skip
# transformers' config has a name for each class.
MOST_CLASSES = 1_000_000
# The plan counts the tensors of each layer, one by one.
_MOST = {
    "num_hidden_layers": 10_000,
    "num_labels": MOST_CLASSES,
}
_CONFIG = "model.config"


def model_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield every broken rule about the model."""
    yield from _builder(recipe.model)
    yield from function("model.factory", recipe.model.factory)
    if recipe.model.config is not None:
        config = list(_config(recipe.model.config, bool(recipe.model.pretrained)))
        yield from config
        # Otherwise the rules below would judge a misspelt field by the family's default.
        if not config:
            yield from _task(recipe.model)
            yield from _shape(recipe)
            yield from _lora(recipe.model)


def function(path: str, value: str | None) -> Iterator[Problem]:
    """Yield a problem unless a function is named as `package.module:function`."""
    if value and not _FUNCTION.fullmatch(value):
        yield (path,), f'got {value}; write it as "package.module:function"'


def _builder(model: Model) -> Iterator[Problem]:
    """Yield the problems of the model's builder: a factory, or transformers."""
    if model.traits.is_own:
        if not model.factory:
            yield (
                ("model.factory", "model.task"),
                f'is missing: task {model.task} needs factory: "package.module:function"',
            )
        unset = {
            "pretrained": None, "config": None, "lora": None, "allow_partial": False,
            "attention": "auto",
        }  # fmt: skip
        for name, value in unset.items():
            if getattr(model, name) != value:
                yield (
                    (f"model.{name}", "model.task"),
                    f"has no effect with task {model.task}: the factory builds the model",
                )
        return
    if model.factory or model.arguments:
        name = "factory" if model.factory else "arguments"
        yield (
            (f"model.{name}", "model.task"),
            f"is for tasks custom and lightning, and task is {model.task}",
        )
    if model.allow_partial and not model.pretrained:
        yield ("model.allow_partial",), "has no effect without model.pretrained"
    if not model.pretrained and not model.config:
        yield (
            ("model", "model.pretrained", "model.config"),
            "has neither `pretrained` (a folder or hub id) nor `config` (for random weights); "
            "give one",
        )


def _config(config: dict[str, Any], pretrained: bool) -> Iterator[Problem]:
    """Yield the problems of the config's names and types, where the family is known."""
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        yield (f"{_CONFIG}.model_type",), f"got {kind!r}; it must be text, as bert or llama"
    elif kind is None and config and not pretrained:
        yield (
            (_CONFIG, f"{_CONFIG}.model_type"),
            "lacks model_type (as bert or llama), which defines the other keys",
        )
    elif kind not in FAMILIES and isinstance(kind, str):
        # transformers' names of model types are in lower case.
        family = next((name for name in FAMILIES if name == kind.lower()), None)
        if family:
            yield (f"{_CONFIG}.model_type",), f"got {kind}; transformers writes {family}"
    for key, value in config.items():
        yield from _field(key, value, str(kind))


def _field(key: str, value: object, family: str) -> Iterator[Problem]:
    known = known_fields(family)
    # The worker checks other families against transformers.
    if known is None:
        return
    if key not in known:
        guess = closest(key, known)
        advice = (
            f"did you mean {guess}?"
            if guess
            else f"transformers' {family} config has no such field"
        )
        yield (f"{_CONFIG}.{key}",), f"unknown key; {advice}"
        return
    if wanted := _wanted(key, value, {**COMMON_DEFAULTS, **FAMILIES[family]}.get(key)):
        yield (f"{_CONFIG}.{key}",), f"got {_shown(value)}; it must be {wanted}"


def _wanted(key: str, value: Any, default: object) -> str | None:
    """Return the values that a config's field accepts, or None where `value` is one of them.

    The type follows from the field's default and its name.
    """
    # bool is a subclass of int: true is no number here.
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if default is None and value is None:
        return None
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int) or key in _COUNTS:
        least = 1 if key in _COUNTS else 0
        most = _MOST.get(key, MOST)
        fits = number and isinstance(value, int) and least <= value <= most
        return (
            None
            if fits
            else f"a whole number from {least}{f' to {most}' if number and value > most else ''}"
        )
    if "dropout" in key:
        return None if number and 0 <= value < 1 else "a number from 0, below 1"
    if isinstance(default, float):
        return None if number else "a number"
    return "a word" if isinstance(default, str) and not isinstance(value, str) else None


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _task(model: Model) -> Iterator[Problem]:
    config = model.config or {}
    traits = model.traits
    family = config.get("model_type")
    paths = ("model.task", f"{_CONFIG}.model_type")
    if family == "llama" and traits.predicts == "masked":
        yield paths, f"got {model.task} with llama, which predicts the next token; use causal-lm"
    if traits.label == "number" and config.get("num_labels", 1) != 1:
        yield (
            (f"{_CONFIG}.num_labels", "model.task"),
            f"got {config['num_labels']}; {model.task} has one output",
        )
    if family == "bert" and traits.predicts == "next" and not config.get("is_decoder"):
        yield (
            paths,
            "got causal-lm with bert, whose attention sees the tokens to predict; use "
            "masked-lm or pretraining",
        )


def _shape(recipe: Recipe) -> Iterator[Problem]:
    full = complete(recipe.model.config)
    # With `pretrained`, `config` has only the changed fields: the defaults are not the model's.
    if full is None or recipe.model.pretrained:
        return
    hidden = full["hidden_size"]
    heads = full["num_attention_heads"]
    groups = full.get("num_key_value_heads")
    if full.get("head_dim") is None and hidden % heads:
        yield (
            (f"{_CONFIG}.num_attention_heads", f"{_CONFIG}.hidden_size"),
            f"got {heads}, and hidden_size ({hidden}) is not a multiple of it",
        )
    if groups is not None and heads % groups:
        yield (
            (f"{_CONFIG}.num_key_value_heads", f"{_CONFIG}.num_attention_heads"),
            f"got {groups}, and num_attention_heads ({heads}) is not a multiple of it",
        )
    yield from _fit(recipe, full)


def _fit(recipe: Recipe, full: dict[str, Any]) -> Iterator[Problem]:
    """Yield the problems of the data's length and vocabulary, compared with the model's."""
    length = recipe.data.sequence_length
    positions = full["max_position_embeddings"]
    if length and length > positions:
        yield (
            ("data.sequence_length", f"{_CONFIG}.max_position_embeddings"),
            f"got {length}, and the model has max_position_embeddings: {positions}; change one "
            "of them",
        )
    tokenizer = recipe.data.tokenizer
    # Without a vocab_size of its own the model gets the tokenizer's.
    if not isinstance(tokenizer, TokenizerTraining) or "vocab_size" not in (
        recipe.model.config or {}
    ):
        return
    if tokenizer.vocab_size > full["vocab_size"]:
        yield (
            ("data.tokenizer.vocab_size", f"{_CONFIG}.vocab_size"),
            f"got {tokenizer.vocab_size}, more than the model's vocab_size: {full['vocab_size']}",
        )


def _lora(model: Model) -> Iterator[Problem]:
    layers = LINEAR_LAYERS.get(str((model.config or {}).get("model_type")))
    if model.lora is None or layers is None:
        return
    absent = [
        name
        for name in model.lora.target_modules
        if name.split(".")[-1] not in (*layers, "all-linear")
    ]
    if absent:
        guess = closest(absent[0], layers)
        yield (
            ("model.lora.target_modules", f"{_CONFIG}.model_type"),
            f"got {', '.join(absent)}, and the model's linear layers are {', '.join(layers)}"
            + (f"; did you mean {guess}?" if guess else ""),
        )
