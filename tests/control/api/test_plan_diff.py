"""Tests of `plan --diff` and `ranks`: differences between two plans, and the rank of a process."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import yaml

from ortlaunch import cli
from ortlaunch.rank import VARIABLES
from ortlaunch.run_folder.folder import RunDir
from tests.makers import CUSTOM


@pytest.fixture(autouse=True)
def recipe(workbench: None) -> None:
    """Write a recipe for the tests to change."""
    Path("recipe.yaml").write_text(yaml.safe_dump(CUSTOM))


def typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str]:
    """Run a command line, and return its exit status and all its output."""
    monkeypatch.setattr(sys, "argv", ["ortlaunch", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main()
    # The command freezes the objects that exist at its start, and disables the collector.
    gc.unfreeze()
    gc.enable()
    written = capsys.readouterr()
    return int(end.value.code or 0), written.out + written.err


def test_what_changed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe, a run folder and a plan.json give the same differences."""
    _, plan = typed(monkeypatch, capsys, "plan", "recipe.yaml", "--json")
    run = RunDir("one")
    run.path.mkdir()
    run.plan.write_text(plan)
    changed = (
        "plan",
        "recipe.yaml",
        "launch.nodes=5",
        "launch.processes_per_node=1",
        "batch.micro_size=4",
    )
    shown = [
        typed(monkeypatch, capsys, *changed, "--diff", other)
        for other in ("recipe.yaml", "one", "one/plan.json")
    ]
    assert [status for status, _ in shown] == [0, 0, 0]
    assert len({text for _, text in shown}) == 1
    # More than four hosts are abbreviated.
    lines = shown[0][1].splitlines()
    assert lines[0] == "world_size: 1 -> 5"
    assert "nodes: 1 (localhost 1) -> 5 (node0 1, node1 1, node2 1, node3 1, ...)" in lines
    assert 'launcher: "local" -> "inside"' in lines
    assert typed(monkeypatch, capsys, "plan", "recipe.yaml", "--diff", "one") == (
        0,
        "same plan as one\n",
    )


def test_a_device_that_only_overrides_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe with device auto is compared on the device of the new plan."""
    # This host has no GPU, for which the shipped recipe is.
    changed = ("plan", "bert-large/phase1", "launch.device=cuda", "batch.global_size=32768")
    status, text = typed(monkeypatch, capsys, *changed, "--diff", "bert-large/phase1")
    assert (status, text.splitlines()[0]) == (0, "batch.global_samples: 65536 -> 32768")


@pytest.mark.parametrize(
    ("other", "text", "said"),
    [
        # A run folder without a plan.
        (
            "empty",
            None,
            "--diff empty: no file empty/plan.json; give a recipe, a run folder or its plan.json",
        ),
        ("gone.json", None, "--diff gone.json: no file gone.json"),
        # A plan of a later version, and one that lacks fields.
        (
            "a.json",
            '{"format": 2}',
            "--diff a.json: plan.json was written by another version of ortlaunch",
        ),
        (
            "a.json",
            '{"format": 1}',
            "--diff a.json: a.json is not a plan of this version (KeyError('world_size'))",
        ),
        ("a.json", "{", "--diff a.json: a.json is not a plan of this version (JSONDecodeError("),
    ],
)
def test_what_is_no_plan(
    other: str,
    text: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file that is no plan is named in the error."""
    Path("empty").mkdir()
    if text is not None:
        Path(other).write_text(text)
    status, shown = typed(monkeypatch, capsys, "plan", "recipe.yaml", "--diff", other)
    assert status == 2
    assert said in shown


@pytest.mark.parametrize(
    ("environ", "status", "said"),
    # A complete set of variables, or none, is valid; a part of one is an error.
    [
        ({}, 0, "used: none; this process is rank 0 of 1"),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            0,
            "rank 3 of 4, local rank 1 of 2",
        ),
        (
            {"RANK": "3", "WORLD_SIZE": "4"},
            2,
            "error: torchrun: RANK=3 WORLD_SIZE=4 set, but LOCAL_RANK",
        ),
    ],
)
def test_ranks(
    environ: dict[str, str],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`ranks` prints the variables and their meaning, and fails for an incomplete set."""
    # The tests themselves may run under a launcher.
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, shown = typed(monkeypatch, capsys, "ranks")
    assert code == status
    assert said in shown
