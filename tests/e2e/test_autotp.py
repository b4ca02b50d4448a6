"""DeepSpeed's AutoTP beside ZeRO 0 to 2: losses, evaluations and exports of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import FULL, TWO_RANKS, Run, Train, ended_well, exported_again, merged
from tests.e2e.test_parallel import (
    BERT_PLAN,
    FOUR_RANKS,
    LLAMA,
    MIXTRAL,
    QWEN,
    WHOLE,
    require_same_training,
    weights,
    with_model,
)

pytest.importorskip("deepspeed")

EXPERTS = dict.fromkeys(
    [f"model.layers.*.mlp.experts{name}" for name in ("", ".gate_up_proj", ".down_proj")],
    "replicate",
)
PLANNED = {"parallel": {"tensor": 2, "tensor_plan": BERT_PLAN}}
ADAPTED: dict[str, Any] = {
    **LLAMA,
    "lora": {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]},
}


@pytest.fixture(scope="module")
def unsliced(train: Train) -> Run:
    """A small Qwen in one process."""
    return ended_well(train("unsliced", with_model(QWEN)))


@pytest.fixture(scope="module")
def sliced(train: Train) -> Run:
    """The same on two ranks, which compute each layer together."""
    sections = {"parallel": {"tensor": 2}, "zero": {"stage": 1}, "engine": {"parity_steps": 1}}
    return ended_well(train("sliced", with_model(QWEN, **sections), *TWO_RANKS))


def test_two_ranks_that_compute_each_layer_train_as_one(sliced: Run, unsliced: Run) -> None:
    """Slices are those of transformers, and gathered gradients those of plain PyTorch."""
    require_same_training(sliced, unsliced)
    parity = sliced.truth()["parity"]
    assert (parity["verdict"], parity["loss_difference"] < 1e-6) == ("passed", True)
    assert 0 < parity["gradient_difference"] < 2e-6
    assert sliced.truth()["sharding"] == "DeepSpeed ZeRO 1, AutoTP: 2 ranks compute each layer"
    slices = sliced.truth()["tensor_slices"]
    assert slices["model.embed_tokens.weight"] == 0
    assert slices["model.layers.*.self_attn.o_proj.weight"] == 1
    assert slices["model.layers.*.self_attn.q_norm.weight"] is None
    mesh = "mesh: 1 x the model, each shared by 2 ranks that compute each layer together (DeepSpeed's AutoTP)"
    assert mesh in sliced.out + sliced.err


def test_layers_that_deepspeed_cannot_slice(train: Train) -> None:
    """Experts in one tensor are refused by name."""
    recipe = with_model(MIXTRAL, parallel={"tensor": 2}, zero={"stage": 1})
    run = train("experts-refused", recipe, *TWO_RANKS)
    assert run.status == 2
    assert "cannot slice model.layers.0.mlp.experts (MixtralExperts, moe_tp_experts)" in run.err


@pytest.mark.slow
@pytest.mark.ci
def test_a_plan_that_lacks_a_layer_is_found(train: Train) -> None:
    """Norms between sliced layers get a part of their gradient, which DeepSpeed does not notice."""
    plan = dict.fromkeys(
        ("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm"), "replicate"
    )
    sections = {"parallel": {"tensor": 2, "tensor_plan": plan}, "zero": {"stage": 2}}
    for name, steps, message in (
        ("compared", "auto", "engine eager and plain PyTorch differ by more than 0.0001 in step 1"),
        ("lacking", 0, "k_norm.weight gets another gradient on each rank that computes its layer"),
    ):
        recipe = with_model(QWEN, **sections, engine={"parity_steps": steps})
        run = train(name, recipe, *TWO_RANKS)
        assert run.status != 0
        assert not run.values("loss")
        assert message in run.err


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "model", "sections", "launcher"),
    [
        ("no zero", QWEN, {"zero": {"stage": 0}}, TWO_RANKS),
        ("adapters", ADAPTED, {}, TWO_RANKS),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("copies", QWEN, {"zero": {"stage": 2}, "batch": {"micro_size": 4}}, FOUR_RANKS),
                ("accumulated", QWEN, {"batch": {"micro_size": 2}}, FOUR_RANKS),
                ("compiled", QWEN, {"engine": {"name": "inductor"}}, TWO_RANKS),
                ("planned", WHOLE["model"], PLANNED, TWO_RANKS),
                ("experts", MIXTRAL, {"parallel": {"tensor": 2, "tensor_plan": EXPERTS}}, TWO_RANKS),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_every_form_is_that_of_one_process(
    name: str,
    model: dict[str, Any],
    sections: dict[str, Any],
    launcher: tuple[str, ...],
    train: Train,
    home: Path,
) -> None:
    """Each stage, copies, accumulation, adapters, compiled layers and plans train as one rank."""
    model = {"task": "masked-lm", **model} if name == "planned" else model
    one = ended_well(train(f"{name}-one", with_model(model)))
    both = {"parallel": {"tensor": 2}, "zero": {"stage": 1}, **sections}
    # The first compilation of collectives takes minutes on a busy machine.
    run = ended_well(train(f"{name}-sliced", with_model(model, **both), *launcher, timeout=580))
    require_same_training(run, one)
    assert exported_again(run, home)


@pytest.mark.slow
@pytest.mark.ci
def test_a_checkpoint_continues_in_other_worlds(train: Train) -> None:
    """AutoTP, transformers' slices, FSDP2, one rank, and AutoTP again: the curve of one process."""
    half = {"checkpoint": {"every_steps": 4}, "schedule": {"name": "constant"}}
    whole = ended_well(train("constant", with_model(QWEN, **half)))
    autotp = {"parallel": {"tensor": 2}, "zero": {"stage": 1}}
    worlds: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        (autotp, TWO_RANKS),
        ({"parallel": {"tensor": 2}}, TWO_RANKS),
        ({"parallel": {"shard": 2}}, TWO_RANKS),
        ({}, ()),
        (autotp, TWO_RANKS),
    ]
    for number, (sections, launcher) in enumerate(worlds):
        steps = {"train": {"max_steps": (2, 4, 5, 6, 8)[number]}}
        recipe = merged(with_model(QWEN, **half), {**sections, **steps})
        run = ended_well(train("lives", recipe, *launcher))
    assert [step for step, _ in run.values("loss")] == [step for step, _ in whole.values("loss")]
    assert run.losses() == pytest.approx(whole.losses(), rel=1e-6)
    # The export of the last world, of slices.
    for name, value in weights(whole).items():
        assert weights(run)[name] == pytest.approx(value, abs=1e-5)


@pytest.mark.slow
@pytest.mark.ci
def test_a_module_of_ones_own(train: Train) -> None:
    """Its layers are sliced by the plan of the recipe."""
    recipe = merged(FULL, {"log": {"trackers": []}, "model": {"arguments": {"dropout": 0.0}}})
    one = ended_well(train("own-one", recipe))
    plan = {"layers.0": "colwise", "layers.3": "rowwise"}
    sections = {"parallel": {"tensor": 2, "tensor_plan": plan}, "zero": {"stage": 1}}
    two = ended_well(train("own-two", merged(recipe, sections), *TWO_RANKS))
    assert two.losses() == pytest.approx(one.losses(), rel=1e-5)
