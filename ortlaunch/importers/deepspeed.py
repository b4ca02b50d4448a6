"""Convert DeepSpeed's JSON.

Batch, optimizer, schedule and precision become keys of the recipe; all else goes to zero.deepspeed.
A key that is only renamed is a row of a table in recipe/hints/keys_of_other_tools.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from ortlaunch.importers import sharding
from ortlaunch.importers.draft import Draft, is_empty, number_of_node, one_line_text
from ortlaunch.recipe.fields.deepspeed_keys import DEEPSPEED_OWNED, NESTED_KEYS, TOP_LEVEL_KEYS
from ortlaunch.recipe.hints.keys_of_other_tools import TRUE_BY_ITSELF
from ortlaunch.recipe.text.source_location import parse_key_path
from ortlaunch.recipe.text.tree import Tree

_OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "fused_adam",
    "lamb": "lamb",
    "fusedlamb": "lamb",
    "sgd": "sgd",
}
_OPTIMIZER_SETTINGS = {
    "lr": "learning_rate",
    "eps": "epsilon",
    "betas": "betas",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
}
# Settings that only DeepSpeedCPUAdam has.
_CPU_ADAM = (
    "fp16.fp16_master_weights_and_grads",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
)
_AUTO_REMARK = "Hugging Face's Trainer fills it in from its own arguments, and so does the recipe"
_WARMUPS = ("schedule.warmup_steps", "schedule.warmup_ratio")
_WARMUP_STEPS = 1000  # DeepSpeed's default of warmup_num_steps


def convert_deepspeed_config(draft: Draft) -> None:
    """Convert a whole config, which has no model and no data."""
    _convert_all_deepspeed_keys(draft, dict(draft.unconverted), "")
    draft.unconverted = {}


def convert_deepspeed_file_or_mapping(draft: Draft, config_node: Tree) -> None:
    """Convert the DeepSpeed config of another tool's config: a path, or a mapping."""
    if config_node.node_type == "mapping":
        return _convert_all_deepspeed_keys(
            draft, {str(key): child for key, child in config_node.children.items()}, "deepspeed."
        )
    # Beside the config, and relative to the current folder. An absolute path replaces the folder.
    candidate_paths = (
        Path(config_node.location.source).parent / one_line_text(config_node),
        Path(one_line_text(config_node)),
    )
    config_path = next((candidate for candidate in candidate_paths if candidate.is_file()), None)
    if config_path is None:
        draft.report_dropped(
            "deepspeed",
            config_node,
            "there is no such file here; give zero.stage, and zero.deepspeed",
        )
        # Usual names are such as ds_z3_config.json.
        return sharding.assume_zero_stage_and_eager_for_stage_3(
            draft,
            next((stage for stage in (3, 2, 1) if str(stage) in one_line_text(config_node)), 0),
            "by that file's name",
        )
    # Imported here: only a config with a path needs it.
    from ortlaunch.importers.reading import read_config_tree_or_refuse

    inner_config = read_config_tree_or_refuse(config_path)
    draft.report_needless("deepspeed", config_node, f"{config_path} is read")
    return _convert_all_deepspeed_keys(
        draft, {str(key): child for key, child in inner_config.children.items()}, ""
    )


def _convert_all_deepspeed_keys(
    draft: Draft, node_by_key: dict[str, Tree], key_prefix: str
) -> None:
    sharding.assume_zero_stage_and_eager_for_stage_3(
        draft,
        _stage_of_zero_optimization_or_zero(node_by_key.get("zero_optimization")),
        "by zero_optimization",
    )
    _report_needless_or_assume_accumulation_steps(
        draft, node_by_key
    )  # before the loop, because it removes a redundant size
    # The schedule first: DeepSpeed's warmup_max_lr takes the place of the optimizer's rate.
    for key, node in sorted(node_by_key.items(), key=lambda part: part[0] != "scheduler"):
        if node.scalar == "auto":
            _leave_to_base(draft, f"{key_prefix}{key}", node, DEEPSPEED_OWNED.get(key, ""))
        elif key == "steps_per_print":
            draft.report_needless(f"{key_prefix}{key}", node, "it is of DeepSpeed's own lines")
        elif key == "optimizer":
            _convert_optimizer_type_or_adamw_and_params(draft, node)
        elif key == "scheduler":
            _convert_scheduler_type_or_linear_and_params(draft, node)
        elif key in ("fp16", "bf16", "bfloat16"):
            _convert_enabled_precision_and_keep_raw_keys(draft, key, node)
        elif key in DEEPSPEED_OWNED:
            _set_owning_recipe_key_unless_empty_or_disabled(
                draft, f"{key_prefix}{key}", node, DEEPSPEED_OWNED[key]
            )
        elif key in TOP_LEVEL_KEYS:
            _keep_as_raw_deepspeed_keys_or_report(draft, key, node, key)
        elif is_empty(node) or _is_disabled_section(node):
            draft.import_report.empty.append(f"{key_prefix}{key}")
        elif key == "wandb":
            draft.set_recipe_key_unless_set_and_report(
                "log.trackers", node, f"{key_prefix}{key}", ["wandb"]
            )
        else:
            draft.report_dropped(
                f"{key_prefix}{key}", node, "DeepSpeed has no such setting, or has it no more"
            )


