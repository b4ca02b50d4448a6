"""Rules of `model` and its demands on `data`: (paths involved, message) for each broken rule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ortlaunch.recipe.fields.data import TokenizerTraining
from ortlaunch.recipe.fields.model import Lora, Model, Quantize
from ortlaunch.recipe.fields.parallel import Parallel
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.section import MAX_COUNT, names_of_non_default_fields
from ortlaunch.recipe.text.closest_names import closest_or_translated_name_or_none
from ortlaunch.recipe.text.source_location import Problem
from ortlaunch.tables.families import (
    COMMON_DEFAULTS,
    COMMON_FIELDS,
    FAMILIES,
    Family,
    PlannedConfig,
    family_with_all_fields_or_none,
    planned_config_or_none,
)

_FUNCTION_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
# Counts that must be at least 1.
_COUNTS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "max_position_embeddings", "type_vocab_size", "head_dim", "num_labels",
)  # fmt: skip
# transformers' config has a name for each class.
MAX_CLASSES = 1_000_000
# The plan counts the tensors of each layer, one by one.
_MOST_BY_FIELD = {
    "num_hidden_layers": 10_000,
    "num_labels": MAX_CLASSES,
}
_CONFIG = "model.config"


def all_model_section_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield every broken rule about the model."""
    yield from _problems_of_model_builder_for_task(recipe.model)
    yield from function_name_rules("model.factory", recipe.model.factory)
    yield from _quantize_rules(recipe)
    yield from _text_comparison_rules(recipe)
    if recipe.model.lora:
        yield from _lora_field_rules(recipe.model.lora, recipe.model)
        if recipe.model.lora.init == "eva" and (
            recipe.model.traits.predicts != "next"
            or any(getattr(part.source, "stream", None) for part in recipe.data.parts)
        ):
            yield (
                ("model.lora.init", "data.train"),
                "got eva, which needs the first samples of a causal-lm, and no stream of them",
            )
    if recipe.model.config is not None:
        config_problems = list(
            _model_type_and_config_value_rules(recipe.model.config, bool(recipe.model.pretrained))
        )
        yield from config_problems
        # Otherwise the rules below would judge a misspelt field by the family's default.
        if not config_problems:
            yield from _task_and_model_type_rules(recipe.model)
            yield from _head_count_and_length_rules(recipe)
            yield from _lora_target_module_rules(recipe.model)


def function_name_rules(field_path: str, function_name: str | None) -> Iterator[Problem]:
    """Yield a problem unless a function is named as `package.module:function`."""
    if function_name and not _FUNCTION_NAME.fullmatch(function_name):
        yield (field_path,), f'got {function_name}; write it as "package.module:function"'


