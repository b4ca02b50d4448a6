"""Rename the keys of LLaMA-Factory's second schema (examples/v1) to those of its first one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ortlaunch.base.errors import RecipeError
from ortlaunch.importers import sharding
from ortlaunch.importers.draft import Draft, recipe_value_tree_located_at_node
from ortlaunch.importers.reading import read_config_tree_or_refuse
from ortlaunch.importers.rules import (
    NO_COUNTERPART,
    ConfigKey,
    Rule,
    Rules,
    drop,
    needless,
    put,
)
from ortlaunch.recipe.text.tree import Tree


class DescribedSets(NamedTuple):
    """The data sets of a file that describes them, by name."""

    folder: Path
    descriptions: Mapping[str, object]


# Keys that identify the schema; its configs have no stage.
SECOND_SCHEMA_KEYS = ("model_class", "peft_config", "train_dataset")
_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user",
         "assistant_tag": "assistant"}  # fmt: skip
_OPENAI_COLUMNS = {"columns": {"messages": "messages"}, "tags": _TAGS}


def rename_second_schema_keys(draft: Draft) -> None:
    """Rename keys to those of the first schema; others are left to the rules."""
    config = draft.config
    implied_keys = {"stage": "sft"} | (
        {} if "peft_config" in config else {"finetuning_type": "full"}
    )
    for name, value in implied_keys.items():
        config.setdefault(name, recipe_value_tree_located_at_node(value, draft.recipe_tree))
    for name, first_name in _RENAMED_KEYS.items():
        if name in config:
            config[first_name] = config.pop(name)
    for section, renamed_keys in _RENAMED_KEYS_BY_SECTION.items():
        children = config[section].children if section in config else {}
        config |= {renamed_keys[str(key)]: children[key] for key in children if key in renamed_keys}


def _muon_default(value: object) -> Rule:
    """Return the rule of a setting of Muon that torch's has by itself."""
    return lambda key: needless("torch's Muon has it") if key.value == value else NO_COUNTERPART


def _dist_config(key: ConfigKey) -> Rule:
    if key.child("config_file"):
        return ()
    if str(key.child("name")).startswith("fsdp"):
        return ({**sharding.SETTINGS_RULES, "name": ()}, sharding.ALL_RANKS_SHARE_ONE_COPY)
    return drop("no counterpart; give parallel or zero.stage")


_RENAMED_KEYS = {"model": "model_name_or_path", "micro_batch_size": "per_device_train_batch_size"}
_RENAMED_KEYS_BY_SECTION = {
    "peft_config": {
        "name": "finetuning_type",
        "r": "lora_rank",
        "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout",
        "target_modules": "lora_target",
        "export_dir": "export_dir",
    },
    "optim_config": {"name": "optim", "wd": "weight_decay", "adamw_eps": "adam_epsilon"},
    "dist_config": {"config_file": "deepspeed"},
}
# What is left of the sections.
RULES: Rules = {
    "peft_config": dict.fromkeys(_RENAMED_KEYS_BY_SECTION["peft_config"], ()),
    "optim_config": {
        **dict.fromkeys(_RENAMED_KEYS_BY_SECTION["optim_config"], ()),
        "adamw_betas": put("optimizer.betas"),
        "momentum": _muon_default(0.95),
        "nesterov": _muon_default(True),
        "ns_steps": _muon_default(5),
    },
    "dist_config": _dist_config,
    "batching_strategy": lambda key: (
        needless("it is so by itself") if key.value == "normal" else None
    ),
}


def read_parent_folder_and_listed_data_sets_or_none(
    file_name_node: Tree,
) -> DescribedSets | None:
    """Return a file of data sets as the first schema has them, and its folder's parent.

    The paths in it are relative to the folder in which the tool is started.
    """
    file_name = str(file_name_node.scalar)
    folders = (Path(), *Path(file_name_node.location.source).absolute().parents)
    data_sets_path = next(
        (set_name / file_name for set_name in folders if (set_name / file_name).is_file()), None
    )
    if data_sets_path is None:
        return None
    try:
        content = read_config_tree_or_refuse(data_sets_path).value_without_locations()
    except RecipeError:
        return None
    converted_sets = {
        set_name: {
            (
                "file_name" if set_description.get("source") == "local" else "hf_hub_url"
            ): set_description.get("path"),
            "formatting": set_description.get("converter"),
            "num_samples": set_description.get("size"),
            "split": set_description.get("split"),
            **(_OPENAI_COLUMNS if set_description.get("converter") == "openai" else {}),
        }
        for set_name, set_description in content.items()
        if isinstance(set_description, dict)
    }
    return DescribedSets(Path(str(data_sets_path).removesuffix(file_name)), converted_sets)
