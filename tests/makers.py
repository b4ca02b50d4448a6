"""Recipes, plans and records for tests, made from the sections that matter to a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ortlaunch.launch_plan import Plan
from ortlaunch.planning.forwarding import forwarded_variable_names_or_refuse_unset
from ortlaunch.planning.hosts import Host
from ortlaunch.planning.make_plan import make_plan
from ortlaunch.planning.workload import solve_batch_and_estimate_memory
from ortlaunch.planning.world import World
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.engine_report import (
    ChunkedLoss,
    EngineChoice,
    EngineReport,
    FusedNorm,
    GraphReport,
    MatmulPrecision,
    OnnxRuntime,
    OptimizerChoice,
)

BERT = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 1000}  # fmt: skip
CUSTOM: dict[str, Any] = {
    "name": "made",
    "model": {"task": "custom", "factory": "mine:model"},
    "data": {"train": {"format": "custom", "factory": "mine:data"}},
    "batch": {"micro_size": 2, "accumulation_steps": 1},
    "optimizer": {"name": "sgd", "learning_rate": 0.1},
    "engine": {"name": "eager"},
    "train": {"max_steps": 3},
}
# The text of mine.py, for plans that are never run.
OWN_MODULE = "def model(**arguments): ...\n\n\ndef data(**arguments): ...\n"
WORDS = {"train": "python-docs", "tokenizer": "here", "sequence_length": 128}


def recipe(**sections: Any) -> Recipe:
    """Return the recipe of a custom model; `sections` replace its own."""
    return Recipe.model_validate({**CUSTOM, **sections})


def bert(**sections: Any) -> Recipe:
    """Return the recipe of a small BERT; `sections` replace its own."""
    return recipe(**{"model": {"task": "masked-lm", "config": BERT}, "data": WORDS, **sections})


def host(name: str, slots: int, max_slots: int | None = None) -> Host:
    """Return a host with one device for each slot."""
    return Host(name, slots, tuple(range(slots)), max_slots)


def plan(
    made: Recipe,
    hosts: Sequence[Host] = (Host("localhost", 1, (0,)),),
    launcher: str = "local",
    worker: Sequence[str] = ("python", "-m", "ortlaunch.worker"),
    environ: Mapping[str, str] | None = None,
) -> Plan:
    """Return the plan of a recipe on CPU hosts, with two threads for each rank.

    `environ` is the environment of the shell; it is empty by default.
    """
    world = world_of(made, hosts, launcher, environ)
    return make_plan(
        made,
        world,
        solve_batch_and_estimate_memory(made, world),
        modules_folder="here",
        worker_argv=worker,
    )


def world_of(
    made: Recipe,
    hosts: Sequence[Host] = (Host("localhost", 1, (0,)),),
    launcher: str = "local",
    environ: Mapping[str, str] | None = None,
) -> World:
    """Return CPU hosts with two threads for each rank; the environment is empty by default."""
    forward = forwarded_variable_names_or_refuse_unset(
        made, environ or {}, may_come_from_secret=launcher == "inside"
    )
    return World(tuple(hosts), launcher, "cpu", None, (), threads=2, forward=forward)


def engine_report(used: str = "eager", **changes: Any) -> EngineReport:
    """Return the record of a run of one rank on the CPU; `changes` replace fields."""
    record = EngineReport(
        engine=EngineChoice(used, used, None), device="cpu", precision="fp32",
        matmul_precision=MatmulPrecision("highest", "highest", 23, "float32", None), ranks=1,
        threads_per_rank=2, parameters=2, trained_parameters=1, sharding="none",
        optimizer=OptimizerChoice("adamw", "AdamW", None, []),
        chunked_loss=ChunkedLoss("auto", None, "off"), attention=None, pretrained=None,
        gradient_checkpointing=None, onnxruntime=onnxruntime() if used == "ort" else None,
        versions={}, fp16_optimizer=FusedNorm(False, ""), freed_memory=None,
    )  # fmt: skip
    return replace(record, **changes)


def onnxruntime(**changes: Any) -> OnnxRuntime:
    """Return ONNX Runtime's part of the record after four passes; `changes` replace fields."""
    graph = GraphReport(105, {"Gemm": 9}, {"embedding": 3, "mm": 1}, {"F": 2}, {}, 122, {"Sum": 7})
    record = OnnxRuntime(
        repairs=[], repairs_not_applied={}, settings={}, variables={}, forward_passes=4,
        backward_passes=4, evaluation_passes=0, fallbacks=0, fallback_reasons=[], graphs_built=1,
        nodes_run=908, training_graph=graph, evaluation_graph=None, exports=1, re_exports=0,
        export_seconds=0.1, label_density=None, notes=[],
    )  # fmt: skip
    return replace(record, **changes)
