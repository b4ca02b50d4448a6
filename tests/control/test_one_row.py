"""One row in the table of launchers adds a launcher to recipes, plans and requests."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from ortlaunch.launch import LaunchRequest
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.describe import plan_description_text
from ortlaunch.planning.world import LaunchOptions, resolve_hosts_launcher_and_device
from ortlaunch.resolve.prepare import launch_request, require_launcher_can_start_hosts
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.tables.launchers import LAUNCHERS, Launcher
from tests.makers import host, plan, recipe


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