def _leave_to_base(draft: Draft, config_key: str, node: Tree, *recipe_keys: str) -> None:
    """Leave keys of the recipe, which are alternatives, to the base."""
    draft.report_needless(config_key, node, _AUTO_REMARK)
    draft.keys_left_to_base.append(recipe_keys)


def _report_needless_or_assume_accumulation_steps(
    draft: Draft, node_by_key: dict[str, Tree]
) -> None:
    """Convert the three batch sizes; without any, Trainer's or the base's remain."""
    global_size, micro_size, accumulation_steps = (
        number_of_node(node_by_key.get(key))
        for key in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    )
    # Two of them decide the third, and a recipe with all three could contradict itself.
    if global_size and micro_size and accumulation_steps:
        draft.report_needless(
            "gradient_accumulation_steps",
            node_by_key.pop("gradient_accumulation_steps"),
            "the other two decide it",
        )
    elif micro_size and not global_size and not accumulation_steps:
        draft.assume_default("batch.accumulation_steps", 1, "DeepSpeed's default")


def _stage_of_zero_optimization_or_zero(zero_node: Tree | None) -> int:
    """Return the stage of `zero_optimization`; 0 without one."""
    # `true` is an older form of stage 1.
    if zero_node is not None and zero_node.scalar is True:
        return 1
    stage = number_of_node(zero_node.find_subtree(("stage",))) if zero_node is not None else None
    return int(stage) if stage is not None else 0


def _set_owning_recipe_key_unless_empty_or_disabled(
    draft: Draft, config_key: str, value_node: Tree, recipe_key: str
) -> None:
    if is_empty(value_node) or value_node.scalar == 0 or _is_disabled_section(value_node):
        draft.import_report.empty.append(config_key)
    elif recipe_key == "log.trackers":  # DeepSpeed's key of this path is tensorboard
        draft.set_recipe_key_unless_set_and_report(
            recipe_key, value_node, config_key, ["tensorboard"]
        )
    else:
        draft.set_recipe_key_unless_set_and_report(recipe_key, value_node, config_key)


def _convert_offload_setting_unless_none_or_auto(
    draft: Draft, config_key: str, value_node: Tree, recipe_key: str
) -> None:
    """Convert a setting of offloading."""
    if value_node.scalar in (None, False, "none"):
        draft.import_report.empty.append(config_key)
    elif value_node.scalar == "auto":
        draft.report_needless(config_key, value_node, _AUTO_REMARK)
    else:
        # DeepSpeed's older keys have `true` for the device cpu; pin_memory is a boolean in both.
        is_older_form = value_node.scalar is True and not recipe_key.endswith("pin_memory")
        draft.set_recipe_key_unless_set_and_report(
            recipe_key, value_node, config_key, "cpu" if is_older_form else value_node.scalar
        )


def _is_disabled_section(section: Tree) -> bool:
    enabled = section.find_subtree(("enabled",))
    return enabled is not None and is_empty(enabled)


def _drop_other_keys(draft: Draft, section_name: str, section: Tree) -> None:
    """Report keys beside `type` and `params` as dropped."""
    for name, child in section.children.items():
        if name not in ("type", "params"):
            draft.report_dropped(f"{section_name}.{name}", child, "no counterpart")


