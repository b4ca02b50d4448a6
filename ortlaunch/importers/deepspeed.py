"""Convert DeepSpeed's JSON.

Batch, optimizer, schedule and precision become keys of the recipe; all else goes to zero.deepspeed.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from ortlaunch.importers import sharding
from ortlaunch.importers.draft import Draft, number_or_none
from ortlaunch.importers.reading import read_config_tree_or_refuse
from ortlaunch.importers.rules import (
    ANY_KEY,
    NO_COUNTERPART,
    OTHER_OPTIMIZER,
    OTHER_SCHEDULE,
    WITHOUT_EFFECT,
    ConfigKey,
    EvenIfEmpty,
    Outcome,
    Rule,
    Rules,
    apply_rule_and_tell_if_converted,
    assume,
    convert_section_by_rules,
    drop,
    first_of,
    needless,
    put,
    whole_config_key,
)
from ortlaunch.recipe.fields.deepspeed_keys import DEEPSPEED_OWNED, NESTED_KEYS, TOP_LEVEL_KEYS
from ortlaunch.recipe.hints.keys_of_other_tools import NO_MODEL_PARALLELISM

_OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "fused_adam",
    "lamb": "lamb",
    "fusedlamb": "lamb",
    "sgd": "sgd",
}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
# Settings that only DeepSpeedCPUAdam has.
_CPU_ADAM = (
    "fp16.fp16_master_weights_and_grads",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
)
# Sections of which each setting is a key of zero.deepspeed.
_RAW_SECTIONS = (*NESTED_KEYS, "activation_checkpointing", "data_types")
_LEFT_TO_TRAINER = needless(
    "Hugging Face's Trainer fills it in from its own arguments, and so does the recipe"
)
_WARMUPS = ("schedule.warmup_steps", "schedule.warmup_ratio")
_BATCH_SIZES = (
    *("train_batch_size", "train_micro_batch_size_per_gpu"),
    "gradient_accumulation_steps",
)


def convert_deepspeed_config(draft: Draft) -> None:
    """Convert a whole config, which has no model and no data."""
    _convert_deepspeed_keys(whole_config_key(draft))


def deepspeed_file_or_mapping(key: ConfigKey) -> Rule:
    """Convert the DeepSpeed config of another tool's config: a path, or a mapping."""
    if key.node.node_type == "mapping":
        _convert_deepspeed_keys(key._replace(path=""))
        return needless("each of its settings is converted")
    # Beside the config, and relative to the current folder. An absolute path replaces the folder.
    candidate_paths = (Path(key.node.location.source).parent / key.text, Path(key.text))
    config_path = next((candidate for candidate in candidate_paths if candidate.is_file()), None)
    if config_path is None:
        # Usual names are such as ds_z3_config.json.
        zero_stage = next((stage for stage in (3, 2, 1) if str(stage) in key.text), 0)
        return (
            drop("there is no such file here; give zero.stage, and zero.deepspeed"),
            sharding.zero_stage_rule(zero_stage, "by that file's name"),
        )
    file_tree = read_config_tree_or_refuse(config_path)
    _convert_deepspeed_keys(key._replace(path="", node=file_tree))
    return needless(f"{config_path} is read")


def _convert_deepspeed_keys(config_key: ConfigKey) -> None:
    zero = config_key.child("zero_optimization")
    # `true` is an older form of stage 1.
    zero_stage = zero.get("stage") if isinstance(zero, dict) else zero is True
    stage_rule = sharding.zero_stage_rule(
        int(number_or_none(zero_stage) or zero_stage is True), "by zero_optimization"
    )
    apply_rule_and_tell_if_converted(config_key, stage_rule)
    global_size, micro_size, accumulation_steps = (
        number_or_none(config_key.child(name)) for name in _BATCH_SIZES
    )
    if micro_size and not global_size and not accumulation_steps:
        config_key.draft.assume_default("batch.accumulation_steps", 1, "DeepSpeed's default")
    convert_section_by_rules(config_key, _RULES)


