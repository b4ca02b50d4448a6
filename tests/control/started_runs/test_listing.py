"""Tests of `ortlaunch list` with filters, and of `ortlaunch compare`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.api.runs import Run, runs, runs_table, statuses
from ortlaunch.base.cause import Cause, Failure
from ortlaunch.base.errors import InputError
from ortlaunch.launch import JobState
from ortlaunch.launch.record import JobRecord
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.resolve.prepare import set_aside_and_write_run_files_and_print_plan_unless_restart
from ortlaunch.resolve.provenance import append_start_to_command_log
from ortlaunch.resolve.resolve import load_and_resolve_recipe
from ortlaunch.run_folder.cause_text import diagnosis_verdict_line
from ortlaunch.run_folder.engine_report import EngineChoice
from ortlaunch.run_folder.folder import RunDir, write_json_atomically, write_text_atomically
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.search.folder import SweepDir
from ortlaunch.started_runs import listing, registry
from ortlaunch.started_runs.diagnosis import diagnose_run
from ortlaunch.started_runs.status import Status, read_status
from tests.control import typed
from tests.makers import CUSTOM, OWN_MODULE, engine_report


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Run]:
    """A failed and a successful run, of another rate and another module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    for name, state, loss, more in (
        ("bad", JobState.FAILED, '"nan"', ""),
        ("good", JobState.SUCCEEDED, 0.5, "# faster\n"),
    ):
        Path("mine.py").write_text(OWN_MODULE + more)
        optimizer = {"name": "adamw", "learning_rate": 1.0 if name == "bad" else 0.1}
        Path("recipe.yaml").write_text(yaml.safe_dump({**CUSTOM, "optimizer": optimizer}))
        run = RunDir(tmp_path / "runs" / name)
        set_aside_and_write_run_files_and_print_plan_unless_restart(
            load_and_resolve_recipe(Path("recipe.yaml"), (), LaunchOptions(), os.environ), run
        )
        record = JobRecord.for_this_process("local", JobState.RUNNING)
        record.copy_ended_now(state, Verdict(int(name == "bad"), "the end")).write(run)
        run.metrics.write_text(f'{{"step": 3, "loss": {loss}}}\n')
        # Rank 0 copies the modules.
        write_text_atomically(run.modules / "mine.py", OWN_MODULE + more)
        registry.register_run_or_print_error(run)
    return Run("bad"), Run("good")


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({}, {"good", "bad"}),
        ({"name": "runs/g*d"}, {"good"}),
        ({"name": "nowhere"}, set()),
        ({"state": "failed"}, {"bad"}),
        # A loss that is no number is within no limit.
        ({"metric": "loss <= 0.5"}, {"good"}),
        ({"metric": "loss>-1e9"}, {"good"}),
        ({"metric": "accuracy>0"}, set()),
        ({"state": "failed", "metric": "loss<9"}, set()),
    ],
)
def test_filters(two: Any, filters: dict[str, str], names: set[str]) -> None:
    """Runs are listed by a part of their path, their state and a limit of a metric."""
    assert {run.path.name for run in runs(**filters)} == names
    assert len(runs(1)) == 1