def _convert_optimizer_type_or_adamw_and_params(draft: Draft, optimizer_node: Tree) -> None:
    type_node = optimizer_node.find_subtree(("type",))
    params_node = optimizer_node.find_subtree(("params",))
    if type_node is not None:
        recipe_optimizer = _OPTIMIZERS.get(str(type_node.scalar).lower())
        remark = "" if recipe_optimizer else "another optimizer: there is none of that name here"
        draft.set_recipe_key_unless_set_and_report(
            "optimizer.name", type_node, "optimizer.type", recipe_optimizer or "adamw", remark
        )
    for key, child in params_node.children.items() if params_node is not None else ():
        _convert_or_report_optimizer_param(draft, str(key), child)
    _drop_other_keys(draft, "optimizer", optimizer_node)


def _convert_or_report_optimizer_param(draft: Draft, setting_name: str, value_node: Tree) -> None:
    key_path = f"optimizer.params.{setting_name}"
    learning_rate_node = draft.recipe_tree.find_subtree(("optimizer", "learning_rate"))
    if value_node.scalar == "auto":
        draft.report_needless(key_path, value_node, _AUTO_REMARK)
    elif (
        setting_name == "lr"
        and learning_rate_node is not None
        and learning_rate_node.scalar != value_node.scalar
    ):
        draft.report_needless(
            key_path, value_node, "of no effect there: scheduler.params.warmup_max_lr is the rate"
        )
    elif setting_name in _OPTIMIZER_SETTINGS:
        draft.set_recipe_key_unless_set_and_report(
            f"optimizer.{_OPTIMIZER_SETTINGS[setting_name]}", value_node, key_path
        )
    elif setting_name == "adam_w_mode" and value_node.scalar is False:
        draft.report_dropped(key_path, value_node, "weight decay is decoupled, not L2")
    elif setting_name == "adam_w_mode":
        draft.report_needless(key_path, value_node, "weight decay is decoupled")
    elif setting_name in TRUE_BY_ITSELF and value_node.scalar is False:
        draft.report_dropped(
            key_path, value_node, f"here it is always so: {TRUE_BY_ITSELF[setting_name]}"
        )
    elif is_empty(value_node) or (setting_name in TRUE_BY_ITSELF and value_node.scalar is True):
        draft.import_report.empty.append(key_path)
    else:
        draft.report_dropped(key_path, value_node, "no counterpart")


def _convert_scheduler_type_or_linear_and_params(draft: Draft, scheduler_node: Tree) -> None:
    type_node = scheduler_node.find_subtree(("type",))
    params_node = scheduler_node.find_subtree(("params",))
    schedule_by_type = {
        "WarmupLR": "constant",
        "WarmupDecayLR": "linear",
        "WarmupCosineLR": "cosine",
    }
    values: dict[str, Tree] = (
        {str(key): child for key, child in params_node.children.items()}
        if params_node is not None
        else {}
    )
    if type_node is not None:
        warmup_type_node = values.get("warmup_type")
        has_logarithmic_warmup = schedule_by_type.get(str(type_node.scalar)) and (
            warmup_type_node is None or warmup_type_node.scalar != "linear"
        )
        remark = (
            "the warm-up is linear, DeepSpeed's by itself logarithmic"
            if has_logarithmic_warmup
            else ""
        )
        remark = (
            remark
            if str(type_node.scalar) in schedule_by_type
            else "another schedule: there is none of that name here"
        )
        draft.set_recipe_key_unless_set_and_report(
            "schedule.name",
            type_node,
            "scheduler.type",
            schedule_by_type.get(str(type_node.scalar), "linear"),
            remark,
        )
    # DeepSpeed's setting -> key of the recipe.
    recipe_key_by_setting = {"warmup_num_steps": "schedule.warmup_steps", "warmup_max_lr": "optimizer.learning_rate",
              "total_num_steps": "train.max_steps", "cos_min_ratio": "schedule.minimum_ratio"}  # fmt: skip
    for key, child in values.items():
        _convert_or_report_scheduler_param(draft, key, child, recipe_key_by_setting)
    has_warmup = any(draft.recipe_tree.find_subtree(parse_key_path(path)) for path in _WARMUPS)
    if (
        type_node is not None
        and str(type_node.scalar) in schedule_by_type
        and "warmup_num_steps" not in values
        and not has_warmup
    ):
        draft.assume_default("schedule.warmup_steps", _WARMUP_STEPS, "DeepSpeed's default")
    _drop_other_keys(draft, "scheduler", scheduler_node)


