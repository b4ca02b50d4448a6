"""Convert accelerate's YAML, which describes processes; the training comes from --base."""

from __future__ import annotations

from ortlaunch.importers import deepspeed, sharding
from ortlaunch.importers.draft import Draft, number_or_none
from ortlaunch.importers.renamed_keys import convert_config_by_rules
from ortlaunch.importers.rules import (
    ANY_KEY,
    NO_COUNTERPART,
    WITHOUT_EFFECT,
    ConfigKey,
    Outcome,
    Rule,
    Rules,
    needless,
    put,
)


def convert_accelerate_config(draft: Draft) -> None:
    """Convert a config."""
    convert_config_by_rules(draft, _RULES)


def _processes_per_node(key: ConfigKey) -> Rule:
    machine_count = max(1, int(number_or_none(key.sibling("num_machines")) or 1))
    return put("launch.processes_per_node", max(1, int(key.numeric_value or 1) // machine_count))


def _unless_none(outcome: Outcome) -> Rule:
    """Return the rule of a key that a word switches off."""
    return lambda key: WITHOUT_EFFECT if key.value in ("none", "no", "standard") else outcome


_TRUE_AT_STAGE_3 = needless("it is so with zero.stage 3")
_RULES: Rules = {
    "num_machines": put("launch.nodes"),
    "num_processes": _processes_per_node,
    "deepspeed_config": {
        "zero_stage": lambda key: (
            sharding.zero_stage_rule(int(key.numeric_value or 0), key.path),
            needless("zero.stage has it"),
        ),
        "offload_optimizer_device": _unless_none(put("zero.offload.optimizer")),
        "offload_param_device": _unless_none(put("zero.offload.parameters")),
        "deepspeed_config_file": deepspeed.deepspeed_file_or_mapping,
        "gradient_accumulation_steps": put("batch.accumulation_steps"),
        "gradient_clipping": put("train.max_grad_norm"),
        "zero3_init_flag": _TRUE_AT_STAGE_3,
        "zero3_save_16bit_model": _TRUE_AT_STAGE_3,
        ANY_KEY: _unless_none(NO_COUNTERPART),
    },
    "mixed_precision": lambda key: (
        needless("precision is fp32 by itself") if key.value == "no" else put("precision")
    ),
    # Its mesh comes before FSDP's strategy.
    "parallelism_config": {
        **{
            f"parallelism_config_{name}": rule
            for name, rule in sharding.FSDP_RULES.items()
            if name.startswith(("dp_", "tp_"))
        },
        ANY_KEY: lambda key: needless("1 stands for none") if key.value == 1 else NO_COUNTERPART,
    },
    **sharding.FSDP_RULES,
    "distributed_type": lambda key: (
        sharding.ALL_RANKS_SHARE_ONE_COPY if key.value == "FSDP" else None
    ),
}
