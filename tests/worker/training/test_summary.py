"""Printed lines of a run on engine ort: settings before step 1, executed passes at the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from ortlaunch.run_folder.engine_report import (
    EngineChoice,
    EngineReport,
    FusedNorm,
    GraphReport,
    MatmulPrecision,
    OptimizerChoice,
    OptimizerGroup,
)
from ortlaunch.run_folder.folder import RunDir, write_json_atomically, write_text_atomically
from ortlaunch.worker.engine.binding import RankCoreBinding
from ortlaunch.worker.training.final_results import _python_code_to_load_export, build_run_summary
from ortlaunch.worker.training.summary import (
    engine_outcome_lines,
    engine_plan_lines,
    ort_notes_not_yet_shown,
)
from tests.makers import WORDS, engine_report, onnxruntime, recipe

FP16 = "FP16_Optimizer: overflow check and norm in one pass"


def report(**ort: Any) -> EngineReport:
    """Return the report of a run on engine ort with these fields of `onnxruntime`."""
    return engine_report("ort", onnxruntime=onnxruntime(**ort), fp16_optimizer=FusedNorm(True, ""))


def test_what_ran_is_told_in_nodes_and_calls() -> None:
    """The outcome has passes, graph nodes, calls to torch and Python, exports and fallbacks."""
    assert engine_outcome_lines(report()) == [
        "ran on engine ort: 4 forward, 4 backward passes by ONNX Runtime on rank 0, 0 fallbacks",
        "  1 export; the graph of a step has 227 nodes, with 4 torch operators (ATen), "
        "2 Python functions (PythonOp)",
        "optimizer AdamW",
    ]
    assert engine_outcome_lines(report(exports=2))[1].startswith("  2 exports; ")


def test_an_engine_that_fell_back_counts_no_passes() -> None:
    """The outcome of a run that fell back says so, without ONNX Runtime's counts of 0."""
    choice = EngineChoice("ort", "eager", "no such operator")
    assert engine_outcome_lines(replace(report(), engine=choice)) == [
        "ran on engine eager: asked for ort, fell back to eager: no such operator",
        "optimizer AdamW",
    ]


def test_a_summary_without_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without metrics.jsonl, the summary has the other values, and the gap is printed."""
    # As if a user had removed it while the run trained.
    run = RunDir(tmp_path)
    write_json_atomically(
        run.checkpoint_folder(3) / "manifest.json", {"step": 3, "samples": 24, "files": {}}
    )
    write_text_atomically(run.checkpoint_folder(3) / "COMPLETE", "")
    found = build_run_summary(run, 10, {"training": 2.0})
    assert (found.steps, found.samples, found.loss, found.training_seconds) == (3, 24, None, 2.0)
    assert (
        "metrics.jsonl was removed during training: summary.json has no loss"
        in capsys.readouterr().out
    )


def test_nodes_on_another_provider_are_printed() -> None:
    """Nodes that ONNX Runtime leaves to the CPU in a CUDA graph are printed."""
    graph = {
        "provider": "CUDAExecutionProvider",
        "nodes_by_provider": {"CUDAExecutionProvider": 220, "CPU": 7},
    }
    found = report()
    assert found.onnxruntime is not None
    assert found.onnxruntime.training_graph is not None
    placed = replace(
        found.onnxruntime, training_graph=replace(found.onnxruntime.training_graph, **graph)
    )
    assert "2 Python functions (PythonOp), 7 nodes on CPU" in "".join(
        engine_outcome_lines(replace(found, onnxruntime=placed))
    )


def test_a_run_without_a_graph_counts_no_nodes() -> None:
    """A run that fell back before a graph was built prints no nodes."""
    assert "nodes" not in "".join(engine_outcome_lines(report(training_graph=None, exports=0)))


def test_defaults_are_not_told() -> None:
    """Default settings are not printed; the only other line is on FP16_Optimizer."""
    assert engine_plan_lines(report())[1:] == [FP16]
    # Short enough for a line of the terminal, also with the reasons of the engines.
    assert len(f"{FP16} (ONNX Runtime's is for CUDA)") <= 100
    assert len(f"{FP16} (the engine has no ONNX Runtime)") <= 100


@pytest.mark.parametrize(
    ("found", "aten", "said"),
    [
        (
            MatmulPrecision("medium", "medium", 7, "bfloat16", None),
            {"linear": 2},
            "matmul of float32 in bfloat16",
        ),
        (
            MatmulPrecision("medium", "medium", 23, "float32", "no unit"),
            {"linear": 2},
            "no effect: no unit",
        ),
        # A graph without any call of torch's matmul.
        (
            MatmulPrecision("medium", "medium", 7, "bfloat16", None),
            {"gelu": 2},
            "no effect: torch computes no matmul of ONNX Runtime's",
        ),
    ],
)
def test_lower_precision_of_products_is_told(
    found: MatmulPrecision, aten: dict[str, int], said: str
) -> None:
    """A lower matmul precision is printed with its format, or with the reason for no gain."""
    graph = GraphReport(105, {}, aten, {}, {})
    lines = engine_plan_lines(replace(report(training_graph=graph), matmul_precision=found))
    assert lines[1].startswith(f"matmul_precision medium: {said}")


@pytest.mark.parametrize(("sharding", "told"), [("none", False), ("DeepSpeed ZeRO 0", True)])
def test_an_optimization_that_does_not_apply_is_told_only_where_it_could(
    sharding: str, told: bool
) -> None:
    """FP16_Optimizer is reported as not applied only with DeepSpeed's ZeRO, which it is for."""
    absent = FusedNorm(False, "stage 0")
    lines = engine_plan_lines(replace(report(), sharding=sharding, fp16_optimizer=absent))
    assert ("FP16_Optimizer: not applied: stage 0" in lines) is told


