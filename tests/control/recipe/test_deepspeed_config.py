"""Tests of DeepSpeed's JSON, made of the recipe and the plan, with raw settings merged last."""

from __future__ import annotations

from typing import Any

import pytest

from ortlaunch.planning.deepspeed_config import deepspeed_config_or_none
from ortlaunch.recipe.fields.zero import Zero
from tests.makers import host, plan, recipe

# DeepSpeed 0.19's names. A large steps_per_print suppresses its output.
PLAIN = {
    "train_batch_size": 48,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 10**9,
    # DeepSpeed's own default clips to 1.0.
    "gradient_clipping": 0.0,
}


def config(**sections: Any) -> dict[str, Any] | None:
    """Return the JSON for micro batches of 4, 2 of them in a step, on 6 ranks."""
    return deepspeed_config_or_none(recipe(**sections), 4, 2, 6)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"zero": None}, None),
        ({"zero": {}}, PLAIN),
        ({"zero": {"stage": 0}}, {**PLAIN, "zero_optimization": {"stage": 0}}),
        ({"zero": {"stage": 3}}, {**PLAIN, "zero_optimization": {"stage": 3}}),
        (
            {"zero": {}, "train": {"max_steps": 1, "max_grad_norm": 0.5}},
            {**PLAIN, "gradient_clipping": 0.5},
        ),
        ({"zero": {}, "precision": "fp16"}, {**PLAIN, "fp16": {"enabled": True}}),
        ({"zero": {}, "precision": "bf16"}, {**PLAIN, "bf16": {"enabled": True}}),
        (
            {"zero": {"deepspeed": {"wall_clock_breakdown": True}}},
            {**PLAIN, "wall_clock_breakdown": True},
        ),
        (
            {"zero": {"stage": 2, "deepspeed": {"zero_optimization": {"reduce_bucket_size": 5}}}},
            {**PLAIN, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5}},
        ),
        (
            {"zero": {"deepspeed": {"fp16": {"initial_scale_power": 8}}}, "precision": "fp16"},
            {**PLAIN, "fp16": {"enabled": True, "initial_scale_power": 8}},
        ),
        (
            {"zero": {"stage": 2, "offload": {"optimizer": "cpu"}}},
            {
                **PLAIN,
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "pin_memory": False},
                },
            },
        ),
        (
            {
                "zero": {
                    "stage": 3,
                    "offload": {"parameters": "nvme", "nvme_path": "/scratch", "pin_memory": True},
                }
            },
            {
                **PLAIN,
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": {
                        "device": "nvme",
                        "pin_memory": True,
                        "nvme_path": "/scratch",
                    },
                },
            },
        ),
        (
            # A raw setting overrides ortlaunch's own.
            {"zero": {"deepspeed": {"zero_allow_untested_optimizer": False}}},
            {**PLAIN, "zero_allow_untested_optimizer": False},
        ),
    ],
)
def test_config(sections: dict[str, Any], expected: dict[str, Any] | None) -> None:
    """Each recipe gives exactly the expected JSON."""
    # The whole JSON: an additional key could change DeepSpeed's behaviour.
    assert config(**sections) == expected


def test_raw_settings_stay_the_recipes() -> None:
    """The merge changes neither the recipe's raw settings nor an earlier JSON."""
    raw = {"zero_optimization": {"reduce_bucket_size": 5}}
    made = recipe(zero=Zero(stage=2, deepspeed=raw))
    first = deepspeed_config_or_none(made, 4, 2, 6)
    assert deepspeed_config_or_none(made, 4, 2, 6) == first
    assert raw == {"zero_optimization": {"reduce_bucket_size": 5}}


@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_the_plans_batch_is_deepspeeds(ranks: int) -> None:
    """The three batch fields are the plan's; DeepSpeed checks that they agree."""
    given = {"global_size": 48, "micro_size": 4, "accumulation_steps": None}
    made = plan(recipe(batch=given, zero={"stage": 1}), [host("localhost", ranks)], "torchrun")
    assert made.deepspeed is not None
    batch = made.batch
    assert made.deepspeed["train_batch_size"] == batch.global_samples == 48
    assert made.deepspeed["train_micro_batch_size_per_gpu"] == batch.micro_samples == 4
    # 48 samples / (4 samples x ranks).
    assert made.deepspeed["gradient_accumulation_steps"] == batch.accumulation_steps == 12 // ranks