def _unless_auto(rule: Rule, *recipe_keys: str) -> Rule:
    """Return a rule that leaves the value `auto` to the base, whose keys are alternatives."""

    def rule_unless_auto(key: ConfigKey) -> Rule:
        if key.value != "auto":
            return rule
        key.draft.keys_left_to_base.append(recipe_keys)
        return _LEFT_TO_TRAINER

    return rule_unless_auto


def _unless_disabled(outcome: Outcome) -> Rule:
    return lambda key: WITHOUT_EFFECT if key.child("enabled") is False else outcome


def _unless_zero(outcome: Outcome) -> Rule:
    return lambda key: WITHOUT_EFFECT if key.value == 0 else outcome


def _optimizer_type(key: ConfigKey) -> Rule:
    name = _OPTIMIZERS.get(key.text.lower())
    return put("optimizer.name", name or "adamw", "" if name else OTHER_OPTIMIZER)


def _schedule_type(key: ConfigKey) -> Rule:
    settings = key.sibling("params") or {}
    if key.text not in _SCHEDULES:
        return put("schedule.name", "linear", OTHER_SCHEDULE)
    is_linear = settings.get("warmup_type") == "linear"
    remark = "" if is_linear else "the warm-up is linear, DeepSpeed's by itself logarithmic"
    name_rule = put("schedule.name", _SCHEDULES[key.text], remark)
    has_warmup = any(key.draft.recipe_tree.find_subtree(tuple(p.split("."))) for p in _WARMUPS)
    if has_warmup or "warmup_num_steps" in settings:
        return name_rule
    return (name_rule, assume("schedule.warmup_steps", 1000, "DeepSpeed's default"))


def _precision_rule(precision_name: str, key: ConfigKey) -> Rule:
    """Convert a precision's section: whether it is used, and the loss scaling."""
    enabled = key.child("enabled")
    is_left_to_trainer = enabled == "auto"
    is_used = enabled is True or (
        is_left_to_trainer and key.recipe_value("precision") == precision_name
    )
    if not is_used:
        return _LEFT_TO_TRAINER if is_left_to_trainer else needless("it is not enabled")
    settings = key.child_keys()
    enabled_rule = _LEFT_TO_TRAINER if is_left_to_trainer else put("precision", precision_name)
    apply_rule_and_tell_if_converted(settings.pop("enabled"), enabled_rule)
    for name, child_key in settings.items():
        raw_key = child_key._replace(path=f"{precision_name}.{name}")
        apply_rule_and_tell_if_converted(raw_key, _RAW_SETTING)
    return ()


def _is_of_offload(key: ConfigKey) -> bool:
    return DEEPSPEED_OWNED.get(key.path, "").startswith("zero.offload.")


def _offload_setting(key: ConfigKey) -> Rule:
    owning_key = DEEPSPEED_OWNED[key.path]
    # DeepSpeed's older keys have `true` for the device cpu; pin_memory is a boolean in both.
    is_older_form = key.value is True and not owning_key.endswith("pin_memory")
    return put(owning_key, "cpu" if is_older_form else key.value)


