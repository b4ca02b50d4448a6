"""The control side's tables of library names, compared with the libraries."""

from __future__ import annotations

from typing import Any

import pytest

from ortlaunch.recipe.fields.deepspeed_keys import NESTED_KEYS
from ortlaunch.tables.families import (
    BERT_DEFAULTS,
    COMMON_DEFAULTS,
    COMMON_FIELDS,
    FAMILIES,
    LLAMA_DEFAULTS,
)


def defaults(config: Any) -> dict[str, Any]:
    """Return all fields of a transformers config with their defaults."""
    return {name: value for name, value in config().to_dict().items() if not name.startswith("_")}


def test_families_hold_the_fields_of_transformers() -> None:
    """The tables of families have transformers' fields and defaults."""
    # A missing field would refuse a valid recipe; a wrong default would give wrong figures.
    transformers = pytest.importorskip("transformers")
    # Only older releases of transformers have these, with the same meaning.
    older = {"position_embedding_type", "rope_theta", "rope_scaling"}
    # transformers derives them from other fields if they are not set.
    derived = {"num_key_value_heads", "head_dim", "rope_parameters"}
    for table, config in (
        (BERT_DEFAULTS, transformers.BertConfig),
        (LLAMA_DEFAULTS, transformers.LlamaConfig),
    ):
        theirs = defaults(config)
        assert set(theirs) - set(table) - COMMON_FIELDS == set()
        assert set(table) - set(theirs) <= older
        same = (set(table) & set(theirs)) - derived
        assert {name: table[name] for name in same} == {name: theirs[name] for name in same}


def test_common_defaults_are_of_the_right_kind() -> None:
    """Each common default has the type of transformers' default."""
    # The type of the default decides which values a field accepts.
    transformers = pytest.importorskip("transformers")
    for name, value in COMMON_DEFAULTS.items():
        assert name in COMMON_FIELDS
        assert type(getattr(transformers.BertConfig(), name, value)) is type(value)


def test_linear_layers_are_those_of_transformers() -> None:
    """The names of linear layers, which adapters can use, are transformers'."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 8,
    }
    models = {
        "bert": transformers.BertModel(transformers.BertConfig(**small)),
        "llama": transformers.LlamaModel(transformers.LlamaConfig(**small)),
    }
    for family, model in models.items():
        linear = {
            name.split(".")[-1]
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        assert linear == set(FAMILIES[family].layer_names)


def test_deepspeed_keys_are_those_of_deepspeed() -> None:
    """The tables of nested keys have all of DeepSpeed's keys."""
    # A missing key would refuse a valid recipe.
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    theirs = {
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    }
    for section, model in theirs.items():
        names = {
            *model.model_fields,
            *(info.alias for info in model.model_fields.values() if info.alias),
        }
        assert names - set(NESTED_KEYS[section]) == set()
