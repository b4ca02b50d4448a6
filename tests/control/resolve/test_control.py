"""Tests of the control side: run folders, their contents, and the common name of a launch."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import ortmodule
from ortlaunch import doctor
from ortlaunch.base import module_start as start
from ortlaunch.base.errors import LaunchError, MissingDependency, PlanError, RecipeError
from ortlaunch.launch import JobState, LaunchRequest
from ortlaunch.launch.record import JobRecord
from ortlaunch.launch_plan import Plan
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.rank import Rank
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.resolve.prepare import (
    difference_texts,
    read_earlier_or_else_given_recipe_or_none,
    refuse_foreign_folder_or_return_continuing_lines,
    set_aside_and_write_run_files_and_print_plan_unless_restart,
    write_run_files_and_clear_earlier_start,
)
from ortlaunch.resolve.resolve import ResolvedRun, load_and_resolve_recipe
from ortlaunch.resolve.resume import AUTOMATIC_RESUME, ChosenCheckpoint, RunBeginning
from ortlaunch.run import control, rank_under_launcher
from ortlaunch.run.job_file import JobFile
from ortlaunch.run.preparation import (
    create_run_folder_or_numbered_one,
    requested_or_proposed_run_folder,
    startable_run_beginning_and_done_text_or_refuse,
)
from ortlaunch.run_folder.folder import RunDir, write_json_atomically, write_text_atomically
from ortlaunch.run_folder.lock import RunLock
from ortlaunch.run_folder.verdict import Verdict
from tests.makers import CUSTOM, OWN_MODULE, host, world_of
from tests.makers import recipe as made_recipe

# The variables of each launcher for rank 1 of 4 ranks on 2 hosts.
TORCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
         "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "77"}  # fmt: skip
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
       "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test works in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN_MODULE)


def resolved(
    asked: LaunchOptions | None = None, environ: dict[str, str] | None = None, **sections: Any
) -> ResolvedRun:
    """Resolve a custom recipe with these sections, which is written to a file here."""
    path = Path("recipe.yaml")
    path.write_text(yaml.safe_dump({**CUSTOM, **sections}))
    return load_and_resolve_recipe(path, (), asked or LaunchOptions(), environ or {})


def test_settle_run_names_this_python_and_the_recipes_folder(tmp_path: Path) -> None:
    """The plan has this interpreter, and the absolute folder of the user's modules."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "recipe.yaml").write_text(yaml.safe_dump(CUSTOM))

    def settled() -> Plan:
        return load_and_resolve_recipe(
            Path("sub/recipe.yaml"), ["train.max_steps=7"], LaunchOptions(), {}
        ).plan

    plan = settled()
    assert plan.argv[1:] == (start.__file__, "ortlaunch.worker")
    # The module is in the current folder.
    assert (os.path.isabs(plan.argv[0]), plan.modules) == (True, str(tmp_path))
    Path("mine.py").rename("sub/mine.py")
    assert settled().modules == str(tmp_path / "sub")


def test_device_rules_are_checked_against_this_machine() -> None:
    """A recipe that needs another device is refused with the location of the field."""
    with pytest.raises(RecipeError) as caught:
        resolved(precision="fp16", zero={"stage": 1}, launch={"launcher": "local"})
    assert str(caught.value).startswith("recipe.yaml:")
    assert "precision: got fp16 with DeepSpeed on CPU" in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({**TORCH, "TORCHELASTIC_RUN_ID": "job 1/é"}, "runs/made-job-1-é"),
        ({**MPI, "PMIX_NAMESPACE": "prterun-vm-3307@1"}, "runs/made-prterun-vm-3307-1"),
        (SLURM, "runs/made-slurm-77.0.0"),
        # A requeued job has the same id, so its restarts are counted.
        ({**SLURM, "SLURM_RESTART_COUNT": "2"}, "runs/made-slurm-77.0.2"),
    ],
)
def test_folder_of_ranks_on_several_hosts(environ: dict[str, str], folder: str) -> None:
    """The launcher's name of the launch becomes the folder's name, the same on every rank."""
    assert str(requested_or_proposed_run_folder(None, resolved(environ=environ), environ)) == folder
    assert (
        str(requested_or_proposed_run_folder(Path("mine"), resolved(environ=environ), environ))
        == "mine"
    )