def _problems_of_model_builder_for_task(model: Model) -> Iterator[Problem]:
    """Yield the problems of the model's builder: a factory, or transformers."""
    if model.traits.is_own:
        if not model.factory:
            yield (
                ("model.factory", "model.task"),
                f'is missing: task {model.task} needs factory: "package.module:function"',
            )
        unset_values = {
            "pretrained": None, "config": None, "lora": None, "quantize": None,
            "allow_partial": False, "attention": "auto",
        }  # fmt: skip
        for field_name, value in unset_values.items():
            if getattr(model, field_name) != value:
                yield (
                    (f"model.{field_name}", "model.task"),
                    f"has no effect with task {model.task}: the factory builds the model",
                )
        return
    if model.factory or model.arguments:
        field_name = "factory" if model.factory else "arguments"
        yield (
            (f"model.{field_name}", "model.task"),
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


def _text_comparison_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of `model.embedding`, `model.reranker`, and the batch of their losses."""
    model = recipe.model
    for name in ("embedding", "reranker"):
        if getattr(model, name) is not None and model.traits.compares != name:
            yield (
                (f"model.{name}", "model.task"),
                f"is for task {name}, and task is {model.task}; leave one of both out",
            )
    settings = model.text_comparison
    if settings is None:
        return
    unused = {
        "temperature": ("multiple-negatives-ranking", "cosent"),
        "symmetric": ("multiple-negatives-ranking",),
        "distance": ("triplet",),
        "margin": ("triplet",),
    }
    for name in sorted(names_of_non_default_fields(settings) & unused.keys()):
        if settings.loss not in unused[name]:
            yield (
                (f"model.embedding.{name}", "model.embedding.loss"),
                f"has no effect with loss {settings.loss}; it is for {', '.join(unused[name])}",
            )
    batch = recipe.batch
    if settings.traits.is_over_batch and batch.global_size == 1:
        yield (
            ("batch.global_size", "model.task"),
            f"got 1: loss {settings.loss} compares the samples of a step; give 2 or more",
        )
    # A pass of accumulation compares its own samples alone, so that another number of ranks would
    # train something else.
    if settings.traits.is_over_batch and batch.accumulation_steps != 1 and batch.micro_size:
        yield (
            ("batch.micro_size", "model.task"),
            f"got {batch.micro_size}: loss {settings.loss} compares all samples of a step, which must be "
            "one pass; give batch.global_size alone, and model.embedding.mini_batch to save memory",
        )


def _lora_field_rules(lora: Lora, model: Model) -> Iterator[Problem]:
    """Yield the fields of `model.lora` that contradict each other or the base."""
    if lora.pretrained:
        for name in sorted(names_of_non_default_fields(lora) - {"pretrained", "merge"}):
            yield (
                (f"model.lora.{name}", "model.lora.pretrained"),
                "has no effect with model.lora.pretrained, whose adapters have it; leave it out",
            )
    if lora.init.startswith(("pissa", "olora")):
        if model.quantize:
            yield (
                ("model.lora.init", "model.quantize"),
                f"got {lora.init}, which changes the base weights, and they are quantized; leave "
                "one out",
            )
        if not lora.merge:
            yield (
                ("model.lora.merge", "model.lora.init"),
                f"got false with init {lora.init}: the base weights are no longer the published "
                "ones, so that adapters alone do not fit them; leave it out",
            )


def _quantize_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield what `model.quantize` lacks, or does not work with."""
    quantize = recipe.model.quantize
    if quantize is None or recipe.model.traits.is_own:
        return
    if recipe.model.lora is None:
        yield (
            ("model.quantize", "model.lora"),
            "needs model.lora: a quantized weight has no gradient and is not trained; add "
            "adapters, or leave it out",
        )
    if not recipe.model.pretrained:
        yield (
            ("model.quantize", "model.pretrained"),
            "needs model.pretrained: random weights are not worth keeping; leave it out",
        )
    if quantize.type == "int8":
        for name in sorted(names_of_non_default_fields(quantize) & {"double", "compute"}):
            yield (
                (f"model.quantize.{name}", "model.quantize.type"),
                f"has no effect with int8: it is for nf4; leave it out, or write "
                f"{'true' if name == 'double' else 'null'}",
            )
    if recipe.engine.name == "ort":
        yield (
            ("model.quantize", "engine.name"),
            "got engine ort: ONNX Runtime has no operators for bitsandbytes' weights in a training "
            "graph; use engine.name: eager",
        )
    if recipe.zero and recipe.zero.stage == 3:
        yield (
            ("model.quantize", "zero.stage"),
            "got 3, whose handling of packed weights is neither planned nor tested; use parallel, "
            "which divides them, or stage 2, which divides all that is trained",
        )
    if recipe.parallel:
        yield from _quantize_and_parallel_rules(quantize, recipe.parallel)


def _quantize_and_parallel_rules(quantize: Quantize, parallel: Parallel) -> Iterator[Problem]:
    if quantize.type == "int8":
        yield (
            ("model.quantize.type", "parallel"),
            "got int8, whose layers read values of their parameters that FSDP2's parts lack; use "
            "nf4, or zero: {stage: 2}",
        )
    for name, is_set in (("tensor", parallel.tensor > 1), ("offload", parallel.offload)):
        if is_set:
            yield (
                ("model.quantize", f"parallel.{name}"),
                f"got parallel.{name}: the scales of packed weights are neither divided nor moved "
                "with them; leave it out",
            )


def _model_type_and_config_value_rules(
    model_config: Mapping[str, object], is_pretrained: bool
) -> Iterator[Problem]:
    """Yield the problems of the config's names and types, where the family is known."""
    model_type = model_config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        yield (f"{_CONFIG}.model_type",), f"got {model_type!r}; it must be text, as bert or llama"
    elif model_type is None and model_config and not is_pretrained:
        yield (
            (_CONFIG, f"{_CONFIG}.model_type"),
            "lacks model_type (as bert or llama), which defines the other keys",
        )
    # transformers' names of model types are in lower case.
    elif model_type not in FAMILIES and str(model_type).lower() in FAMILIES:
        yield (
            (f"{_CONFIG}.model_type",),
            f"got {model_type}; transformers writes {str(model_type).lower()}",
        )
    family = family_with_all_fields_or_none(model_type)
    # The worker checks other families against transformers.
    if family is not None:
        for key, value in model_config.items():
            yield from _model_config_value_rules(key, value, str(model_type), family)


def _model_config_value_rules(
    field_name: str, field_value: object, model_type: str, family: Family
) -> Iterator[Problem]:
    known_names = {*COMMON_FIELDS, *family.defaults}
    if field_name not in known_names:
        closest_field = closest_or_translated_name_or_none(field_name, known_names)
        advice = (
            f"did you mean {closest_field}?"
            if closest_field
            else f"transformers' {model_type} config has no such field"
        )
        yield (f"{_CONFIG}.{field_name}",), f"unknown key; {advice}"
        return
    if expectation := _accepted_config_values_text_or_none(
        field_name, field_value, {**COMMON_DEFAULTS, **family.defaults}.get(field_name)
    ):
        yield (
            (f"{_CONFIG}.{field_name}",),
            f"got {_value_text(field_value)}; it must be {expectation}",
        )


def _accepted_config_values_text_or_none(
    field_name: str, field_value: Any, default: object
) -> str | None:
    """Return the values that a config's field accepts, or None where `field_value` is one of them.

    The type follows from the field's default and its name.
    """
    # bool is a subclass of int: true is no number here.
    is_number = isinstance(field_value, (int, float)) and not isinstance(field_value, bool)
    if default is None and field_value is None:
        return None
    if isinstance(default, bool):
        return None if isinstance(field_value, bool) else "true or false"
    if isinstance(default, int) or field_name in _COUNTS:
        least = 1 if field_name in _COUNTS else 0
        most = _MOST_BY_FIELD.get(field_name, MAX_COUNT)
        is_accepted = is_number and isinstance(field_value, int) and least <= field_value <= most
        return (
            None
            if is_accepted
            else f"a whole number from {least}{f' to {most}' if is_number and field_value > most else ''}"
        )
    if "dropout" in field_name:
        return None if is_number and 0 <= field_value < 1 else "a number from 0, below 1"
    if isinstance(default, float):
        return None if is_number else "a number"
    return "a word" if isinstance(default, str) and not isinstance(field_value, str) else None


def _value_text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _task_and_model_type_rules(model: Model) -> Iterator[Problem]:
    config = model.config or {}
    traits = model.traits
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    sees_later_tokens = family.sees_later_tokens if family is not None else None
    key_names = ("model.task", f"{_CONFIG}.model_type")
    if sees_later_tokens is False and traits.predicts == "masked":
        yield (
            key_names,
            f"got {model.task} with {model_type}, which predicts the next token; use causal-lm",
        )
    has_one_output = traits.label == "number" or traits.compares == "reranker"
    if has_one_output and config.get("num_labels", 1) != 1:
        yield (
            (f"{_CONFIG}.num_labels", "model.task"),
            f"got {config['num_labels']}; {model.task} has one output",
        )
    if sees_later_tokens and traits.predicts == "next" and not config.get("is_decoder"):
        yield (
            key_names,
            f"got {model.task} with {model_type}, whose attention sees the tokens to predict; use "
            "masked-lm",
        )


def _head_count_and_length_rules(recipe: Recipe) -> Iterator[Problem]:
    full_config = planned_config_or_none(recipe.model.config)
    # With `pretrained`, `config` has only the changed fields: the defaults are not the model's.
    # Not all families have the names of these fields and count positions from 0.
    if (
        full_config is None
        or recipe.model.pretrained
        or "max_position_embeddings" not in FAMILIES[full_config["model_type"]].defaults
    ):
        return
    hidden = full_config["hidden_size"]
    heads = full_config["num_attention_heads"]
    key_value_heads = full_config.get("num_key_value_heads")
    if full_config.get("head_dim") is None and hidden % heads:
        yield (
            (f"{_CONFIG}.num_attention_heads", f"{_CONFIG}.hidden_size"),
            f"got {heads}, and hidden_size ({hidden}) is not a multiple of it",
        )
    if key_value_heads is not None and heads % key_value_heads:
        yield (
            (f"{_CONFIG}.num_key_value_heads", f"{_CONFIG}.num_attention_heads"),
            f"got {key_value_heads}, and num_attention_heads ({heads}) is not a multiple of it",
        )
    yield from _length_and_vocabulary_rules(recipe, full_config)


def _length_and_vocabulary_rules(recipe: Recipe, full_config: PlannedConfig) -> Iterator[Problem]:
    """Yield the problems of the data's length and vocabulary, compared with the model's."""
    length = recipe.data.sequence_length
    max_positions = full_config["max_position_embeddings"]
    if length and length > max_positions:
        yield (
            ("data.sequence_length", f"{_CONFIG}.max_position_embeddings"),
            f"got {length}, and the model has max_position_embeddings: {max_positions}; change one "
            "of them",
        )
    tokenizer = recipe.data.tokenizer
    # Without a vocab_size of its own the model gets the tokenizer's.
    if not isinstance(tokenizer, TokenizerTraining) or "vocab_size" not in (
        recipe.model.config or {}
    ):
        return
    if tokenizer.vocab_size > full_config["vocab_size"]:
        yield (
            ("data.tokenizer.vocab_size", f"{_CONFIG}.vocab_size"),
            f"got {tokenizer.vocab_size}, more than the model's vocab_size: {full_config['vocab_size']}",
        )


def _lora_target_module_rules(model: Model) -> Iterator[Problem]:
    family = family_with_all_fields_or_none((model.config or {}).get("model_type"))
    if model.lora is None or model.lora.pretrained or model.lora.target_pattern or family is None:
        return
    linear_layers = tuple(dict.fromkeys(family.layer_names))
    unknown_modules = [
        name
        for name in model.lora.target_modules
        if name.split(".")[-1] not in (*linear_layers, "all-linear")
    ]
    if unknown_modules:
        closest_layer = closest_or_translated_name_or_none(unknown_modules[0], linear_layers)
        yield (
            ("model.lora.target_modules", f"{_CONFIG}.model_type"),
            f"got {', '.join(unknown_modules)}, and the model's linear layers are {', '.join(linear_layers)}"
            + (f"; did you mean {closest_layer}?" if closest_layer else ""),
        )