# Settings without a field of the recipe become keys of zero.deepspeed, one by one.
_RAW_SETTING: Rule = first_of(
    (
        lambda key: key.node.node_type == "mapping" and key.path in _RAW_SECTIONS,
        {ANY_KEY: EvenIfEmpty(lambda key: _RAW_SETTING)},
    ),
    (
        lambda key: key.path in _CPU_ADAM and key.value,
        drop(
            "it needs DeepSpeed's own Adam on the CPU; the optimizer here is torch's or "
            "ONNX Runtime's"
        ),
    ),
    (
        lambda key: (
            key.path == "zero_optimization.stage"
            or (key.path == "zero_optimization" and key.value is True)
        ),
        needless("zero.stage has it"),
    ),
    (
        lambda key: _is_of_offload(key) and key.value in (None, False, "none"),
        WITHOUT_EFFECT,
    ),
    # "auto" is for Trainer; DeepSpeed itself would reject it.
    (lambda key: '"auto"' in json.dumps(key.value), _LEFT_TO_TRAINER),
    (_is_of_offload, _offload_setting),
    otherwise=lambda key: put(f"zero.deepspeed.{key.path}"),
)
_FORM_OF_WARMUP = needless("the form of the warm-up")
# The schedule first: DeepSpeed's warmup_max_lr takes the place of the optimizer's rate.
_TOP_LEVEL_RULES: Rules = {
    "scheduler": {
        "type": _schedule_type,
        "params": {
            "warmup_num_steps": _unless_auto(put("schedule.warmup_steps"), *_WARMUPS),
            "warmup_max_lr": _unless_auto(put("optimizer.learning_rate")),
            "total_num_steps": _unless_auto(put("train.max_steps")),
            "cos_min_ratio": _unless_auto(put("schedule.minimum_ratio")),
            "warmup_type": _FORM_OF_WARMUP,
            ANY_KEY: _unless_auto(
                lambda key: needless("it begins at 0") if key.value == 0 else NO_COUNTERPART
            ),
        },
    },
    "optimizer": {
        "type": _optimizer_type,
        "params": {
            "lr": _unless_auto(
                first_of(
                    (
                        lambda key: (
                            key.draft.set_value_or_none("optimizer.learning_rate")
                            not in (None, key.value)
                        ),
                        needless("of no effect there: scheduler.params.warmup_max_lr is the rate"),
                    ),
                    otherwise=put("optimizer.learning_rate"),
                )
            ),
            "eps": _unless_auto(put("optimizer.epsilon")),
            "betas": _unless_auto(put("optimizer.betas")),
            "weight_decay": _unless_auto(put("optimizer.weight_decay")),
            "momentum": _unless_auto(put("optimizer.momentum")),
            "adam_w_mode": EvenIfEmpty(
                lambda key: (
                    needless("weight decay is decoupled")
                    if key.value
                    else drop("weight decay is decoupled, not L2")
                )
            ),
            "bias_correction": WITHOUT_EFFECT,
            ANY_KEY: _unless_auto(NO_COUNTERPART),
        },
    },
    **dict.fromkeys(
        ("tensor_parallel", "pipeline"), drop(f"no counterpart; nearest: {NO_MODEL_PARALLELISM}")
    ),
    "steps_per_print": needless("it is of DeepSpeed's own lines"),
    "fp16": partial(_precision_rule, "fp16"),
    "bf16": partial(_precision_rule, "bf16"),
    "bfloat16": partial(_precision_rule, "bf16"),
    "train_batch_size": _unless_zero(put("batch.global_size")),
    "train_micro_batch_size_per_gpu": _unless_zero(put("batch.micro_size")),
    # Two of them decide the third, and a recipe with all three could contradict itself.
    "gradient_accumulation_steps": first_of(
        (
            lambda key: all(number_or_none(key.sibling(name)) for name in _BATCH_SIZES),
            needless("the other two decide it"),
        ),
        otherwise=_unless_zero(put("batch.accumulation_steps")),
    ),
    "gradient_clipping": _unless_zero(put("train.max_grad_norm")),
    "tensorboard": _unless_disabled(put("log.trackers", ["tensorboard"])),
    "wandb": _unless_disabled(put("log.trackers", ["wandb"])),
}
_RULES: Rules = {
    **{
        name: _unless_auto(rule, DEEPSPEED_OWNED.get(name, ""))
        for name, rule in _TOP_LEVEL_RULES.items()
    },
    ANY_KEY: EvenIfEmpty(
        _unless_auto(
            first_of(
                (lambda key: key.name in TOP_LEVEL_KEYS, _RAW_SETTING),
                (lambda key: not key.value or key.child("enabled") is False, WITHOUT_EFFECT),
                otherwise=drop("DeepSpeed has no such setting, or has it no more"),
            )
        )
    ),
}
