"""Tests that a start makes one plan, after all choices, and so do verbs that start nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ortlaunch.base.errors import OrtlaunchError, PlanError
from ortlaunch.bench import auto
from ortlaunch.cli import app
from ortlaunch.doctor.finding import Finding
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.resolve import resolve as resolving
from ortlaunch.run import control, micro_size
from ortlaunch.run.micro_size import SizeTrial
from ortlaunch.run_folder.engine_report import Choice, MeasuredEngine
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged, write_text_atomically
from ortlaunch.run_folder.verdict import Verdict
from tests.makers import CUSTOM, OWN_MODULE

SIZES = {"global_size": 24, "micro_size": "auto"}
ELASTIC = {
    "batch": {"global_size": 12, "micro_size": 2},
    "launch": {"nodes": {"min": 1, "max": 3}, "max_restarts": 2},
}


class Counted:
    """A command line that counts calls of `make_plan`, with launchers that start nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans = self.starts = 0
        # Starts requested by `ortlaunch restart`.
        self.restarts = 0
        made = resolving.make_plan

        def counted(*arguments: Any, **named: Any) -> Any:
            self.plans += 1
            return made(*arguments, **named)

        monkeypatch.setattr(resolving, "make_plan", counted)
        monkeypatch.setattr(control, "write_files_and_start_job", self._submit)
        monkeypatch.setattr(control, "forward_signals_until_job_ends", lambda job: 0)
        monkeypatch.setattr(control, "conclude_run", lambda run, *_, **__: self._end(run))

    def _submit(self, request: Any) -> SimpleNamespace:
        self.starts += 1
        return SimpleNamespace(user_signal=None, foreign_signal=None, oom_kills=0, early_signals=[])

    def _end(self, run: RunDir) -> Verdict:
        if self.starts > self.restarts:
            return Verdict(0, "done")
        # As if `ortlaunch restart` was typed while the ranks ran.
        write_text_atomically(run.restart_request, "{}")
        return Verdict(EXIT_SAVED, "saved")

    def __call__(self, *typed: str) -> str:
        """Run a command and return its output; the counters begin at 0 again."""
        self.plans = self.starts = 0
        result = CliRunner().invoke(app, list(typed))
        if isinstance(result.exception, OrtlaunchError):
            raise result.exception
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output


@pytest.fixture
def ortlaunch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """The command line in a folder of its own."""
    # Stored choices and the list of runs must not be those of the user.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("mine.py").write_text(OWN_MODULE)
    Path("hosts").write_text("".join(f"host{number} slots=1\n" for number in (1, 2, 3)))
    return Counted(monkeypatch)


def written(**sections: Any) -> str:
    """Write a recipe with these sections and return its path."""
    Path("recipe.yaml").write_text(yaml.safe_dump({**CUSTOM, **sections}))
    return "recipe.yaml"


def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the bench by one in which inductor is the fastest."""
    # Its variants would be starts with plans of their own.
    choice = Choice("auto", "inductor", "measured 2 x eager", {"eager": MeasuredEngine("measured")})
    monkeypatch.setattr(auto, "resolve_variants_or_refuse_if_none_can_run", lambda *_: [])
    monkeypatch.setattr(auto, "measure_variants_and_build_report", lambda *_: {"variants": []})
    monkeypatch.setattr(auto, "bench_table_and_notes_text", lambda rows: "")
    monkeypatch.setattr(auto, "choose_fastest_engine_of_bench_or_raise", lambda *_: choice)


def test_a_start_and_a_resumption(ortlaunch: Counted) -> None:
    """A start makes one plan, and so does its continuation in the same folder."""
    ortlaunch("train", written(), "--run-dir", "run")
    assert (ortlaunch.plans, ortlaunch.starts) == (1, 1)
    text = ortlaunch("train", "recipe.yaml", "train.max_steps=9", "--run-dir", "run")
    assert "continuing run" in text
    assert (ortlaunch.plans, ortlaunch.starts) == (1, 1)


def test_engine_auto(ortlaunch: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """With engine auto, the only plan is that of the chosen engine, also if it was stored."""
    # A run that is long enough for a measurement.
    path = written(engine={"name": "auto"}, train={"max_steps": 1000})
    # First measured, then from the cache, then from the run folder.
    measured(monkeypatch)
    for folder, source in (
        ("run", ""),
        ("other", " (cached)"),
        ("run", " (at the start of this run)"),
    ):
        text = ortlaunch("train", path, "--run-dir", folder)
        assert "engine auto: inductor: measured 2 x eager" in text
        assert (source in text, ortlaunch.plans, ortlaunch.starts) == (True, 1, 1)
        assert read_json_or_raise_damaged(RunDir(Path(folder)).choice)["chosen"] == "inductor"
    # A dry run has the choices of the run folder, as the run itself.
    dry = ortlaunch("train", path, "--run-dir", "run", "--dry-run")
    assert "(at the start of this run)" in dry


def test_micro_size_auto(ortlaunch: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of micro_size auto share one plan, the run has another; later runs know the size."""
    monkeypatch.setattr(
        micro_size,
        "_run_micro_size_trial",
        lambda recipe, plan, run, size: SizeTrial(size, size <= 8, 0.5, ""),
    )
    ortlaunch("train", written(batch=SIZES), "--run-dir", "run")
    assert (ortlaunch.plans, ortlaunch.starts) == (2, 1)
    ortlaunch("train", written(batch=SIZES), "--run-dir", "run")
    assert (ortlaunch.plans, ortlaunch.starts) == (1, 1)
    assert read_json_or_raise_damaged(RunDir(Path("run")).plan)["batch"]["micro_samples"] == 8


