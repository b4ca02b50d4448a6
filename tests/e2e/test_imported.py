"""Imported configs of other tools train at a tiny size."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ortlaunch.importers import convert_config_to_recipe
from tests.e2e.runs import EAGER, SMALL, TWO_RANKS, Train, ended_well

pytestmark = [pytest.mark.slow, pytest.mark.ci]
CONFIGS = Path(__file__).parents[1] / "foreign_configs"


def test_an_imported_config_trains(train: Train) -> None:
    """Axolotl's LoRA example trains with its batch, schedule and recomputation."""
    # Its model and data are on the hub; a tiny model and local text replace them.
    made = yaml.safe_load(
        convert_config_to_recipe(
            CONFIGS / "axolotl.yml", None, None, ("data.train=python-docs",)
        ).recipe_yaml
    )
    made["model"].update(
        pretrained=None, config={"model_type": "llama", **SMALL, "max_position_embeddings": 32}
    )
    # There are no weights to quantize then.
    assert made["model"].pop("quantize") == {"type": "int8"}
    made["data"].update(tokenizer={"train": "bpe", "vocab_size": 300}, sequence_length=32)
    made["schedule"]["warmup_steps"] = 1
    run = ended_well(
        train("imported", {**made, **EAGER, "precision": "fp32", "train": {"max_steps": 3}})
    )
    assert len(run.losses()) == 3
    truth = run.truth()
    assert (
        truth["trained_parameters"] < truth["parameters"],
        truth["gradient_checkpointing"] is not None,
    ) == (
        True,
        True,
    )
    assert dict(run.values("samples"))[3] == 3 * 2 * 4


def test_an_imported_config_of_fsdp2_trains(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA-Factory's LoRA example with FSDP2 divides the model over two ranks."""
    monkeypatch.chdir(CONFIGS)
    found = convert_config_to_recipe(Path("llama_factory_v1.yaml"), None, None, ())
    made = yaml.safe_load(found.recipe_yaml)
    made["model"].update(
        pretrained=None,
        config={"model_type": "qwen3", **SMALL, "num_key_value_heads": 2, "head_dim": 16},
    )
    made["data"] = {
        "train": "python-docs",
        "tokenizer": {"train": "bpe", "vocab_size": 300},
        "sequence_length": 32,
    }
    made.update(precision="fp32", train={"max_steps": 3}, log={"every_steps": 1})
    run = ended_well(train("imported-fsdp2", made, *TWO_RANKS))
    assert len(run.losses()) == 3
    assert run.truth()["sharding"].startswith("FSDP2: 1 x the model, each on 2 ranks")
