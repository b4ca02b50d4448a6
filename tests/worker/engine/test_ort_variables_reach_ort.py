"""Settings that act on CUDA only: a CPU refuses them, and ORT receives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.recipe import Recipe
from ortlaunch.worker.engine.ort_settings import (
    import_ortmodule_with_settings,
    ortmodule_settings,
    recipe_settings_and_ort_variables,
)
from ortmodule import ORTModule
from ortmodule_tests.modules import IDS, Words, manager_of, python, stepped
from tests.makers import plan, recipe
from tests.ort import needs_ort
from tests.worker.engine.test_engine_fields import refused

pytestmark = [needs_ort, pytest.mark.usefixtures("built")]


def rank_environment(made: Recipe) -> dict[str, str]:
    """Return the variables that the plan of a run gives to every rank."""
    return dict(plan(made).env)


def cuda_provider(wrapped: Any) -> dict[str, str]:
    """Return the provider options that a session on a GPU would get."""
    manager = manager_of(wrapped)
    # As on a GPU; no session is created with these options.
    manager._graph_transition_manager._device = torch.device("cuda", 0)
    # torch's allocator needs a CUDA build of the extensions.
    manager._runtime_options.use_external_gpu_allocator = False
    return manager._get_session_config()[2][0]


def test_variables_reach_the_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ORT reads the variables of a rank's environment: no setting of ours has another value."""
    assert cuda_provider(stepped(Words()))["cudnn_conv_algo_search"] == "HEURISTIC"
    values = {
        "ORTMODULE_CONV_ALGO_SEARCH": "EXHAUSTIVE",
        "ORTMODULE_ENABLE_TUNING": 1,
        "ORTMODULE_MAX_TUNING_DURATION_MS": 5,
        "ORTMODULE_PRINT_MEMORY_STATS": 1,
        "ORTMODULE_TUNING_RESULTS_PATH": str(tmp_path),
    }
    assert refused("cuda", ort_variables=values) == ""
    assert "has no effect on CPU: these variables are for GPUs" in refused(ort_variables=values)
    made = recipe(engine={"name": "ort", "ort_variables": values})
    environ = rank_environment(made)
    assert values.keys() <= environ.keys()
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    import_ortmodule_with_settings(made.engine, environ)
    assert recipe_settings_and_ort_variables(made)["variables"] == environ
    stepped_module = ORTModule(Words(), ortmodule_settings(made.engine))
    stepped_module(IDS).backward()
    provider = cuda_provider(stepped_module)
    assert provider["cudnn_conv_algo_search"] == "EXHAUSTIVE"
    assert provider["tunable_op_tuning_enable"] == "1"
    assert provider["tunable_op_max_tuning_duration_ms"] == "5"
    assert manager_of(stepped_module)._runtime_inspector.memory_ob._print_memory_stats_by_step
    assert (tmp_path / "tuning_results_training.json").exists()


@pytest.mark.slow
@pytest.mark.ci
def test_a_variable_that_ort_reads_at_its_import() -> None:
    """ORT registers the graph optimizer of efficient attention at its import, in a rank's environment."""
    environ = rank_environment(
        recipe(engine={"name": "ort", "ort_variables": {"ORTMODULE_USE_EFFICIENT_ATTENTION": 1}})
    )
    # A new process, because ORT registers its optimizers once, at its import.
    script = (
        "import os\n"
        f"os.environ.update({environ!r})\n"
        "import ortmodule\n"
        "ortmodule.load()\n"
        "from onnxruntime.training.ortmodule.graph_optimizer_registry import "
        "GraphOptimizerRegistry as Registry\n"
        "print('found:', *[f.__name__ for found in Registry._OPTIMIZER_FUNCS.values() "
        "for f, _, _ in found])"
    )
    assert (
        python(script).stdout.split("found:")[1].strip()
        == "optimize_graph_for_aten_efficient_attention"
    )
