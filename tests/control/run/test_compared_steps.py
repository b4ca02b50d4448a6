"""Tests of `engine.parity_steps: auto`: the trainings that are compared with plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortlaunch.api.train import default_compared_step_count
from ortlaunch.planning.describe import plan_description_text
from ortlaunch.recipe.rules.parity import ParityStepCount, parity_step_count_and_reason
from tests.makers import bert, host, plan, recipe

ORT = {"engine": {"name": "ort"}}
WORDS = {"train": "python-docs", "tokenizer": "here", "sequence_length": 128}


def causal(model_type: str) -> dict[str, Any]:
    return {
        "model": {"task": "causal-lm", "config": {"model_type": model_type}},
        "data": WORDS,
        **ORT,
    }


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        # No test of ortlaunch can have trained the user's own model.
        (ORT, ParityStepCount(1, "your own model")),
        (causal("gpt2"), ParityStepCount(1, "as every model but BERT and Llama")),
        (causal("llama"), ParityStepCount(0, "every release of ortlaunch compares llama with it")),
        ({"engine": {"name": "eager"}}, ParityStepCount(0)),
        ({"engine": {"name": "inductor"}}, ParityStepCount(0)),
        ({"engine": {"parity_steps": 0}}, ParityStepCount(0)),
        ({"engine": {"parity_steps": 2}}, ParityStepCount(2)),
        # Each rank has a part of the weights only.
        (
            {**ORT, "zero": {"stage": 3}},
            ParityStepCount(0, "under ZeRO 3 no rank has all weights for the comparison"),
        ),
    ],
    ids=str,
)
def test_auto_compares_what_no_test_trains(
    sections: dict[str, Any], expected: ParityStepCount
) -> None:
    """`auto` compares one step of models that no test trains with engine ort."""
    assert parity_step_count_and_reason(recipe(**sections)) == expected


def test_the_built_models_type_counts() -> None:
    """The type of a pretrained model counts once the model has been loaded."""
    # The recipe gives its name alone, so the type is passed separately.
    made = recipe(model={"task": "causal-lm", "pretrained": "somewhere/else"}, data=WORDS, **ORT)
    assert parity_step_count_and_reason(made, "llama").steps == 0
    assert parity_step_count_and_reason(made, "gpt2").steps == 1


def test_a_plan_says_what_is_compared() -> None:
    """A plan has a line for the comparison, and its memory: gradients, and plain PyTorch's pass."""
    made = recipe(**ORT)
    assert (
        "parity: step 1 is compared with plain PyTorch once (your own model)"
        in plan_description_text(plan(made), made)
    )
    asked = bert(engine={"parity_steps": 2})
    memory = plan(asked).memory
    assert memory is not None
    # Two sets of gradients of 4 bytes a parameter, and activations.
    assert memory.compared > 2 * 4 * memory.trainable
    parts = dict(memory.by_stage)[memory.chosen]
    plain = plan(bert(engine={"parity_steps": 0})).memory
    assert plain is not None
    assert parts.overhead == dict(plain.by_stage)[plain.chosen].overhead + memory.compared
    assert "are for a comparison with plain PyTorch" in plan_description_text(plan(asked), asked)
    assert "compared" not in plan_description_text(plan(bert(**ORT)), bert(**ORT))


@pytest.mark.parametrize(("section", "steps"), [("", 3), ("\nparallel: {tensor: 2}", 1)])
def test_steps_that_parity_compares_by_itself(section: str, steps: int, tmp_path: Path) -> None:
    """Of a model that is divided, only the first; a run that resumes has none."""
    path = tmp_path / "recipe.yaml"
    base = Path(__file__).parents[2] / "recipes_broken/base.yaml"
    own = "engine: {name: inductor}\noptimizer: {name: adamw}\nzero: null"
    path.write_text(f"extends: {base}\n{own}{section}\n")
    assert default_compared_step_count(path, ()) == steps
    sliced = bert(
        engine={"name": "eager"}, optimizer={"name": "adamw", "learning_rate": 0.1}, zero=None,
        parallel={"tensor": 2, "tensor_plan": {"bert.*": "colwise"}},
    )  # fmt: skip
    settled = plan(sliced, [host("one", 2)], "torchrun")
    text = plan_description_text(settled, sliced)
    assert "with plain PyTorch where the run begins with it (your parallel.tensor_plan)" in text
