"""Convert accelerate's YAML, which describes processes; the training comes from --base.

A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

from ortlaunch.other_tools import deepspeed, sharding
from ortlaunch.other_tools.draft import Draft, is_empty, number

# accelerate's keys of a DeepSpeed plugin -> the recipe's.
_OFFLOAD = {"offload_optimizer_device": "optimizer", "offload_param_device": "parameters"}
_NONE = ("none", "no", "standard")


def convert(draft: Draft) -> None:
    """Convert a config."""
    hosts = draft.pop("num_machines")
    ranks = draft.pop("num_processes")
    count = int(number(hosts) or 1)
    draft.put("launch.nodes", hosts, "num_machines")
    if ranks is not None:
        each = max(1, int(number(ranks) or 1) // count)
        draft.put("launch.processes_per_node", ranks, "num_processes", each)
    plugin = draft.pop("deepspeed_config")
    for key, node in plugin.children.items() if plugin is not None else ():
        name = f"deepspeed_config.{key}"
        if is_empty(node) or node.scalar in _NONE:
            draft.account.empty.append(name)
        elif key == "zero_stage":
            sharding.shard(draft, int(number(node) or 0), "deepspeed_config.zero_stage")
            draft.needless(name, node, "zero.stage has it")
        elif key in _OFFLOAD:
            draft.put(f"zero.offload.{_OFFLOAD[str(key)]}", node, name)
        elif key == "deepspeed_config_file":
            deepspeed.beside(draft, node)
        elif key in ("gradient_accumulation_steps", "gradient_clipping"):
            path = "batch.accumulation_steps" if "steps" in str(key) else "train.max_grad_norm"
            draft.put(path, node, name)
        elif str(key).startswith("zero3_"):
            draft.needless(name, node, "it is so with zero.stage 3")
        else:
            draft.drop(name, node, "no counterpart")
    precision = draft.pop("mixed_precision")
    if precision is not None and precision.scalar != "no":
        draft.put("precision", precision, "mixed_precision")
    sharding.fsdp(draft)
