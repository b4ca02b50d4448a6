"""FSDP2 on two and four ranks: the losses, evaluations and exports of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import (
    BERT,
    EAGER,
    FULL,
    SMALL,
    TWO_RANKS,
    Run,
    Train,
    ended_well,
    exported_again,
    exported_evaluation,
    merged,
)

FOUR_RANKS = ("--launcher=torchrun", "--nproc-per-node=4")
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Tied embeddings, evaluations, clipping; steps of two micro batches on one rank.
WHOLE = merged(
    BERT,
    {**EAGER, "model": {"config": STILL}, "train": {"max_steps": 8, "max_grad_norm": 0.5}},
)
LLAMA = {
    "task": "causal-lm",
    "config": {"model_type": "llama", **SMALL, "max_position_embeddings": 32},
    "lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
}
DIVIDED = merged(WHOLE, {"parallel": {}})


@pytest.fixture(scope="module")
def whole(train: Train) -> Run:
    """A small BERT in one process."""
    return ended_well(train("whole", WHOLE))


@pytest.fixture(scope="module")
def divided(train: Train) -> Run:
    """The same on two ranks, which share it."""
    return ended_well(train("divided", DIVIDED, *TWO_RANKS))


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "export/model.safetensors")


def require_same_training(run: Run, whole: Run) -> None:
    """Losses, norms, evaluations and exported weights are those of one process."""
    assert run.losses() == pytest.approx(whole.losses(), rel=1e-6)
    for name in ("gradient_norm", "evaluation_loss"):
        expected = [value for _, value in whole.values(name)]
        assert [value for _, value in run.values(name)] == pytest.approx(expected, rel=1e-5)
    exported, expected_weights = weights(run), weights(whole)
    assert exported.keys() == expected_weights.keys()
    for name, value in expected_weights.items():
        torch.testing.assert_close(exported[name], value, rtol=1e-4, atol=1e-5)


def test_two_ranks_that_share_a_model_train_as_one(divided: Run, whole: Run) -> None:
    """Every value of the run is that of one process, and the record says what was divided."""
    require_same_training(divided, whole)
    assert divided.truth()["sharding"] == (
        "FSDP2: 1 x the model, each on 2 ranks, gathered in 2 layers and the rest"
    )
    for name in ("parameters", "trained_parameters"):
        assert divided.truth()[name] == whole.truth()[name]
    assert "mesh: 1 x the model, each shared by 2 ranks (FSDP2): 0-1" in divided.err + divided.out


@pytest.mark.slow
@pytest.mark.ci
def test_a_checkpoint_of_parts_as_a_model(divided: Run, home: Path) -> None:
    """`ortlaunch export` of the checkpoint is the run's own export, to the byte."""
    assert exported_again(divided, home)


@pytest.mark.slow
@pytest.mark.ci
def test_copies_of_a_divided_model(train: Train, whole: Run) -> None:
    """Four ranks, two copies on two ranks each (HSDP), train as one process."""
    recipe = merged(DIVIDED, {"parallel": {"shard": 2}, "batch": {"micro_size": 4}})
    run = ended_well(train("copies", recipe, *FOUR_RANKS))
    require_same_training(run, whole)
    assert run.truth()["sharding"].startswith("FSDP2: 2 x the model, each on 2 ranks")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("inductor", {"engine": {"name": "inductor"}}),
        ("lora", {"model": {**LLAMA, "config": {**LLAMA["config"]}}}),
        ("recomputed", {"model": {"gradient_checkpointing": True}}),
        ("accumulated", {"batch": {"micro_size": 2}}),
        ("chunked", {"engine": {"chunked_loss": 32}}),
        ("sgd", {"optimizer": {"name": "sgd", "momentum": 0.9}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_form_is_that_of_one_process(
    name: str, changes: dict[str, Any], train: Train
) -> None:
    """Each form on two ranks trains as the same form in one process."""
    base = {**WHOLE, "model": changes["model"]} if name == "lora" else merged(WHOLE, changes)
    one = ended_well(train(f"{name}-one", base))
    two = ended_well(train(f"{name}-two", {**base, "parallel": {}}, *TWO_RANKS))
    require_same_training(two, one)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_weights_are_near_those_of_one_process(precision: str, train: Train) -> None:
    """In 16 bits losses are those of one process within rounding."""
    one = ended_well(train(f"{precision}-one", merged(WHOLE, {"precision": precision})))
    two = ended_well(
        train(f"{precision}-two", merged(DIVIDED, {"precision": precision}), *TWO_RANKS)
    )
    assert two.losses() == pytest.approx(one.losses(), rel=0.02)


@pytest.mark.slow
@pytest.mark.ci
def test_a_module_of_ones_own_is_divided_by_its_lists(train: Train, home: Path) -> None:
    """A custom module, of which a rank has no row of a small parameter; named blocks, too."""
    recipe = merged(FULL, {"log": {"trackers": []}, "model": {"arguments": {"dropout": 0.0}}})
    one = ended_well(train("own-one", recipe))
    for name, parallel in (("own-two", {}), ("own-named", {"blocks": ["Linear"]})):
        two = ended_well(train(name, {**recipe, "parallel": parallel}, *TWO_RANKS))
        assert two.losses() == pytest.approx(one.losses(), rel=1e-5)
        expected = exported_evaluation(two, home)
        assert two.values("evaluation_loss")[-1][1] == pytest.approx(expected, rel=1e-5)
        assert "2 layers" in two.truth()["sharding"]
    refused = train("own-wrong", {**recipe, "parallel": {"blocks": ["Linaer"]}}, *TWO_RANKS)
    assert refused.status == 2
    assert "parallel.blocks: the model has no layer of class Linaer; its classes are" in refused.err
