"""One row in the table of launchers adds a launcher to recipes, plans and requests."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from ortlaunch.launch import LaunchRequest
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.describe import plan_description_text
from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.planning.world import LaunchOptions, resolve_hosts_launcher_and_device
from ortlaunch.recipe.rules.rules import broken_rule_problems
from ortlaunch.resolve.prepare import launch_request, require_launcher_can_start_hosts
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.tables.families import FAMILIES
from ortlaunch.tables.launchers import LAUNCHERS, Launcher
from tests.makers import bert, host, plan, recipe


def test_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of a new launcher makes the request that starts the ranks."""
    with pytest.raises(
        ValidationError, match=r"Input should be 'auto', 'local', 'torchrun' or 'mpi'"
    ):
        recipe(launch={"launcher": "pigeon"})
    sent: Any = SimpleNamespace(
        require_launchable_hosts=lambda nodes, run: None,
        launch_request_of_plan=lambda planned, run: LaunchRequest(
            ("pigeonrun", str(planned.world_size), *planned.argv, str(run))
        ),
    )
    monkeypatch.setitem(sys.modules, "pigeons_of_a_test", sent)
    monkeypatch.setitem(
        LAUNCHERS,
        "pigeon",
        Launcher("pigeons_of_a_test", "pigeonrun", "by pigeon", note="they fly"),
    )
    made = recipe(launch={"launcher": "pigeon", "processes_per_node": 2})
    world = resolve_hosts_launcher_and_device(made, LaunchOptions(), {})
    assert (world.launcher, world.rank_count, "they fly" in world.notes) == ("pigeon", 2, True)
    planned = plan(made, [host("one", 1), host("two", 1)], "pigeon")
    assert (planned.started_by.program, planned.rendezvous) == ("pigeonrun", "by pigeon")
    assert Plan.from_plan_json_text(planned.to_json()) == planned
    assert plan_description_text(planned, made).splitlines()[0].endswith("launcher pigeon")
    run = RunDir(tmp_path / "run")
    require_launcher_can_start_hosts(world, run)
    assert launch_request(planned, run).argv == ("pigeonrun", "2", *planned.argv, str(run.path))


def test_a_family_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of a new family gives its plans, and the rules of tasks."""
    sizes = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "vocab_size": 100, "max_position_embeddings": 32, "type_vocab_size": 1}  # fmt: skip
    data = {"train": {"format": "jsonl", "path": "x"}, "tokenizer": "x", "sequence_length": 32}

    def memory(model_type: str, width: str) -> Any:
        config = {"model_type": model_type, width: 32, **sizes}
        model = {"task": "masked-lm", "config": config}
        return estimate_rank_memory_or_none(bert(model=model, data=data, zero=None), 1, 1)

    assert memory("owl", "wing_span") is None
    row = replace(
        FAMILIES["roberta"], own_names={"hidden_size": "wing_span"}, size_fields=("wing_span",)
    )
    monkeypatch.setitem(FAMILIES, "owl", row)
    assert memory("owl", "wing_span") == memory("roberta", "hidden_size")
    assert memory("owl", "hidden_size") is None
    # Images have no words to predict: not a division by their number.
    sizes |= {"image_size": 32, "patch_size": 8}
    assert memory("vit", "hidden_size") is None
    model = {"task": "causal-lm", "config": {"model_type": "owl", **sizes}}
    messages = [message for _, message in broken_rule_problems(bert(model=model, data=data))]
    assert any("got causal-lm with owl, whose attention sees" in text for text in messages)


def test_code_reads_properties_of_families() -> None:
    """No module but the tables and the importers compares with a family's name or has it as a key."""
    package = Path(__file__).parents[2] / "ortlaunch"
    compared = {
        (str(path.relative_to(package)), node.lineno, text.value)
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] != "tables"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Compare, ast.Subscript, ast.MatchValue))
        for text in ast.walk(node)
        if isinstance(text, ast.Constant) and text.value in FAMILIES
    }
    assert compared == set()