@pytest.mark.parametrize("lost", [(), ("host2",)])
def test_elastic_hosts(
    lost: tuple[str, ...], ortlaunch: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts are checked before the plan; only a change of the hosts needs another plan."""
    # The first start and two restarts; host3 is lost before the last.
    out = [set(lost), set(lost), {"host3"}]

    def look(asked: Any) -> list[Finding]:
        return [Finding(name, "reached", "failed", "so") for name in out.pop(0)]

    monkeypatch.setattr("ortlaunch.run.elastic.probe_and_judge_all_hosts", look)
    ortlaunch.restarts = 2
    ortlaunch("train", written(**ELASTIC), "--run-dir", "run", "--hostfile", "hosts")
    assert (ortlaunch.starts, out) == (3, [])
    assert ortlaunch.plans == (2 if not lost else 3)


def test_a_launcher_that_cannot_start(ortlaunch: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that cannot start is refused before trials, checks of hosts, and any plan."""
    monkeypatch.setattr("ortlaunch.launch.mpi.require_mpirun_here_or_on_path", lambda: "mpirun")
    monkeypatch.setattr(
        "ortlaunch.launch.mpi.open_mpi_or_mpich_by_running_mpirun_or_refuse",
        lambda mpirun: "Open MPI",
    )
    with pytest.raises(
        PlanError, match=r"^--run-dir a,b: mpirun would read two host files at the comma"
    ):
        ortlaunch("train", written(batch=SIZES), "--run-dir", "a,b", "--launcher", "mpi")
    assert (ortlaunch.plans, ortlaunch.starts, Path("a,b").exists()) == (0, 0, False)


def test_a_finished_run(ortlaunch: Counted) -> None:
    """A run that is complete makes no start and no plan."""
    ortlaunch("train", written(), "--run-dir", "run")
    run = RunDir(Path("run"))
    # The files of a complete training of 3 steps.
    for path, text in (
        (run.checkpoint_folder(3) / "COMPLETE", ""),
        (run.summary, '{"steps": 3}'),
        (run.export / "x", ""),
    ):
        write_text_atomically(path, text)
    assert "nothing to train: 3 of 3 steps are done" in ortlaunch(
        "train", "recipe.yaml", "--run-dir", "run"
    )
    assert (ortlaunch.plans, ortlaunch.starts) == (0, 0)


@pytest.mark.parametrize("sections", [{}, {"engine": {"name": "auto"}}, {"batch": SIZES}], ids=str)
def test_what_starts_nothing(
    sections: dict[str, Any], ortlaunch: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan`, `--dry-run` and `submit` make one plan, also with choices that are still open."""
    verbs: list[tuple[str, ...]] = [
        ("plan",),
        ("train", "--dry-run"),
        ("submit", "--dry-run", "--scheduler=slurm"),
    ]
    path = written(**sections)
    for verb, *options in verbs:
        ortlaunch(verb, path, *options)
        assert (ortlaunch.plans, ortlaunch.starts) == (1, 0)