def _convert_or_report_scheduler_param(
    draft: Draft, setting_name: str, value_node: Tree, recipe_key_by_setting: dict[str, str]
) -> None:
    key_path = f"scheduler.params.{setting_name}"
    recipe_key = recipe_key_by_setting.get(setting_name)
    recipe_node = (
        draft.recipe_tree.find_subtree(tuple(recipe_key.split("."))) if recipe_key else None
    )
    if value_node.scalar == "auto":
        _leave_to_base(
            draft, key_path, value_node, *(_WARMUPS if setting_name == "warmup_num_steps" else ())
        )
    # Configs often repeat the optimizer's lr as warmup_max_lr.
    elif recipe_node is not None and recipe_node.scalar == value_node.scalar:
        draft.report_needless(key_path, value_node, f"{recipe_key} has it")
    elif recipe_key:
        draft.set_recipe_key_unless_set_and_report(recipe_key, value_node, key_path)
    elif value_node.scalar in (0, 0.0, "linear", "log"):
        draft.report_needless(
            key_path,
            value_node,
            "it begins at 0" if value_node.scalar == 0 else "the form of the warm-up",
        )
    else:
        draft.report_dropped(key_path, value_node, "no counterpart")


def _convert_enabled_precision_and_keep_raw_keys(
    draft: Draft, section_name: str, precision_node: Tree
) -> None:
    """Convert a section of a precision: whether it is used, and the loss scaling."""
    precision_name = "fp16" if section_name == "fp16" else "bf16"
    enabled = precision_node.find_subtree(("enabled",))
    is_auto = enabled is not None and enabled.scalar == "auto"
    if enabled is None or not (
        enabled.scalar is True
        or (is_auto and draft.expected_recipe_value_or_none("precision") == precision_name)
    ):
        return draft.report_needless(
            section_name, precision_node, _AUTO_REMARK if is_auto else "it is not enabled"
        )
    if is_auto:
        draft.report_needless(f"{section_name}.enabled", enabled, _AUTO_REMARK)
    else:
        draft.set_recipe_key_unless_set_and_report(
            "precision", enabled, f"{section_name}.enabled", precision_name
        )
    for name, child in precision_node.children.items():
        if name != "enabled":
            _keep_as_raw_deepspeed_keys_or_report(
                draft, f"{precision_name}.{name}", child, f"{precision_name}.{name}"
            )
    return None


def _keep_as_raw_deepspeed_keys_or_report(
    draft: Draft, config_key: str, value_node: Tree, deepspeed_key: str
) -> None:
    """Convert settings without a field of the recipe to keys of zero.deepspeed, one by one."""
    if value_node.node_type == "mapping" and deepspeed_key in (
        *NESTED_KEYS,
        "activation_checkpointing",
        "data_types",
    ):
        for name, child in value_node.children.items():
            _keep_as_raw_deepspeed_keys_or_report(
                draft, f"{config_key}.{name}", child, f"{deepspeed_key}.{name}"
            )
    elif deepspeed_key in _CPU_ADAM and not is_empty(value_node):
        draft.report_dropped(
            config_key,
            value_node,
            (
                "it needs DeepSpeed's own Adam on the CPU; the optimizer here is torch's or "
                "ONNX Runtime's"
            ),
        )
    elif DEEPSPEED_OWNED.get(deepspeed_key, "").startswith("zero.offload."):
        _convert_offload_setting_unless_none_or_auto(
            draft, config_key, value_node, DEEPSPEED_OWNED[deepspeed_key]
        )
    elif deepspeed_key == "zero_optimization.stage" or (
        deepspeed_key == "zero_optimization" and value_node.scalar is True
    ):
        draft.report_needless(config_key, value_node, "zero.stage has it")
    # "auto" is for Trainer; DeepSpeed itself would reject it.
    elif value_node.scalar == "auto" or (
        value_node.node_type == "mapping"
        and "auto" in json.dumps(value_node.value_without_locations())
    ):
        draft.report_needless(config_key, value_node, _AUTO_REMARK)
    else:
        draft.set_recipe_key_unless_set_and_report(
            f"zero.deepspeed.{deepspeed_key}", value_node, config_key
        )
