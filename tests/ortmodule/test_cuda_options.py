"""Fields under `engine` that act on CUDA only: a CPU refuses them, and ORT receives them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from ortlaunch.base.errors import EngineError
from ortlaunch.ortmodule import Settings, options
from ortlaunch.ortmodule.pass_counters import PassAndGraphCounters
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.worker.engine.ort_settings import import_ortmodule_with_settings
from tests.ort import needs_ort
from tests.ortmodule.modules import Words, manager_of, python, refused, stepped

pytestmark = [needs_ort, pytest.mark.usefixtures("built")]


def cuda_provider(wrapped: Any) -> dict[str, str]:
    """Return the provider options that a session on a GPU would get."""
    manager = manager_of(wrapped)
    # As on a GPU; no session is created with these options.
    manager._graph_transition_manager._device = torch.device("cuda", 0)
    # torch's allocator needs a CUDA build of the extensions.
    manager._runtime_options.use_external_gpu_allocator = False
    return manager._get_session_config()[2][0]


def test_print_memory_stats() -> None:
    """The field makes ORT print the memory of CUDA's allocator in every step."""
    assert "has no effect on CPU: it reads CUDA's allocator" in refused(print_memory_stats=True)
    observer = manager_of(stepped(Words(), print_memory_stats=True))._runtime_inspector.memory_ob
    assert observer._print_memory_stats_by_step


def test_conv_algorithm_search() -> None:
    """The field reaches ORT's CUDA provider, under cuDNN's names."""
    assert "has no effect on CPU: it is cuDNN's" in refused(conv_algorithm_search="exhaustive")
    assert (
        cuda_provider(stepped(Words(), conv_algorithm_search="exhaustive"))[
            "cudnn_conv_algo_search"
        ]
        == "EXHAUSTIVE"
    )
    # The default is passed too.
    assert cuda_provider(stepped(Words()))["cudnn_conv_algo_search"] == "HEURISTIC"


@pytest.mark.parametrize(("word", "tf32"), [("highest", "0"), ("high", "1"), ("medium", "1")])
def test_matmul_precision(word: Any, tf32: str) -> None:
    """The field sets the provider's TF32, which ORT enables by default."""
    assert cuda_provider(stepped(Words(), matmul_precision=word))["use_tf32"] == tf32


def test_tuning() -> None:
    """The field enables ORT's tunable operators."""
    assert "has no effect on CPU" in refused(tuning=True)
    assert cuda_provider(stepped(Words(), tuning=True))["tunable_op_tuning_enable"] == "1"
    assert "tunable_op_enable" not in cuda_provider(stepped(Words()))


def test_tuning_duration_ms() -> None:
    """The field limits the trials of one operator."""
    assert "has no effect without tuning: true" in refused(tuning_duration_ms=5)
    provider = cuda_provider(stepped(Words(), tuning=True, tuning_duration_ms=5))
    assert provider["tunable_op_max_tuning_duration_ms"] == "5"


def test_tuning_results(tmp_path: Path) -> None:
    """Results are written with tuning and read without it."""
    assert "has no effect on CPU" in refused(tuning_results="here")
    stepped(Words(), tuning=True, tuning_results=str(tmp_path))
    assert (tmp_path / "tuning_results_training.json").exists()
    assert cuda_provider(stepped(Words(), tuning_results=str(tmp_path)))["tunable_op_enable"] == "1"


def test_triton() -> None:
    """A build of ORT without Triton refuses the field."""
    assert "has no effect on CPU: Triton writes kernels for GPUs" in refused(triton=True)
    with pytest.raises(
        EngineError, match=r"engine\.triton: the installed ONNX Runtime was built without Triton"
    ):
        import_ortmodule_with_settings(Engine(triton=True), {})


def test_triton_config() -> None:
    """The field is written to the file that ORT reads."""
    assert "has no effect without triton: true" in refused(triton_config={"min_nodes": 3})
    assert "unknown key; valid here: ops" in refused(triton=True, triton_config={"nodes": 3})
    assert "must be none, scalar or all" in refused(
        triton=True, triton_config={"initializer": "some"}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTMODULE_TRITON_CONFIG_FILE", "")
        # ORT's package imports Triton for its kernels.
        for name in ("triton", "triton.language"):
            patch.setitem(sys.modules, name, MagicMock())
        options.set_manager_options_and_triton_config_variable(
            stepped(Words()), Settings(triton=True, triton_config={"min_nodes": 3})
        )
        read = importlib.import_module("onnxruntime.training.ort_triton").get_config()
    assert json.loads(read)["min_nodes"] == 3


def test_flash_attention() -> None:
    """The field needs Triton and CUDA."""
    said = refused(flash_attention=True)
    assert "has no effect without triton: true" in said
    assert "has no effect on CPU: it is a Triton kernel" in said


@pytest.mark.slow
@pytest.mark.ci
def test_efficient_attention(witness: PassAndGraphCounters) -> None:
    """The field registers ORT's graph optimizer, and a run in which that replaces nothing fails."""
    assert "has no effect on CPU: torch has that kernel for CUDA only" in refused(
        efficient_attention=True
    )
    assert (
        registered_in_a_new_process(efficient_attention=True)
        == "optimize_graph_for_aten_efficient_attention"
    )
    with pytest.raises(
        EngineError, match=r"Settings\.efficient_attention: ONNX Runtime found nothing to replace"
    ):
        options.refuse_attention_or_triton_settings_without_effect(
            Settings(efficient_attention=True), witness.graphs
        )


def registered_in_a_new_process(**settings: Any) -> str:
    """Return the names of ORT's graph optimizers for CUDA after an import with these settings."""
    # A new process, because ORT registers its optimizers once, at its import.
    script = (
        "from ortlaunch.ortmodule import Settings, options\n"
        f"options.import_ortmodule_with_settings_or_refuse(Settings(**{settings!r}))\n"
        "from onnxruntime.training.ortmodule.graph_optimizer_registry import "
        "GraphOptimizerRegistry as Registry\n"
        "print('found:', *[f.__name__ for found in Registry._OPTIMIZER_FUNCS.values() "
        "for f, _, _ in found])"
    )
    return python(script).stdout.split("found:")[1].strip()
