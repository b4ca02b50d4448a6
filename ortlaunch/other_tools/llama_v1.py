"""Rename the keys of LLaMA-Factory's second schema (examples/v1) to those of its first one."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.errors import RecipeError
from ortlaunch.json_types import Json
from ortlaunch.other_tools import sharding
from ortlaunch.other_tools.draft import Draft, in_one_line, tree_of
from ortlaunch.other_tools.reading import config
from ortlaunch.recipe.text.tree import Tree

# Keys that identify the schema; its configs have no stage.
MARKS = ("model_class", "peft_config", "train_dataset")
_RENAMED = {"model": "model_name_or_path", "micro_batch_size": "per_device_train_batch_size"}
_PEFT = {
    "name": "finetuning_type",
    "r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target",
    "export_dir": "export_dir",
}
_OPTIMIZER = {
    "name": "optim",
    "wd": "weight_decay",
    "adamw_eps": "adam_epsilon",
}
# Values that torch's Muon has by itself.
_MUON = {"momentum": 0.95, "nesterov": True, "ns_steps": 5}
_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user",
         "assistant_tag": "assistant"}  # fmt: skip
_OPENAI: Json = {"columns": {"messages": "messages"}, "tags": _TAGS}


def rename(draft: Draft) -> None:
    """Rename keys, and take sections apart; keys without a counterpart stay as they are."""
    left = draft.left
    left.setdefault("stage", tree_of("sft", draft.recipe))
    for theirs, ours in _RENAMED.items():
        if theirs in left:
            left[ours] = left.pop(theirs)
    if "peft_config" not in left:
        left["finetuning_type"] = tree_of("full", draft.recipe)
    for section, names in (("peft_config", _PEFT), ("optim_config", _OPTIMIZER)):
        node = draft.pop(section)
        for key, child in node.children.items() if node is not None else ():
            if key in names:
                left[names[str(key)]] = child
            elif key == "adamw_betas":
                draft.put("optimizer.betas", child, f"{section}.{key}")
            elif _MUON.get(str(key)) == child.plain():
                draft.needless(f"{section}.{key}", child, "torch's Muon has it")
            elif child.scalar is not None or child.children:
                draft.drop(f"{section}.{key}", child, "no counterpart")
    _distributed(draft)
    strategy = left.get("batching_strategy")
    if strategy is not None and strategy.scalar == "normal":
        draft.needless("batching_strategy", left.pop("batching_strategy"), "it is so by itself")


def _distributed(draft: Draft) -> None:
    node = draft.pop("dist_config")
    name = node.find(("name",)) if node is not None else None
    file = node.find(("config_file",)) if node is not None else None
    if file is not None:
        draft.left["deepspeed"] = file
    elif node is not None and name is not None and in_one_line(name).startswith("fsdp"):
        sharding.shard(draft, 3, "by dist_config")
        draft.alter("dist_config", node, "zero.stage: 3; DeepSpeed's ZeRO shards instead of FSDP")
    else:
        draft.drop("dist_config", node, "no counterpart; give zero.stage")


def data_sets(node: Tree) -> tuple[Path, Json] | None:
    """Return a file of data sets as the first schema has them, and its folder's parent.

    The paths in it are relative to the folder in which the tool is started.
    """
    name = in_one_line(node)
    folders = (Path(), *Path(node.place.source).absolute().parents)
    file = next((each / name for each in folders if (each / name).is_file()), None)
    if file is None:
        return None
    try:
        found = config(file).plain()
    except RecipeError:
        return None
    sets = {
        each: {
            ("file_name" if given.get("source") == "local" else "hf_hub_url"): given.get("path"),
            "formatting": given.get("converter"),
            "num_samples": given.get("size"),
            "split": given.get("split"),
            **(_OPENAI if given.get("converter") == "openai" else {}),
        }
        for each, given in found.items()
        if isinstance(given, dict)
    }
    return Path(str(file).removesuffix(name)), sets
