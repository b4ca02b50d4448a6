"""Convert accelerate's YAML, which describes processes; the training comes from --base.

A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

from ortlaunch.importers import deepspeed, sharding
from ortlaunch.importers.draft import Draft, is_empty, number_of_node

# accelerate's keys of a DeepSpeed plugin -> the recipe's.
_OFFLOAD = {"offload_optimizer_device": "optimizer", "offload_param_device": "parameters"}
_NONE_WORDS = ("none", "no", "standard")


def convert_accelerate_config(draft: Draft) -> None:
    """Convert a config."""
    machine_count_node = draft.take_key("num_machines")
    process_count_node = draft.take_key("num_processes")
    machine_count = int(number_of_node(machine_count_node) or 1)
    draft.set_recipe_key_unless_set_and_report("launch.nodes", machine_count_node, "num_machines")
    if process_count_node is not None:
        processes_per_machine = max(
            1, int(number_of_node(process_count_node) or 1) // machine_count
        )
        draft.set_recipe_key_unless_set_and_report(
            "launch.processes_per_node", process_count_node, "num_processes", processes_per_machine
        )
    deepspeed_node = draft.take_key("deepspeed_config")
    for key, node in deepspeed_node.children.items() if deepspeed_node is not None else ():
        key_path = f"deepspeed_config.{key}"
        if is_empty(node) or node.scalar in _NONE_WORDS:
            draft.import_report.empty.append(key_path)
        elif key == "zero_stage":
            sharding.assume_zero_stage_and_eager_for_stage_3(
                draft, int(number_of_node(node) or 0), "deepspeed_config.zero_stage"
            )
            draft.report_needless(key_path, node, "zero.stage has it")
        elif key in _OFFLOAD:
            draft.set_recipe_key_unless_set_and_report(
                f"zero.offload.{_OFFLOAD[str(key)]}", node, key_path
            )
        elif key == "deepspeed_config_file":
            deepspeed.convert_deepspeed_file_or_mapping(draft, node)
        elif key in ("gradient_accumulation_steps", "gradient_clipping"):
            recipe_key = (
                "batch.accumulation_steps" if "steps" in str(key) else "train.max_grad_norm"
            )
            draft.set_recipe_key_unless_set_and_report(recipe_key, node, key_path)
        elif str(key).startswith("zero3_"):
            draft.report_needless(key_path, node, "it is so with zero.stage 3")
        else:
            draft.report_dropped(key_path, node, "no counterpart")
    precision = draft.take_key("mixed_precision")
    if precision is not None and precision.scalar != "no":
        draft.set_recipe_key_unless_set_and_report("precision", precision, "mixed_precision")
    sharding.convert_fsdp_keys_to_zero(draft)