@pytest.mark.parametrize("environ", [{**TORCH, "TORCHELASTIC_RUN_ID": "none"}, MPI])
def test_ranks_without_a_common_name(environ: dict[str, str]) -> None:
    """Without a common name the ranks need --run-dir."""
    # "none" is torchrun's default name, which all its launches share.
    with pytest.raises(PlanError) as caught:
        requested_or_proposed_run_folder(None, resolved(environ=environ), environ)
    message = (
        "the launcher gives the ranks no common name for the run folder; add --run-dir, the "
        "same for all ranks"
    )
    assert str(caught.value) == message
    assert (
        str(requested_or_proposed_run_folder(Path("mine"), resolved(environ=environ), environ))
        == "mine"
    )


def test_folder_of_ranks_on_this_host() -> None:
    """Ranks on one host get a folder by their parent process, which no other launch has."""
    environ = {**TORCH, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    folder = str(requested_or_proposed_run_folder(None, resolved(environ=environ), environ))
    assert folder == str(
        requested_or_proposed_run_folder(
            None, resolved(environ={**environ, "RANK": "0", "LOCAL_RANK": "0"}), environ
        )
    )
    assert folder.startswith(f"runs/made-{os.getppid()}-")


def test_folder_of_a_new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new folder has the run's name and the time, and is never shared by two runs."""
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-030405")
    run = requested_or_proposed_run_folder(None, resolved(), {})
    assert str(run) == "runs/made-20260102-030405"
    assert [str(create_run_folder_or_numbered_one(run)) for _ in range(3)] == [
        f"{run}",
        f"{run}-2",
        f"{run}-3",
    ]


def older(folder: str, steps: int | None = None, **sections: Any) -> RunDir:
    """Write the folder of an earlier run, with a checkpoint after some steps."""
    run = RunDir(folder)
    JobRecord.for_this_process("local", JobState.FAILED).write(run)
    recipe = resolved(**sections).recipe_file.recipe
    write_text_atomically(run.recipe, dump_recipe_yaml(recipe))
    if steps:
        write_text_atomically(run.checkpoint_folder(steps) / "COMPLETE", "")
        write_json_atomically(
            run.checkpoint_folder(steps) / "training.json",
            {"recipe": recipe.model_dump(mode="json")},
        )
    return run


def test_a_run_folder_without_control_characters() -> None:
    """A folder's name with a control character is refused."""
    # A newline would end a line of a job's script, and escapes would reach terminals.
    with pytest.raises(
        PlanError,
        match=r"^--run-dir: '.*/a\\ntouch P' has the control character '\\n'; give a path",
    ):
        requested_or_proposed_run_folder(Path("a\ntouch P"), resolved(), {})


def test_a_file_is_no_run_folder() -> None:
    """A file's path as --run-dir is refused."""
    Path("mine").write_text("")
    with pytest.raises(
        PlanError, match=r"^--run-dir mine: is a file, not a folder; give a folder$"
    ):
        control.lock_folder_and_run_training(resolved(), Path("mine"))


def test_a_folder_of_something_else() -> None:
    """A folder with other files as --run-dir is refused, and nothing is written there."""
    write_text_atomically(Path("mine/thesis.tex"), "")
    with pytest.raises(
        PlanError, match=r"^--run-dir mine: is neither empty nor a run folder; give a new one$"
    ):
        control.lock_folder_and_run_training(resolved(), Path("mine"))
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.tex"]


def test_the_folder_of_a_persons_recipe() -> None:
    """A recipe without records of a run is a person's: it is not replaced by the resolved one."""
    write_text_atomically(Path("mine/recipe.yaml"), yaml.safe_dump(CUSTOM))
    for path, text in (("job.json", '{"tasks": []}'), ("plan.json", "{}")):
        write_text_atomically(Path("mine", path), text)
    with pytest.raises(PlanError, match=r"^--run-dir mine: is neither empty nor a run folder"):
        control.lock_folder_and_run_training(resolved(), Path("mine"))
    assert Path("mine/recipe.yaml").read_text() == yaml.safe_dump(CUSTOM)


@pytest.mark.parametrize("record", ["job", "submitted", "checkpoint"])
def test_a_persons_file_in_a_run_folder(record: str) -> None:
    """A person's file, or a report, beside the records of a run does not prevent its start."""
    run = older("mine", steps=2)
    run.recipe.unlink()
    if record != "job":
        run.job.unlink()
    if record != "checkpoint":
        shutil.rmtree(run.checkpoints)
    if record == "submitted":
        write_text_atomically(run.submitted, "")
    write_text_atomically(Path("mine/notes.txt"), "")
    assert refuse_foreign_folder_or_return_continuing_lines(run, None, resolved()) == []


def test_a_folder_of_a_run_that_never_began() -> None:
    """The files of a command that ended while it prepared do not prevent another start."""
    run = RunDir("mine")
    with RunLock() as lock:
        lock.lock_and_record_holder_or_refuse(run)
        with JobFile(run, "local") as file:
            file.record_end_or_print_disk_error(
                Verdict(143, "stopped by SIGTERM"), stopped_on_request=True
            )
    assert sorted(path.name for path in run.path.iterdir()) == ["job.json", "lock"]
    assert refuse_foreign_folder_or_return_continuing_lines(run, None, resolved()) == []


def test_a_folder_of_a_command_that_was_killed_while_it_wrote() -> None:
    """The next start uses the folder of a killed command, and removes its partial files."""
    # It was killed between resume.json and recipe.yaml, or while it wrote a file.
    run = RunDir("mine")
    for path in (
        run.resume,
        run.path / ".recipe.yaml.4321-0123abcd",
        run.path / ".engine.json.77-0123abcd",
    ):
        write_text_atomically(path, "{}")
    # Created before the run, as a user does for a link to another disk.
    run.checkpoints.mkdir()
    made = resolved()
    assert refuse_foreign_folder_or_return_continuing_lines(run, None, made) == []
    write_run_files_and_clear_earlier_start(run, made.recipe_file.recipe, made.plan)
    assert not list(run.path.glob(".*"))


def test_a_command_that_began_a_moment_ago_is_named() -> None:
    """A command that has just begun in the folder is named in the refusal of another one."""
    # Several may start in one new folder; one of them trains.
    run = RunDir("mine")
    with RunLock() as lock:
        lock.lock_and_record_holder_or_refuse(run)
        with pytest.raises(
            PlanError, match=f"^--run-dir mine: process {os.getpid()} on host .* trains there; wait"
        ):
            control.lock_folder_and_run_training(resolved(), Path("mine"))


def test_a_link_to_nowhere_is_no_run_folder() -> None:
    """A dangling link as --run-dir is refused with its target."""
    # Creating the folder would fail with `File exists`, which explains nothing.
    Path("mine").symlink_to("gone/disk")
    with pytest.raises(
        PlanError,
        match=r"^--run-dir mine: links to gone/disk, which does not exist; create that fold",
    ):
        control.lock_folder_and_run_training(resolved(), Path("mine"))


def test_a_damaged_recipe_beside_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged recipe in the run folder is replaced if the checkpoint recorded its own."""
    run = older("mine", steps=2)
    made = resolved()
    run.recipe.write_text("\x01" + run.recipe.read_text()[1:])
    origin_record = run.checkpoint_folder(2) / "training.json"
    origin_record.rename("training.json")
    with pytest.raises(RecipeError):
        read_earlier_or_else_given_recipe_or_none(run, made)
    Path("training.json").rename(origin_record)
    assert read_earlier_or_else_given_recipe_or_none(run, made) == made.recipe_file.recipe
    assert (
        "mine/recipe.yaml is replaced by the recipe given: mine/checkpoints/step"
        in capsys.readouterr().out
    )


def test_an_edited_recipe_in_a_run_folder() -> None:
    """An invalid recipe in the run folder is refused with file, line and column."""
    run = older("mine")
    write_text_atomically(run.recipe, run.recipe.read_text().replace("name: made", "nam: made"))
    with pytest.raises(RecipeError) as caught:
        control.lock_folder_and_run_training(resolved(), Path("mine"))
    assert caught.value.problems[0].startswith(
        "mine/recipe.yaml:1:1: nam: unknown key; did you mean name?"
    )


GOING_ON = "continuing after step 2 from mine/checkpoints/step_00000002"
# Fields that a resumed run may change.
CHANGED: dict[str, Any] = {
    "optimizer": {"name": "sgd", "learning_rate": 0.2},
    "train": {"max_steps": 9},
}


def test_checkpoints_of_another_training() -> None:
    """Changes that make a resumed run a different training are refused and listed."""
    older("mine", steps=2)
    with pytest.raises(PlanError) as caught:
        control.lock_folder_and_run_training(resolved(**CHANGED, seed=7), Path("mine"))
    assert str(caught.value) == (
        "mine/checkpoints/step_00000002 belongs to a different training:\n  seed: 42 -> 7: "
        "refused without --allow data (it determines order, masking and dropout)\nUse the "
        "recipe that it was trained with, --allow data if this is intended, or a new --run-dir"
    )


@pytest.mark.parametrize(
    ("steps", "sections", "lines"),
    [
        (2, {}, ["continuing mine", GOING_ON, "  no settings have changed since"]),
        (
            2,
            {"log": {"every_steps": 9}},
            ["continuing mine", GOING_ON, "  changed: log.every_steps: 10 -> 9: applied"],
        ),
        # Without a checkpoint nothing can contradict the new recipe.
        (
            None,
            CHANGED,
            [
                "continuing mine",
                "  changed: optimizer.learning_rate: 0.1 -> 0.2",
                "  changed: train.max_steps: 3 -> 9",
            ],
        ),
    ],
)
def test_a_folder_is_continued(
    steps: int | None, sections: dict[str, Any], lines: list[str]
) -> None:
    """A run folder of this recipe is continued, and every change is listed."""
    run = older("mine", steps)
    made = resolved(**sections)
    assert (
        list(
            startable_run_beginning_and_done_text_or_refuse(made, run, AUTOMATIC_RESUME)[
                1
            ].text_lines
        )
        == lines
    )


def test_a_comparison_in_the_folder_of_a_training() -> None:
    """`ortlaunch parity` refuses a folder with checkpoints of a training."""
    # It would overwrite the recipe and the records that belong to them.
    comparison = resolved(
        LaunchOptions(task="parity"), engine={"name": "inductor", "parity_steps": 1}
    )
    with pytest.raises(
        PlanError, match=r"^--run-dir mine: contains the checkpoints of a training, whose records"
    ):
        refuse_foreign_folder_or_return_continuing_lines(
            older("mine", steps=2), comparison.recipe_file.recipe, comparison
        )
    refuse_foreign_folder_or_return_continuing_lines(
        older("other"), comparison.recipe_file.recipe, comparison
    )


def test_preparing_puts_old_errors_aside(capsys: pytest.CaptureFixture[str]) -> None:
    """A continued run moves the errors of the earlier start away."""
    # Else its own end would be explained by them.
    run = older("mine")
    write_text_atomically(run.rank_error_path(3), "{}")
    run.failure_printed.touch()
    run.store.touch()
    set_aside_and_write_run_files_and_print_plan_unless_restart(
        resolved(zero={"stage": 1}),
        run,
        run_beginning=RunBeginning(ChosenCheckpoint(None), AUTOMATIC_RESUME),
    )
    assert not run.errors.exists()
    assert not run.store.exists()
    assert (run.attempt_folder(1) / "errors" / run.rank_error_path(3).name).exists()
    assert json.loads(run.deepspeed.read_text())["zero_optimization"] == {"stage": 1}
    assert json.loads(run.environment.read_text())["packages"]["pydantic"]
    assert capsys.readouterr().out.splitlines()[-1] == "run folder: mine"


def test_missing_means_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without a required package ends before its folder is created."""
    monkeypatch.setattr(doctor, "_is_installed", lambda package: False)
    with pytest.raises(MissingDependency):
        control.lock_folder_and_run_training(resolved(zero={"stage": 1}), None)
    # There is no folder `runs`.
    assert {path.name for path in Path().iterdir()} == {"mine.py", "recipe.yaml"}


# For each package: sections that need it, and the line for its absence.
ABSENT = {
    "deepspeed": ({"zero": {"stage": 1}},
                  'zero: DeepSpeed is not installed: pip install "ortlaunch[deepspeed]", or set zero=null'),
    "peft": ({"model": {"task": "causal-lm", "config": {"model_type": "llama", "num_hidden_layers": 1}, "lora": {}},
              "data": {"train": "python-docs", "tokenizer": "here", "sequence_length": 8}},
             'model.lora: peft is not installed: pip install "ortlaunch[lora]"'),
    "tensorboard": ({"log": {"trackers": ["tensorboard"]}},
                    'log.trackers: tensorboard is not installed: pip install "ortlaunch[tensorboard]"'),
}  # fmt: skip


@pytest.mark.parametrize("package", ABSENT)
def test_what_to_type_for_a_missing_package(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each optional package has its own line, and is required only if the recipe uses it."""
    sections, line = ABSENT[package]
    made = resolved(**sections)
    monkeypatch.setattr(doctor, "_is_installed", lambda name: name != package)
    with pytest.raises(MissingDependency) as caught:
        doctor.require_packages_and_extensions_installed(made.recipe_file.recipe, made.world)
    assert str(caught.value) == line
    plain = resolved()
    doctor.require_packages_and_extensions_installed(plain.recipe_file.recipe, plain.world)


def test_hosts_meet_through_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpi4py is required for ranks of several hosts only."""
    # Ranks of one host meet in the run folder.
    monkeypatch.setattr(doctor, "_is_installed", lambda package: package != "mpi4py")
    made = made_recipe()
    doctor.require_packages_and_extensions_installed(made, world_of(made, [host("a", 2)], "mpi"))
    with pytest.raises(MissingDependency) as caught:
        doctor.require_packages_and_extensions_installed(
            made, world_of(made, [host("a", 1), host("b", 1)], "mpi")
        )
    assert str(caught.value) == (
        'launcher mpi on more than one host: mpi4py is not installed: pip install "ortlaunch[mpi]"'
    )


def test_all_that_is_missing_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two missing packages are two lines of one error."""
    made = resolved(zero={"stage": 1}, log={"trackers": ["tensorboard"]})
    monkeypatch.setattr(doctor, "_is_installed", lambda name: False)
    with pytest.raises(MissingDependency) as caught:
        doctor.require_packages_and_extensions_installed(made.recipe_file.recipe, made.world)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        (
            [ortmodule.MissingDependency("no extensions", "python -m ortmodule setup")],
            "no extensions: python -m ortmodule setup",
        ),
        (
            [ortmodule.MissingDependency("no wheel")],
            "no wheel: engines eager and inductor do not need it",
        ),
        ([], None),
    ],
)
def test_what_engine_ort_takes(
    missing: list[ortmodule.MissingDependency], line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine ort requires its package and its built extensions, other engines neither."""
    monkeypatch.setattr(ortmodule, "check", lambda on_gpu: missing, raising=False)
    eager = resolved()
    made = resolved(engine={"name": "ort"})
    doctor.require_packages_and_extensions_installed(eager.recipe_file.recipe, eager.world)
    if line is None:
        doctor.require_packages_and_extensions_installed(made.recipe_file.recipe, made.world)
        return
    with pytest.raises(MissingDependency) as caught:
        doctor.require_packages_and_extensions_installed(made.recipe_file.recipe, made.world)
    assert str(caught.value) == f"engine ort: {line}"


@pytest.mark.parametrize(
    ("installed", "engine", "name", "is_noted"),
    [
        ({"onnxruntime-training-cpu": "1.19.2"}, {}, "ort", False),
        ({}, {}, "auto", True),
        ({}, {"parity_steps": 0}, "auto", True),
        ({}, {"name": "ort"}, "ort", False),
    ],
)
def test_the_engine_of_a_recipe_that_names_none(
    installed: Any, engine: Any, name: str, is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default engine is auto where ONNX Runtime Training is not installed, with a note."""
    lookup = "ortlaunch.resolve.resolve.installed_version_by_package_name"
    monkeypatch.setattr(lookup, lambda names: installed)
    made = resolved(engine=engine)
    assert made.recipe_file.recipe.engine.name == name
    note = "engine: auto, because ONNX Runtime Training is not installed here"
    assert (note in made.notes) == is_noted
    # A choice that is made later keeps the note.
    assert (note in made.apply_auto_results("engine.allow_fallback=true").notes) == is_noted


def test_a_rank_waits_for_rank_0_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits in vain for the prepared folder ends with a likely cause."""
    environ = {**TORCH, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    monkeypatch.setattr(rank_under_launcher, "_JOIN_SECONDS", 0.1)
    with pytest.raises(LaunchError) as caught:
        control.lock_folder_and_run_training(resolved(environ=environ), Path("mine"))
    assert (
        str(caught.value)
        == "rank 0 did not prepare mine within 0.1 s; is it on a disk that all hosts share?"
    )


@pytest.mark.parametrize(
    "environ", [{**TORCH, "TORCHELASTIC_RUN_ID": "none"}, {**TORCH, "TORCHELASTIC_RUN_ID": "a"}]
)
def test_ranks_become_the_worker(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 prepares the folder and marks it; then each rank becomes the worker."""
    sent = []
    # execve would replace the test process.
    monkeypatch.setattr(
        os, "execve", lambda path, argv, env: sent.append((path, argv, env["NOTE"]))
    )
    launch = {"env": {"NOTE": "x"}}
    for rank in ("0", "1"):
        one = {**environ, "RANK": rank, "LOCAL_RANK": rank}
        made = resolved(environ=one, launch=launch)
        assert made.world.enclosing_rank == Rank(int(rank), 4, int(rank), 2)
        control.lock_folder_and_run_training(made, Path("mine"))
        assert sent[-1] == (made.plan.argv[0], (*made.plan.argv, "mine"), "x")
    assert json.loads(Path("mine/plan.json").read_text())["world_size"] == 4


def test_a_mark_of_an_earlier_launch_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 deletes the mark of an earlier launch before it prepares the folder."""
    # Else other ranks would start with the files of that launch.
    environ = {**TORCH, "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    made = resolved(environ=environ)
    write_text_atomically(RunDir("mine").ready / "launch", "")
    seen = []

    def prepare(*_: object) -> LaunchRequest:
        seen.append((RunDir("mine").ready / "launch").exists())
        return LaunchRequest(("worker",))

    monkeypatch.setattr(
        rank_under_launcher, "set_aside_and_write_run_files_and_print_plan_unless_restart", prepare
    )
    monkeypatch.setattr(os, "execve", lambda *_: None)
    control.lock_folder_and_run_training(made, Path("mine"))
    assert seen == [False]


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a: 1 -> 2"]),
        ({"a": {"b": [1], "c": "x"}}, {"a": {"b": [2], "c": "x"}}, ["a.b: [1] -> [2]"]),
        ({"a": None}, {"a": {"b": 1}}, ["a: None -> {'b': 1}"]),
        ({"a": 1}, {"b": 2}, ["a: 1 -> None", "b: None -> 2"]),
    ],
)
def test_differences(before: dict[str, Any], after: dict[str, Any], lines: list[str]) -> None:
    """Each leaf that differs is listed with its path, old and new value."""
    assert list(difference_texts(before, after)) == lines


def test_starts_in_one_second_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start whose proposed folder another one has by now gets its own, and checks none of that."""
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-030405")
    started = []

    class Started(Exception):
        """The ranks would start now."""

    def start(found: Any, run: RunDir) -> Any:
        started.append(str(run))
        raise Started

    monkeypatch.setattr(control.choices, "search_and_apply_micro_size_if_auto", start)
    # The other start trains there.
    other = older("runs/made-20260102-030405")
    write_text_atomically(other.output, "")
    with RunLock() as lock:
        lock.lock_and_record_holder_or_refuse(other)
        for _ in range(2):
            with pytest.raises(Started):
                control.lock_folder_and_run_training(resolved(), None)
    assert started == [f"{other}-2", f"{other}-3"]
