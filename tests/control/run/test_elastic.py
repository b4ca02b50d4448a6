"""Tests of launch.nodes {min, max}: refusals before a start, and the hosts of a start."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from ortlaunch.api.json_outputs import output_json_schema
from ortlaunch.base.errors import InputError, LaunchError, PlanError, RecipeError
from ortlaunch.doctor.finding import Finding
from ortlaunch.launch import load_backend
from ortlaunch.launch.restarts import (
    EndedAttempt,
    start_ranks_and_restart_after_faults_or_on_request,
)
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.recipe import load_recipe
from ortlaunch.resolve.resolve import ResolvedRun, load_and_resolve_recipe
from ortlaunch.run.elastic import check_hosts_and_return_shrunk_run_and_lines
from ortlaunch.run.job_file import JobFile
from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from ortlaunch.run_folder.verdict import Verdict
from tests.makers import CUSTOM, OWN_MODULE, plan, recipe

BATCH = {"global_size": 12, "micro_size": 2}
LAUNCH = {"nodes": {"min": 1, "max": 3}, "max_restarts": 2}
# These hosts do not exist: the tests start nothing.
HOSTS = "".join(f"host{number} slots=1\n" for number in (1, 2, 3))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, its module and three hosts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN_MODULE)
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({**CUSTOM, "batch": BATCH, "launch": LAUNCH})
    )
    (tmp_path / "hosts").write_text(HOSTS)
    return tmp_path


def resolved(*overrides: str, **options: Any) -> ResolvedRun:
    return load_and_resolve_recipe(
        Path("recipe.yaml"), overrides, LaunchOptions(**{"hostfile": "hosts", **options}), {}
    )


@pytest.mark.parametrize(
    ("override", "said"),
    # Each case breaks one requirement of elastic runs.
    [
        ("launch.nodes.min=4", "launch.nodes.min: got 4, which is over max (3)"),
        ("launch.nodes.max=0", "launch.nodes.max: got 0; it must be >= 1"),
        (
            "launch.launcher=mpi",
            "launch.launcher: got mpi with launch.nodes {min, max}: only launcher torchrun "
            "detects a lost host",
        ),
        (
            "launch.max_restarts=0",
            "launch.max_restarts: got 0 with launch.nodes {min, max}, which continues by restarts",
        ),
        (
            "launch.preflight=false",
            "launch.preflight: got false with launch.nodes {min, max}, which uses it to find",
        ),
        (
            "batch.micro_size=auto",
            "batch: with launch.nodes {min, max} the global batch is kept by accumulation",
        ),
        (
            "batch.accumulation_steps=2",
            "batch: with launch.nodes {min, max} the global batch is kept by accumulation",
        ),
    ],
)
def test_what_the_recipe_must_give(override: str, said: str, folder: Path) -> None:
    """A recipe that an elastic run cannot use is refused, with the location of the field."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(folder / "recipe.yaml", (override,))
    assert said in str(caught.value)
    assert str(caught.value).startswith((f"override '{override}': ", f"{folder}/recipe.yaml:"))


@pytest.mark.parametrize(
    ("overrides", "options", "said"),
    # 12 samples are divisible by 1 x 4 and 3 x 4, not by 2 x 4.
    [
        (
            ("batch.micro_size=4",),
            {},
            "launch.nodes is 1 to 3, and on 2 hosts: batch: global_size (12) is not a multiple",
        ),
        (
            ("engine.name=eager", "optimizer.name=adamw", "parallel.shard=12"),
            {},
            "launch.nodes is 1 to 3, and on 1 host: parallel: shard 12 x replicate 1 needs 12 ranks",
        ),
        (
            ("launch.nodes.max=2",),
            {},
            "launch.nodes is 1 to 2, and there are 3 hosts; it must be one of these",
        ),
        (
            (),
            {"launcher": "mpi"},
            "launcher mpi with launch.nodes 1 to 3: only launcher torchrun detects a lost host",
        ),
        # A scheduler chooses hosts that are not known here.
        (
            (),
            {"hostfile": None, "declared": True},
            "launch.nodes is 1 to 3, a range, which only --hostfile supports",
        ),
        ((), {"hostfile": None}, "launch.nodes is 1 to 3, and there is no --hostfile"),
    ],
)
def test_what_is_refused_before_a_start(
    overrides: tuple[str, ...], options: dict[str, Any], said: str, folder: Path
) -> None:
    """Batches, hosts, launchers and schedulers that do not fit an elastic run are refused."""
    with pytest.raises(PlanError) as caught:
        resolved(*overrides, **options)
    assert str(caught.value).startswith(said)