def test_a_run_that_cannot_be_read(
    two: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other runs are listed, and the unreadable one is named."""
    # An error that no reader of a run folder raises on purpose.

    def read(run: RunDir, queue: Any) -> Status:
        if run.path.name == "bad":
            raise RecursionError("too deep")
        return read_status(run, queue)

    monkeypatch.setattr(listing, "read_status", read)
    assert [run.path.name for run in runs()] == ["good"]
    assert capsys.readouterr().err == f"left out: {two[0].path}: too deep\n"


def test_wrong_filters(two: Any) -> None:
    """A state that does not exist and a limit that is none are refused with their form."""
    with pytest.raises(InputError, match="state: got fine; one of pending, running"):
        runs(state="fine")
    for metric in ("loss", "loss=1", "loss<low"):
        with pytest.raises(InputError, match=f"metric: got {metric}; give a limit, as 'evaluation"):
            runs(metric=metric)
    assert runs_table([], 80) == "no runs"


def test_compare(two: tuple[Run, Run], tmp_path: Path) -> None:
    """Each difference is a line: recipe, code, state, metrics; a queued run has nothing yet."""
    bad, good = two
    assert bad.compare(good) == [
        "optimizer.learning_rate: 1.0 -> 0.1",
        "modules/mine.py: other content",
        'state: "failed" -> "succeeded"',
        'loss: "nan" -> 0.5',
    ]
    assert good.compare(good) == []
    # Six digits, and all of them where six are the same.
    for run, first, second in ((bad, 1 / 3, 0.5), (good, 2 / 3, 0.5 + 1e-9)):
        line = {"step": 3, "loss": first, "learning_rate": second}
        RunDir(run.path).metrics.write_text(json.dumps(line) + "\n")
    assert bad.compare(good)[-2:] == [
        "loss: 0.333333 -> 0.666667",
        "learning_rate: 0.5 -> 0.500000001",
    ]
    JobRecord.for_this_process("local", JobState.PENDING).write(RunDir(tmp_path / "queued"))
    with pytest.raises(InputError, match="queued: has not begun, so it has no record to compare"):
        bad.compare(Run(tmp_path / "queued"))


def test_a_fallback_is_named_after_the_end(two: tuple[Run, Run]) -> None:
    """Status, list, diagnose and compare say that another engine ran, and why, in one line."""
    bad, good = two
    choice = EngineChoice("ort", "eager", "no operator:\n" + "word " * 200)
    write_json_atomically(RunDir(good.path).engine, engine_report("eager", engine=choice).to_json())
    write_json_atomically(RunDir(bad.path).engine, engine_report("ort").to_json())
    line = "asked for ort, fell back to eager: no operator: word"
    found = read_status(RunDir(good.path))
    assert str(found.fallback).startswith(line)
    assert str(found.fallback).endswith("word ...")
    assert line in str(found)
    assert line in found.to_json()
    assert f"  {found.fallback}" in diagnose_run(RunDir(good.path)).evidence
    assert f"    {line} " in runs_table(statuses(None), 100)
    assert f'fallback: null -> "{found.fallback}"' in bad.compare(good)
    assert read_status(RunDir(bad.path)).fallback is None


def started(folder: Path, task: str = "train") -> RunDir:
    """Return a run that this user has just started, and that has ended."""
    run = RunDir(folder)
    resolved_run = load_and_resolve_recipe(
        Path("recipe.yaml"), (), LaunchOptions(task=task), os.environ
    )
    set_aside_and_write_run_files_and_print_plan_unless_restart(resolved_run, run)
    record = JobRecord.for_this_process("local", JobState.RUNNING)
    record.copy_ended_now(JobState.SUCCEEDED, Verdict(0, "the end")).write(run)
    registry.register_run_or_print_error(run)
    return run


def test_latest_is_the_newest_training_here(
    two: tuple[Run, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest` is no parity run, trial of a sweep or run of another project; the list marks them."""
    started(tmp_path / "runs" / "proof", "parity")
    sweep = SweepDir(tmp_path / "sweep")
    started(sweep.trial_run_dir(3).path)
    sweep.journal.touch()
    times = {"good": 1, "bad": 2, "proof": 3, "0003": 4}
    for file in (tmp_path / "cache" / "runs").iterdir():
        os.utime(file, (times[Path(file.read_text()).name],) * 2)
    assert Run().path.name == "bad"
    table = runs_table(statuses(None), 100)
    assert [
        line.strip() if line.startswith(" ") else line.split(maxsplit=5)[-1]
        for line in table.splitlines()[1:]
    ] == [
        "sweep/trials/0003 (trial)",
        "runs/proof (parity)",
        "runs/bad",
        "the end",
        "runs/good",
    ]
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    with pytest.raises(InputError) as caught:
        Run()
    assert str(caught.value) == (
        f"latest: no training was started in {other} or below it; the newest elsewhere is "
        f"{tmp_path}/runs/bad; give a run folder or a run's name (`ortlaunch list`)"
    )
    # A name is found from any folder.
    assert Run("proof").path.name == "proof"


def test_continue_takes_the_newest_training_of_the_recipe(
    two: tuple[Run, Run], ortlaunch: typed.Run, tmp_path: Path
) -> None:
    """`train RECIPE --continue` is `--run-dir` of the run whose last start read this file."""
    dry = ("train", "recipe.yaml", "--dry-run")
    Path("link.yaml").symlink_to("recipe.yaml")
    refused = ortlaunch(*dry, "--continue")
    assert (refused.status, refused.out) == (2, "")
    assert "ortlaunch: --continue: this user has started no training of recipe.yaml" in refused.err
    # The last starts of bad, good and proof read recipe.yaml; that of elsewhere another file.
    elsewhere = started(tmp_path / "runs" / "elsewhere")
    proof = started(tmp_path / "runs" / "proof", "parity")
    for run, *recipes in (
        (RunDir(two[0].path), "good.yaml", "link.yaml"),
        (RunDir(two[1].path), "recipe.yaml"),
        (elsewhere, "recipe.yaml", "good.yaml"),
        (proof, "recipe.yaml"),
    ):
        for recipe in recipes:
            append_start_to_command_log(run, Path(recipe), ())
    times = {"good": 1, "bad": 2, "elsewhere": 3, "proof": 4}
    for file in (tmp_path / "cache" / "runs").iterdir():
        os.utime(file, (times[Path(file.read_text()).name],) * 2)
    taken = ortlaunch(*dry, "--continue")
    given = ortlaunch(*dry, f"--run-dir={two[0].path}")
    assert taken == given
    assert f"continuing {two[0].path}" in taken.err
    refused = ortlaunch(*dry, "--continue", "--run-dir", "x")
    assert (refused.status, refused.out) == (2, "")
    assert "--continue --run-dir x: --continue is for the newest run of the recipe" in refused.err
    # A file of a run that cannot be read takes that run out, and no other.
    RunDir(two[0].path).commands.write_text("{")
    assert f"continuing {two[1].path}" in ortlaunch(*dry, "--continue").err


def test_a_run_in_a_folder_of_another_name(two: tuple[Run, Run]) -> None:
    """A run started with --run-dir is found by the name in its recipe; a folder's name wins."""
    assert {run.path.name for run in runs(name="mad")} == {"good", "bad"}
    newest = runs(1)[0].path
    assert Run("made").path == newest
    assert Run("bad").path.name == "bad"
    with pytest.raises(InputError, match="mad: is neither a folder nor the name of a run"):
        Run("mad")


def test_the_table_of_runs(two: tuple[Run, Run], tmp_path: Path) -> None:
    """A row has what a person compares; a failed run has its reason; no line is too long."""
    bad = RunDir(tmp_path / "runs" / "bad")
    failure = Failure(Cause.RAISED, "ValueError: " + "long " * 30, 0, "h", status=1)
    record = JobRecord.for_this_process("local", JobState.RUNNING)
    record.copy_ended_now(
        JobState.FAILED, Verdict(1, "the end", failure, diagnosis_verdict_line(failure))
    ).write(bad)
    metrics = '{"step": 3, "evaluation_loss": 0.25, "evaluation_classification_accuracy": 0.915}'
    good = RunDir(tmp_path / "runs" / "good")
    good.metrics.write_text(f'{{"step": 3, "loss": 0.5}}\n{metrics}\n')
    lines = runs_table(statuses(None), 60).splitlines()
    rows = {line.split()[-1]: line.split() for line in lines if not line.startswith(" ")}
    assert lines[0].split() == ["state", "step", "loss", "metric", "time", "run"]
    assert rows["runs/good"][:5] == ["succeeded", "3/3", "0.5000", "accuracy", "91.50%"]
    assert rows["runs/bad"][:4] == ["failed", "3/3", "nan", "-"]
    reason = lines[1 + [*rows].index("runs/bad")]
    assert reason.startswith("    rank 0 on host h raised ValueError: long")
    assert reason.endswith(" ...")
    assert max(map(len, lines)) <= 60
    measured = started(good.path / "evaluations" / "step_00000003", "evaluate")
    write_json_atomically(
        measured.evaluation, {"step": 3, "loss": 0.2, "classification_accuracy": 0.5}
    )
    line = runs_table(statuses(None), 90).splitlines()[1]
    # The name of its run is needed, and an evaluation has a metric.
    assert line.endswith(" good/step_00000003 (evaluate)")
    assert line.split()[1:5] == ["3/3", "-", "accuracy", "50.00%"]


def test_an_early_stop(two: tuple[Run, Run], tmp_path: Path) -> None:
    """list, status and diagnose have the early stop of a training and its best step."""
    run = started(tmp_path / "runs" / "early")
    run.metrics.write_text('{"step": 2, "loss": 0.5}\n')
    best = {"metric": "f1_macro", "value": 0.5819, "step": 1}
    write_json_atomically(run.summary, {"best": best})
    line = "best f1_macro 0.5819 after step 1"
    assert runs_table(statuses(None), 90).splitlines()[2] == f"    {line}"
    write_json_atomically(run.summary, {"best": best, "stopped_early": best})
    text = f"stopped early after step 2 of 3: {line}"
    assert f"\n{text}\n" in str(read_status(run))
    assert runs_table(statuses(None), 90).splitlines()[2] == f"    {text}"
    assert str(diagnose_run(run)).endswith(text)
    # No evaluation had a finite value.
    write_json_atomically(run.summary, {"stopped_early": {**best, "value": None, "step": None}})
    assert read_status(run).early_stop_and_best_line == "stopped early after step 2 of 3"
