"""Adapters and quantized base weights in the configs of four tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.importers import convert_config_to_recipe

AXOLOTL = {"base_model": "here", "datasets": [{"path": "a.txt", "type": "completion"}],
           "sequence_len": 64, "micro_batch_size": 2, "learning_rate": 0.1, "num_epochs": 2,
           "adapter": "lora"}  # fmt: skip
FACTORY = {"model_name_or_path": "here", "stage": "pt", "finetuning_type": "lora", "learning_rate": 0.1,
           "cutoff_len": 64, "per_device_train_batch_size": 2, "num_train_epochs": 1}  # fmt: skip
TRL = {"model_name_or_path": "here", "dataset_name": "a/b", "use_peft": True, "learning_rate": 0.1,
       "num_train_epochs": 1, "per_device_train_batch_size": 2}  # fmt: skip
TUNE = {
    "checkpointer": {"checkpoint_dir": "here"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
    "batch_size": 2,
    "epochs": 2,
}
NF4 = {"type": "nf4"}
PLAIN = {"type": "nf4", "double": False}


def recipe_and_dropped(
    tool: str, config: dict[str, Any], tmp_path: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return the recipe of a config, and its keys without a counterpart."""
    # JSON is YAML, too.
    path = tmp_path / "c.yml"
    path.write_text(json.dumps(config))
    overrides = ("data.train={format: text, path: [a.txt]}",) if tool == "llama-factory" else ()
    found = convert_config_to_recipe(path, tool, None, overrides)
    made: dict[str, Any] = yaml.safe_load(found.recipe_yaml)
    return made, [remark.key for remark in found.import_report.dropped]


@pytest.mark.parametrize(
    ("tool", "config", "quantize"),
    [
        ("axolotl", {**AXOLOTL, "adapter": "qlora", "load_in_4bit": True}, NF4),
        ("axolotl", {**AXOLOTL, "adapter": "qlora"}, NF4),
        ("axolotl", {**AXOLOTL, "load_in_8bit": True, "load_in_4bit": False}, {"type": "int8"}),
        ("axolotl", {**AXOLOTL, "load_in_4bit": True,
                     "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}, PLAIN),
        ("llama-factory", {**FACTORY, "quantization_bit": 4, "quantization_method": "bnb"}, NF4),
        ("llama-factory", {**FACTORY, "quantization_bit": 4, "double_quantization": False}, PLAIN),
        ("llama-factory", {**FACTORY, "quantization_bit": 8}, {"type": "int8"}),
        ("hf-trainer", {**TRL, "load_in_4bit": True}, PLAIN),
        ("hf-trainer", {**TRL, "load_in_4bit": True, "use_bnb_nested_quant": True}, NF4),
        ("torchtune", {**TUNE, "model": {"_component_": "a.qlora_b", "lora_attn_modules": ["q_proj"]}}, NF4),
    ],
)  # fmt: skip
def test_quantized_base_weights(
    tool: str, config: dict[str, Any], quantize: dict[str, Any], tmp_path: Path
) -> None:
    """Each tool's keys become model.quantize with that tool's defaults, on engine eager."""
    made, dropped = recipe_and_dropped(tool, config, tmp_path)
    assert (made["model"]["quantize"], made["engine"]["name"], dropped) == (quantize, "eager", [])


@pytest.mark.parametrize(
    ("tool", "config", "lora"),
    [
        ("axolotl", {**AXOLOTL, "peft_use_dora": True, "peft_init_lora_weights": "pissa"},
         {"dora": True, "init": "pissa", "r": 8, "alpha": 8}),
        ("axolotl", {**AXOLOTL, "lora_model_dir": "out", "lora_r": 4, "peft_use_dora": True},
         {"pretrained": "out"}),
        ("llama-factory", {**FACTORY, "use_rslora": True, "use_dora": True, "pissa_init": True,
                           "additional_target": "embed_tokens, lm_head"},
         {"rslora": True, "dora": True, "init": "pissa_niter_16", "r": 8, "alpha": 16, "dropout": 0.0,
          "modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ["all-linear"]}),
        ("llama-factory", {**FACTORY, "adapter_name_or_path": "out", "lora_rank": 4}, {"pretrained": "out"}),
        ("hf-trainer", {**TRL, "use_dora": True, "lora_modules_to_save": ["lm_head"]},
         {"dora": True, "modules_to_save": ["lm_head"], "r": 16, "alpha": 32, "dropout": 0.05}),
        ("torchtune", {**TUNE, "model": {"_component_": "a.lora_b", "lora_attn_modules": ["q_proj"],
                                         "use_dora": True}},
         {"dora": True, "target_modules": ["q_proj"]}),
    ],
)  # fmt: skip
def test_fields_of_adapters(
    tool: str, config: dict[str, Any], lora: dict[str, Any], tmp_path: Path
) -> None:
    """Each tool's keys become those of model.lora; published adapters have their own."""
    made, dropped = recipe_and_dropped(tool, config, tmp_path)
    assert (made["model"]["lora"], dropped) == (lora, [])


@pytest.mark.parametrize(
    ("tool", "config", "key"),
    [
        ("llama-factory", {**FACTORY, "quantization_bit": 3}, "quantization_bit"),
        ("llama-factory", {**FACTORY, "quantization_bit": 4, "quantization_type": "fp4"},
         "quantization_bit"),
        ("hf-trainer", {**TRL, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "load_in_4bit"),
        ("axolotl", {**AXOLOTL, "adapter": None, "load_in_8bit": True}, "load_in_8bit"),
        ("axolotl", {**AXOLOTL, "peft_init_lora_weights": "loftq"}, "peft_init_lora_weights"),
    ],
)  # fmt: skip
def test_other_forms_are_reported(
    tool: str, config: dict[str, Any], key: str, tmp_path: Path
) -> None:
    """A form that is not here, and quantized weights without adapters, have no counterpart."""
    made, dropped = recipe_and_dropped(tool, config, tmp_path)
    assert "quantize" not in made["model"]
    assert key in dropped


@pytest.mark.parametrize(
    ("keys", "divided"),
    [
        ({"load_in_4bit": True, "fsdp": ["full_shard", "offload"]}, {"replicate": 1}),
        ({"load_in_8bit": True, "fsdp": ["full_shard"]}, None),
    ],
)
def test_division_that_packed_weights_lack(
    keys: dict[str, Any], divided: dict[str, Any] | None, tmp_path: Path
) -> None:
    """FSDP's offload is left out beside nf4, and FSDP beside int8."""
    made, _ = recipe_and_dropped("axolotl", {**AXOLOTL, **keys}, tmp_path)
    assert made.get("parallel") == divided