def found(monkeypatch: pytest.MonkeyPatch, *wrong: tuple[str, str]) -> None:
    """Replace the check of the hosts by one with these failed findings, as (host, check)."""
    monkeypatch.setattr(
        "ortlaunch.run.elastic.probe_and_judge_all_hosts",
        lambda asked: [Finding(*one, "failed", "so") for one in wrong],
    )


def on(
    monkeypatch: pytest.MonkeyPatch, whole: ResolvedRun, *wrong: tuple[str, str], again: bool = True
) -> Any:
    found(monkeypatch, *wrong)
    return check_hosts_and_return_shrunk_run_and_lines(whole, RunDir(Path("run")), again)


def test_a_plan_on_the_hosts_that_are_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan on fewer hosts keeps the global batch, and names the host that is left out."""
    whole = resolved()
    assert whole.plan.launcher == "torchrun"
    now, lines = on(monkeypatch, whole, ("host2", "reached"))
    assert [(node.host, node.first_rank) for node in now.plan.nodes] == [("host1", 0), ("host3", 1)]
    assert now.workload.batch[:4] == (12, 2, 3, 2)
    assert lines[0] == "launch.nodes 1 to 3: on 2 hosts of 3, accumulation 3"
    assert lines[1].split() == ["left", "out:", "host2", "reached", "failed", "so"]
    # The host is used again as soon as it has no finding.
    assert on(monkeypatch, whole)[0].plan == whole.plan


def test_one_far_host_that_is_left_is_started_through_ssh(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single remaining host that is not this one is started through ssh."""
    now, _ = on(monkeypatch, resolved(), ("host1", "reached"), ("host2", "reached"))
    request = load_backend("torchrun").launch_request_of_plan(now.plan, RunDir("run"))
    assert [
        agent["host"] for agent in json.loads(dict(request.files)["run/agents.json"])["agents"]
    ] == ["host3"]


def test_too_few_hosts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer than `min` hosts nothing is started: at once, or after a wait for lost hosts."""
    said = r"^launch.nodes.min is 3, and 2 hosts can be used:\n  host2 +reached"
    with pytest.raises(LaunchError, match=said):
        on(monkeypatch, resolved("launch.nodes.min=3"), ("host2", "reached"), again=False)
    monkeypatch.setattr("ortlaunch.run.elastic._HOSTS_SECONDS", 0.05)
    monkeypatch.setattr("ortlaunch.run.elastic._LOOK_SECONDS", 0.01)
    with pytest.raises(LaunchError, match=said):
        on(monkeypatch, resolved("launch.nodes.min=3"), ("host2", "reached"))


def test_hosts_that_come_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart waits for the hosts of a switch that is started again, and looks until then."""
    # Three looks find it lost, the fourth finds all hosts well.
    looks = [[Finding("host2", "reached", "failed", "so")]] * 3 + [[]]
    monkeypatch.setattr(
        "ortlaunch.run.elastic.probe_and_judge_all_hosts", lambda asked: looks.pop(0)
    )
    monkeypatch.setattr("ortlaunch.run.elastic._LOOK_SECONDS", 0.01)
    now, _ = check_hosts_and_return_shrunk_run_and_lines(
        resolved("launch.nodes.min=3"), RunDir(Path("run")), is_restart=True
    )
    assert (now.plan.world_size, looks) == (3, [])