def test_settings_and_variables_are_told() -> None:
    """Settings and variables of ONNX Runtime are printed."""
    lines = engine_plan_lines(
        report(settings={"log_level": "info"}, variables={"ORTMODULE_LOG_LEVEL": "INFO"})
    )
    assert lines[1:3] == [
        'settings: log_level: "info"',
        "from the environment: ORTMODULE_LOG_LEVEL=INFO",
    ]


def test_cores_of_ranks_are_told() -> None:
    """The cores of ranks are printed if they are bound, or if a binding was requested."""
    # Hosts may differ: the first one has one rank, and the second one two.
    alone = RankCoreBinding("core", "none", (0, 1), None, "one rank has all cores")
    found = [
        engine_plan_lines(replace(report(), binding=alone.binding_record(["0-1", "0", "1"], used)))[
            1:-1
        ]
        for used in (["none", "core", "core"], ["none"] * 3)
    ]
    assert found == [
        ["binding core: rank 0 on cores 0-1, rank 1 on cores 0, rank 2 on cores 1"],
        ["binding core: not bound: one rank has all cores"],
    ]
    # Nobody requested this binding.
    quiet = RankCoreBinding(
        "auto", "none", (0, 1), None, "its cores are one NUMA node"
    ).binding_record(["0-1"], ["none"])
    assert engine_plan_lines(replace(report(), binding=quiet))[1:] == [FP16]


def test_what_came_up_later_is_told_once() -> None:
    """A note that existed before step 1 is not printed again; other engines have none."""
    found = report(notes=["not cached", "exported again"])
    assert ort_notes_not_yet_shown(found, ("not cached",)) == ["exported again"]
    assert ort_notes_not_yet_shown(engine_report("eager"), ()) == []


def test_groups_of_parameters_are_a_table() -> None:
    """Groups that differ in rate or optimizer are listed, frozen parameters as the last line."""
    groups = [
        OptimizerGroup("muon", 0.02, 0.1, 1200, ["layers.0.weight", "layers.1.weight"]),
        OptimizerGroup("adamw", 0.001, 0.0, 6, ["head.bias"]),
        OptimizerGroup(None, 0.0, 0.0, 42, ["embed.weight"]),
    ]
    found = engine_plan_lines(
        engine_report(optimizer=OptimizerChoice("muon", "Muon", None, groups))
    )
    at = found.index("optimizer  rate   decay  tensors  values  first parameter")
    assert found[at + 1 : at + 4] == [
        "muon       0.02   0.1    2        1,200   layers.0.weight",
        "adamw      0.001  0      1        6       head.bias",
        "frozen                   1        42      embed.weight",
    ]
    alike = engine_plan_lines(
        engine_report(optimizer=OptimizerChoice("adamw", "AdamW", None, [groups[1], groups[2]]))
    )
    assert not any("first parameter" in line for line in alike)


@pytest.mark.parametrize("resized", [True, False])
def test_adapters_of_a_larger_vocabulary_load_by_the_printed_line(resized: bool) -> None:
    """The line resizes the base first, if the training has."""
    base = SimpleNamespace(get_input_embeddings=lambda: nn.Embedding(352, 2))
    model = SimpleNamespace(save_pretrained=None, get_base_model=lambda: base)
    trained: Any = SimpleNamespace(model=model, loaded={"resized": ["334 to 352"] * resized})
    adapted = recipe(
        model={"task": "causal-lm", "pretrained": "x", "lora": {"merge": False}}, data=WORDS
    )
    line = _python_code_to_load_export(adapted, RunDir(Path("run")), trained)
    resize = "base_model.resize_token_embeddings(352); " if resized else ""
    assert line == f'{resize}peft.PeftModel.from_pretrained(base_model, "run/export")'
