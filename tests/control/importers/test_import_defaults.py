"""Test `ortlaunch import` of values that another tool fills in, or has by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.importers import convert_config_to_recipe
from tests.control.foreign import config, said

SHIPPED = Path(__file__).parents[3] / "recipes"


def _base(folder: Path, **sections: Any) -> Path:
    """Write a recipe over the shipped one of llama2-7b/tiny, with sections of its own."""
    path = folder / "base.yaml"
    path.write_text(
        json.dumps({"extends": str(SHIPPED / "llama2-7b/tiny.yaml"), **sections}), encoding="utf-8"
    )
    return path


def _over(folder: Path, deepspeed: dict[str, Any], **sections: Any) -> tuple[Any, Any]:
    """Return the recipe of DeepSpeed's config over a base, and the import with its report."""
    (folder / "ds.json").write_text(json.dumps(deepspeed))
    found = convert_config_to_recipe(folder / "ds.json", "deepspeed", _base(folder, **sections), ())
    return yaml.safe_load(found.recipe_yaml), found


# accelerate's zero_stage2_offload_config.json.
_STAGE_2 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                   "total_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True},
                          "allgather_partitions": True, "overlap_comm": True},
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip


def test_values_of_auto_are_the_bases(tmp_path: Path) -> None:
    """Values that the config leaves open are the base's: sizes, warm-up, rate and intervals."""
    schedule = {"name": "cosine", "warmup_steps": None, "warmup_ratio": 0.1}
    sizes = {"global_size": None, "micro_size": 8, "accumulation_steps": 2}
    made, found = _over(tmp_path, _STAGE_2, batch=sizes, schedule=schedule)
    assert made["batch"] == {"micro_size": 8, "accumulation_steps": 1}
    assert made["schedule"] == {"name": "linear", "warmup_ratio": 0.1, "warmup_steps": None}
    assert made.get("precision", "fp32") == "fp32"
    assert made["log"].get("every_steps") != 2000
    assert "steps_per_print" in said(found, "needless")


def test_a_size_that_the_base_may_give_up(tmp_path: Path) -> None:
    """Of three sizes one that the config leaves open is left out."""
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
             "train_batch_size": "auto"}  # fmt: skip
    made, _ = _over(tmp_path, sizes)
    assert made["batch"] == {"micro_size": 2, "accumulation_steps": 3}


def test_settings_of_a_precision_that_the_base_has(tmp_path: Path) -> None:
    """`enabled: auto` keeps the base's fp16, and takes the settings beside it."""
    made, _ = _over(tmp_path, _STAGE_2, precision="fp16")
    assert made["precision"] == "fp16"
    assert made["zero"]["deepspeed"]["fp16"] == {"loss_scale": 0, "initial_scale_power": 16}


@pytest.mark.parametrize(
    ("params", "scheduler", "values", "where"),
    [
        # DeepSpeed's WarmupLR sets the rate to warmup_max_lr (0.19.8: seen in its 11 first rates).
        ({"lr": 1e-4}, {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}, (1e-3, 10),
         ("needless", "optimizer.params.lr")),
        ({"lr": 1e-4}, {"warmup_num_steps": 10}, (1e-4, 10), None),
        # DeepSpeed's default.
        ({"lr": 1e-4}, {}, (1e-4, 1000), None),
        ({"lr": 1e-4, "bias_correction": False, "adam_w_mode": True}, {"warmup_num_steps": 10},
         (1e-4, 10), ("dropped", "optimizer.params.bias_correction")),
        ({"lr": 1e-4, "adam_w_mode": True}, {"warmup_num_steps": 10}, (1e-4, 10),
         ("needless", "optimizer.params.adam_w_mode")),
    ],
)  # fmt: skip
def test_rates_of_deepspeed(
    params: dict[str, Any],
    scheduler: dict[str, Any],
    values: tuple[float, int],
    where: tuple[str, str] | None,
    tmp_path: Path,
) -> None:
    """The schedule's rate wins, its warm-up has DeepSpeed's default, and Adam's modes are told."""
    keys = {"optimizer": {"type": "Adam", "params": params},
            "scheduler": {"type": "WarmupLR", "params": scheduler}}  # fmt: skip
    made, found = _over(tmp_path, keys, train={"max_steps": 2000})
    rates = (made["optimizer"]["learning_rate"], made["schedule"]["warmup_steps"])
    assert rates == values
    if where is not None:
        assert where[1] in said(found, where[0])


def test_defaults_of_trainer_ask_for_nothing(tmp_path: Path) -> None:
    """No default of the installed TrainingArguments is without a counterpart; use_cpu is taken."""
    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir="x", use_cpu=True).to_json_string()
    found = convert_config_to_recipe(
        config(tmp_path, **json.loads(arguments)), "hf-trainer", None, ()
    )
    assert said(found, "dropped") == {}
    assert yaml.safe_load(found.recipe_yaml)["launch"] == {"device": "cpu"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("average_tokens_across_devices", False),
        ("remove_unused_columns", False),
        ("label_smoothing_factor", 0.1),
        ("eval_delay", 2),
        ("accelerator_config", {"split_batches": True}),
    ],
)
def test_other_values_than_the_defaults(key: str, value: object, tmp_path: Path) -> None:
    """A value that turns off what is always done, or asks for what is not here, is reported."""
    found = convert_config_to_recipe(config(tmp_path, **{key: value}), "hf-trainer", None, ())
    assert list(said(found, "dropped")) == [key]


def test_a_mixture_of_trl(tmp_path: Path) -> None:
    """TRL's mixture becomes a list of sources; a part of the rows is reported."""
    parts = [{"id": "a/b", "config": "all", "split": "train"}, {"id": "c/d", "weight": 0.5}]
    given = {"dataset_mixture": {"datasets": parts, "test_split_size": 0.02},
             "eos_token": "<|im_end|>"}  # fmt: skip
    path = config(tmp_path, block_size="absent", train_file="absent", **given)
    found = convert_config_to_recipe(path, "hf-trainer", None, ())
    data = yaml.safe_load(found.recipe_yaml)["data"]
    chats = {"format": "hub", "messages_column": "messages", "train_on": "all"}
    first = {**chats, "name": "a/b", "subset": "all", "split": "train"}
    assert data["train"] == [
        {"source": first, "weight": None},
        {"source": {**chats, "name": "c/d"}, "weight": None},
    ]
    assert (data["evaluation"], data["special_tokens"]) == (
        {"share": 0.02},
        {"eos_token": "<|im_end|>"},
    )
    assert "all rows of c/d" in said(found, "changed")["dataset_mixture"]