def test_a_host_that_is_not_fit_is_no_lost_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with a fault other than a lost connection fails the first start only."""
    # At the first start the user can repair it; later the run continues without the host.
    whole = resolved()
    with pytest.raises(LaunchError, match="the hosts are not ready, and nothing was started"):
        on(monkeypatch, whole, ("host2", "packages"), again=False)
    assert len(on(monkeypatch, whole, ("host2", "packages"))[0].plan.nodes) == 2


def test_hosts_of_a_run_with_one_number_of_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without {min, max} the hosts are checked at the first start only, and if preflight is on."""
    whole = resolved("launch.nodes=3")
    with pytest.raises(LaunchError, match="the hosts are not ready, and nothing was started"):
        on(monkeypatch, whole, ("host2", "reached"), again=False)
    assert on(monkeypatch, whole, again=False) == (whole, [])
    assert on(monkeypatch, whole, ("host2", "reached")) == (whole, [])
    whole = resolved("launch.nodes=3", "launch.preflight=false")
    assert on(monkeypatch, whole, ("host2", "reached"), again=False) == (whole, [])


def test_one_host_that_is_not_this_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single host is checked, too, unless it is this machine."""
    for name, is_checked in (("host1", True), ("localhost", False)):
        (folder / "hosts").write_text(f"{name} slots=2\n")
        checks = pytest.raises(LaunchError, match="nothing was started")
        with checks if is_checked else contextlib.nullcontext():
            on(monkeypatch, resolved("launch.nodes=1"), (name, "reached"), again=False)


def test_a_restart_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A requested restart starts the ranks again, and counts as no failed attempt."""
    run = RunDir(tmp_path)
    made = plan(recipe())
    write_text_atomically(run.plan, made.to_json())
    write_text_atomically(run.restart_request, "{}")
    write_text_atomically(run.stop_request, "{}")
    starts: list[int] = []

    def start(number: int) -> EndedAttempt:
        starts.append(number)
        # The second start reads the new hosts and removes the request, as rank 0 does.
        if number == 2:
            assert not run.stop_request.exists()
            run.restart_request.unlink()
        return EndedAttempt(Verdict(85, "saved"), False)

    with JobFile(run, "torchrun") as file:
        assert start_ranks_and_restart_after_faults_or_on_request(
            run, 2, file.record_attempts_and_stop_collecting_signals, start
        ).verdict == Verdict(85, "saved")
        assert file.record.attempts == ()
        file.record_end_or_print_disk_error(Verdict(85, ""))
    assert starts == [1, 2]
    assert "restarting the ranks, as requested" in capsys.readouterr().err
    assert Plan.read(run.plan) == made


def test_findings_have_a_schema() -> None:
    """Findings fit their schema; other verdicts and unknown fields do not."""
    schema = output_json_schema("doctor")
    good = {"host": "a", "check": "disk", "verdict": "ok", "what": "", "mend": ""}
    jsonschema.validate([good], schema)
    for wrong in ({**good, "verdict": "good"}, {**good, "more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([wrong], schema)
    assert Finding(**good).host == "a"


def test_only_an_elastic_run_takes_hosts_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ortlaunch restart` is refused for a run with a fixed number of hosts, or one that ended."""
    from ortlaunch.recipe import dump_recipe_yaml
    from ortlaunch.started_runs.requests import request_restart_and_wait

    run = RunDir(tmp_path)
    write_text_atomically(run.plan, plan(recipe()).to_json())
    write_text_atomically(run.recipe, dump_recipe_yaml(recipe()))
    write_text_atomically(run.request, "")
    with JobFile(run, "torchrun") as file:
        file.record_start_of_ranks()
        with pytest.raises(
            InputError,
            match=r"launch.nodes is not \{min, max\}, so its hosts are fixed",
        ):
            request_restart_and_wait(run)
        file.record_end_or_print_disk_error(Verdict(0, ""))
    with pytest.raises(InputError, match="succeeded; only a training run can be restarted"):
        request_restart_and_wait(run)
