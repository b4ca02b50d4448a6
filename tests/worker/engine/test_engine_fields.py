"""Every field under `engine` has a visible effect, or is refused with its reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import EngineError
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.recipe.rules.rules import broken_rule_problems, precision_and_engine_device_rules
from ortlaunch.worker.engine.ort_settings import import_ortmodule_with_settings, ortmodule_settings
from ortmodule import Settings
from tests.makers import recipe
from tests.ort import needs_ort

# By field that is no setting of ORTModule: the test that shows its effect. Settings have theirs in
# ortmodule's test_options.py.
FIELDS = {
    "name": "tests/e2e/test_engines.py::test_inductor",
    "parity_steps": "tests/e2e/test_parity_steps.py::test_training_is_what_it_is_without",
    "parity_tolerance": "tests/e2e/test_parity_steps.py::test_the_tolerance_is_the_recipes",
    "matmul_precision": "tests/worker/engine/test_engine_fields.py::test_matmul_precision",
    "onednn": "tests/worker/model/test_matmul_precision.py::test_products_are_onednns_where_that_is_faster",
    "chunked_loss": "tests/worker/model/test_chunked_loss_ranks.py::test_two_ranks_on_two_engines",
    "ort_variables": "tests/worker/engine/test_ort_variables_reach_ort.py::test_variables_reach_the_provider",
}


def refused(device: str = "cpu", **settings: Any) -> str:
    """Return the messages of the recipe's rules for these fields."""
    made = recipe(engine={"name": "ort", **settings})
    problems = [*broken_rule_problems(made), *precision_and_engine_device_rules(made, device)]
    return "\n".join(text for _, text in problems)


def test_every_field_is_in_a_table() -> None:
    """Each field is a setting of ORTModule or has a test, and each named test exists."""
    settings = {field.name for field in dataclasses.fields(Settings)}
    assert set(Engine.model_fields) - settings == set(FIELDS)
    for path, _, test in (reference.partition("::") for reference in FIELDS.values()):
        assert f"def {test}(" in (Path(__file__).parents[3] / path).read_text(encoding="utf-8")


def test_matmul_precision() -> None:
    """A lower precision is TF32 on a GPU; where ORT computes the matmuls on a CPU it is refused."""
    for word, is_tf32 in (("highest", False), ("high", True), ("medium", True)):
        assert ortmodule_settings(Engine(matmul_precision=word)).tf32 == is_tf32
    for field in (
        {"torch_matmul": False},
        {"memory_optimization": 1},
        {"memory_efficient_grad_management": True},
    ):
        assert "ONNX Runtime computes its matmul" in refused(matmul_precision="medium", **field)
        assert "computes its matmul" not in refused("cuda", matmul_precision="medium", **field)


@pytest.mark.parametrize(
    ("fields", "device", "message"),
    [
        (
            {"memory_optimization": 1, "memory_optimization_config": ["A:1:-1"]},
            "cpu",
            "chooses the subgraphs itself",
        ),
        ({"memory_optimization_config": ["A"]}, "cpu", "write cluster:strategy:count"),
        (
            {"sparsity_optimizer": True, "compute_optimizer": False},
            "cpu",
            "without compute_optimizer: true",
        ),
        (
            {"print_input_density": True, "sparsity_optimizer": False},
            "cpu",
            "without sparsity_optimizer",
        ),
        (
            {"torch_matmul": True, "memory_optimization": 1},
            "cpu",
            "has no effect with memory optimization",
        ),
        (
            {"torch_matmul": True, "memory_efficient_grad_management": True},
            "cpu",
            "whose graph has no weights",
        ),
        ({"torch_matmul": True}, "cuda", "has no effect on cuda"),
    ],
)
def test_fields_that_exclude_each_other_are_refused(fields: Any, device: str, message: str) -> None:
    """The message has the reason."""
    assert message in refused(device, **fields)


@needs_ort
def test_a_host_whose_environment_contradicts_is_refused() -> None:
    """A variable on a host that contradicts the recipe is refused."""
    with pytest.raises(
        EngineError, match=r"LEVEL=1 on this host contradicts engine.memory_optimization \(0\)"
    ):
        import_ortmodule_with_settings(Engine(), {"ORTMODULE_MEMORY_OPT_LEVEL": "1"})
