"""Rename the keys of LLaMA-Factory's second schema (examples/v1) to those of its first one."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.base.errors import RecipeError
from ortlaunch.base.json_types import Json
from ortlaunch.importers import sharding
from ortlaunch.importers.draft import Draft, one_line_text, recipe_value_tree_located_at_node
from ortlaunch.importers.reading import read_config_tree_or_refuse
from ortlaunch.recipe.text.tree import Tree

# Keys that identify the schema; its configs have no stage.
SECOND_SCHEMA_KEYS = ("model_class", "peft_config", "train_dataset")
_RENAMED_KEYS = {"model": "model_name_or_path", "micro_batch_size": "per_device_train_batch_size"}
_PEFT_KEYS = {
    "name": "finetuning_type",
    "r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target",
    "export_dir": "export_dir",
}
_OPTIMIZER_KEYS = {
    "name": "optim",
    "wd": "weight_decay",
    "adamw_eps": "adam_epsilon",
}
# Values that torch's Muon has by itself.
_MUON_DEFAULTS = {"momentum": 0.95, "nesterov": True, "ns_steps": 5}
_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user",
         "assistant_tag": "assistant"}  # fmt: skip
_OPENAI_COLUMNS: Json = {"columns": {"messages": "messages"}, "tags": _TAGS}


def rename_second_schema_keys_and_split_sections(draft: Draft) -> None:
    """Rename keys, and take sections apart; keys without a counterpart stay as they are."""
    unconverted = draft.unconverted
    unconverted.setdefault("stage", recipe_value_tree_located_at_node("sft", draft.recipe_tree))
    for config_key, first_schema_key in _RENAMED_KEYS.items():
        if config_key in unconverted:
            unconverted[first_schema_key] = unconverted.pop(config_key)
    if "peft_config" not in unconverted:
        unconverted["finetuning_type"] = recipe_value_tree_located_at_node(
            "full", draft.recipe_tree
        )
    for section, renamed_keys in (("peft_config", _PEFT_KEYS), ("optim_config", _OPTIMIZER_KEYS)):
        node = draft.take_key(section)
        for key, child in node.children.items() if node is not None else ():
            if key in renamed_keys:
                unconverted[renamed_keys[str(key)]] = child
            elif key == "adamw_betas":
                draft.set_recipe_key_unless_set_and_report(
                    "optimizer.betas", child, f"{section}.{key}"
                )
            elif _MUON_DEFAULTS.get(str(key)) == child.value_without_locations():
                draft.report_needless(f"{section}.{key}", child, "torch's Muon has it")
            elif child.scalar is not None or child.children:
                draft.report_dropped(f"{section}.{key}", child, "no counterpart")
    _convert_dist_config_to_deepspeed_or_zero_3(draft)
    batching_node = unconverted.get("batching_strategy")
    if batching_node is not None and batching_node.scalar == "normal":
        draft.report_needless(
            "batching_strategy", unconverted.pop("batching_strategy"), "it is so by itself"
        )


def _convert_dist_config_to_deepspeed_or_zero_3(draft: Draft) -> None:
    node = draft.take_key("dist_config")
    name_node = node.find_subtree(("name",)) if node is not None else None
    file_node = node.find_subtree(("config_file",)) if node is not None else None
    if file_node is not None:
        draft.unconverted["deepspeed"] = file_node
    elif node is not None and name_node is not None and one_line_text(name_node).startswith("fsdp"):
        sharding.assume_zero_stage_and_eager_for_stage_3(draft, 3, "by dist_config")
        draft.report_altered(
            "dist_config", node, "zero.stage: 3; DeepSpeed's ZeRO shards instead of FSDP"
        )
    else:
        draft.report_dropped("dist_config", node, "no counterpart; give zero.stage")


def read_parent_folder_and_listed_data_sets_or_none(
    file_name_node: Tree,
) -> tuple[Path, Json] | None:
    """Return a file of data sets as the first schema has them, and its folder's parent.

    The paths in it are relative to the folder in which the tool is started.
    """
    file_name = one_line_text(file_name_node)
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
    return Path(str(data_sets_path).removesuffix(file_name)), converted_sets
