"""Faults of disks and machines: damage to each file, a full disk, and one that turns read-only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import CheckpointError, InputError
from ortlaunch.run_folder.folder import (
    RunDir,
    read_json_or_raise_damaged,
    write_json_atomically,
    write_text_atomically,
)
from ortlaunch.run_folder.resume_record import FROM_THE_BEGINNING
from ortlaunch.worker import checkpoint
from tests import labs
from tests.makers import plan, recipe
from tests.training import Trained, train_here
from tests.worker.checkpoint.test_checkpoint import GROUP, flip

ROWS = [
    {"x": row, "y": row.sum()}
    for row in torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
]
EVERY_2 = {"every_steps": 2, "every_minutes": None, "keep": None}


class Net(nn.Module):
    """A model of 33 kB, so checkpoints of 100 kB; it calls a function before each pass."""

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 1))
        self.before = before
        self.passes = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.before(self.passes)
        return ((self.layers(x).squeeze(-1) - y) ** 2).mean()


def trained(run: RunDir, steps: int = 6, model: nn.Module | None = None, **policy: Any) -> Trained:
    """Return a training whose checkpoints have all files of a run's checkpoint."""
    sections = {
        "train": {"max_steps": steps},
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
    }
    write_text_atomically(run.plan, plan(recipe(**sections)).to_json())
    return train_here(run.path, model or Net(), ROWS, checkpoint={**EVERY_2, **policy}, **sections)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run with checkpoints of steps 2, 4 and 6."""
    return trained(RunDir(tmp_path_factory.mktemp("whole")))


def copy(whole: Trained, folder: Path) -> RunDir:
    shutil.copytree(whole.run.path, folder, dirs_exist_ok=True)
    return RunDir(folder)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "lost": Path.unlink,
    "flipped": flip,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_to_each_file_is_named(
    how: str, whole: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage to any file of a checkpoint is reported with its name, and the one before is used."""
    files = sorted(path for path in whole.run.checkpoint_folder(6).rglob("*") if path.is_file())
    assert len(files) >= 5
    for number, path in enumerate(files):
        run = copy(whole, tmp_path / str(number))
        DAMAGE[how](run.checkpoint_folder(6) / path.relative_to(whole.run.checkpoint_folder(6)))
        capsys.readouterr()
        assert checkpoint.set_aside_damaged_and_choose_own_or_source_checkpoint(run, GROUP) == (
            4,
            run.checkpoint_folder(4),
        )
        said = capsys.readouterr().out
        # That one is not damaged, but was never completed.
        if path.name == "COMPLETE" and how == "lost":
            assert said == ""
            continue
        # The manifest and COMPLETE verify each other, so damage of either names the manifest.
        names = ("manifest.json",) if path.name in ("manifest.json", "COMPLETE") else (path.name,)
        assert said.startswith(f"{run.checkpoint_folder(6)} is damaged: ")
        assert all(name in said for name in names)
        assert "set aside as step_00000006.broken" in said


def test_after_damage_the_same_steps_are_taken_again(whole: Trained, tmp_path: Path) -> None:
    """After damage, a run repeats the steps from the checkpoint before, to the same weights."""
    run = copy(whole, tmp_path)
    # The largest file has the weights.
    flip(max(run.checkpoint_folder(6).iterdir(), key=lambda path: path.stat().st_size))
    again = trained(run)
    assert all(
        torch.equal(a, b) for a, b in zip(again.model.parameters(), whole.model.parameters())
    )
    assert [step for step, _ in run.complete_checkpoints()] == [2, 4, 6]


def test_a_damaged_step_that_was_asked_for(whole: Trained, tmp_path: Path) -> None:
    """`--resume 6` accepts no other step."""
    run = copy(whole, tmp_path)
    replace(FROM_THE_BEGINNING, exact=True, step=6, checkpoint=str(run.checkpoint_folder(6))).write(
        run
    )
    assert checkpoint.set_aside_damaged_and_choose_own_or_source_checkpoint(run, GROUP) == (
        6,
        run.checkpoint_folder(6),
    )
    os.truncate(run.checkpoint_folder(6) / "manifest.json", 3)
    with pytest.raises(
        CheckpointError, match=r"^the checkpoint of step 6 was requested .*, and it is damaged$"
    ):
        checkpoint.set_aside_damaged_and_choose_own_or_source_checkpoint(run, GROUP)


@pytest.mark.parametrize("exact", [False, True])
def test_another_runs_damaged_checkpoint_stays_where_it_is(
    exact: bool, whole: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another run's damaged checkpoint is reported, and nothing in that run is renamed."""
    other = copy(whole, tmp_path / "other")
    new = RunDir(tmp_path / "new")
    os.truncate(other.checkpoint_folder(6) / "manifest.json", 3)
    replace(
        FROM_THE_BEGINNING,
        exact=exact,
        step=6,
        checkpoint=str(other.checkpoint_folder(6)),
        source="other",
    ).write(new)
    # The one requested step has no substitute; without the request, an older one is used.
    if exact:
        with pytest.raises(CheckpointError, match="No complete checkpoint was found in other"):
            checkpoint.set_aside_damaged_and_choose_own_or_source_checkpoint(new, GROUP)
    else:
        assert checkpoint.set_aside_damaged_and_choose_own_or_source_checkpoint(new, GROUP) == (
            4,
            other.checkpoint_folder(4),
        )
        assert f"  skipped: {other.checkpoint_folder(6)} is damaged" in capsys.readouterr().out
        resumed = trained(new, 6)
        assert resumed.state.step == 6
        assert all(
            torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters())
        )
    assert (other.checkpoint_folder(6) / "COMPLETE").exists()


@pytest.mark.parametrize("allow", [[], ["data"]])
def test_changed_data_are_found_by_those_who_read_them(
    allow: list[str], whole: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other samples than those of the checkpoint's training need --allow data."""
    run = copy(whole, tmp_path)
    # The path is absolute, as in resume.json.
    replace(
        FROM_THE_BEGINNING, allow=tuple(allow), step=6, checkpoint=str(run.checkpoint_folder(6))
    ).write(run)
    found = checkpoint.set_aside_damaged_and_choose_own_or_source_checkpoint(run, GROUP)
    assert found is not None
    made = recipe(train={"max_steps": 6}, optimizer={"name": "adamw", "learning_rate": 0.01})
    explained = (
        contextlib.nullcontext()
        if allow
        else pytest.raises(InputError, match="refused without --allow")
    )
    with explained:
        checkpoint.print_training_changes_and_refuse_unallowed(
            run, made, found, {"data": {"samples": 65, "fingerprint": None}}, GROUP
        )
    said = "applied, with --allow data" if allow else "refused without --allow data"
    assert (
        capsys.readouterr().out
        == f"  changed: data.samples: 64 -> 65: {said} (that many had been read)\n"
    )


@pytest.mark.parametrize("keeps", [True, False])
def test_an_evaluation_takes_weights_whatever_they_would_be_trained_on(
    keeps: bool, whole: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation accepts changed training data, if the run keeps tokenizer and labels."""
    run = copy(whole, tmp_path)
    replace(FROM_THE_BEGINNING, step=6, checkpoint=str(run.checkpoint_folder(6))).write(run)
    write_text_atomically(
        run.plan, run.plan.read_text().replace('"task": "train"', '"task": "evaluate"')
    )
    if keeps:
        write_json_atomically(run.vocabulary, {})
    found = checkpoint.set_aside_damaged_and_choose_own_or_source_checkpoint(run, GROUP)
    assert found is not None
    made = recipe(train={"max_steps": 6}, optimizer={"name": "adamw", "learning_rate": 0.01})
    # Otherwise tokenizer and labels may be made from the changed data.
    refused = pytest.raises(InputError, match=r"64 -> 65: refused \(its tokens and labels may")
    with contextlib.nullcontext() if keeps else refused:
        checkpoint.print_training_changes_and_refuse_unallowed(
            run, made, found, {"data": {"samples": 65, "fingerprint": None}}, GROUP
        )
    assert "allow" not in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte, which can be filled and made read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        labs.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Fill the disk up to some kilobytes, which logs need."""
    (folder / "filler").write_bytes(bytes(max(0, shutil.disk_usage(folder).free - 40_000)))


@pytest.mark.lab
@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_full_disk(policy: str, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A save on a full disk ends with a clear line and no partial files; `continue` tries again."""
    run = RunDir(disk / "run")

    def before(number: int) -> None:
        # The pass after the first checkpoint.
        if number == 3:
            fill(disk)
        elif number == 7:
            (disk / "filler").unlink()

    if policy == "stop":
        with pytest.raises(CheckpointError, match=r"00002 is complete$"):
            trained(run, 8, Net(before))
    else:
        trained(run, 8, Net(before), on_failure="continue")
        said = [
            line for line in capsys.readouterr().out.splitlines() if line.startswith("NOT SAVED")
        ]
        assert len(said) == 2
        assert "free, and a checkpoint needs" in said[0] or "No space left" in said[0]
        assert checkpoint.failed_save_count(run) == 2
    assert [step for step, _ in run.complete_checkpoints()] == ([2] if policy == "stop" else [2, 8])
    assert {path.name for path in run.checkpoints.iterdir()} <= {"step_00000002", "step_00000008"}
    assert checkpoint.set_aside_damaged_and_choose_own_or_source_checkpoint(run, GROUP) == (
        (2 if policy == "stop" else 8),
        run.checkpoint_folder(2 if policy == "stop" else 8),
    )


@pytest.mark.lab
def test_the_first_checkpoint_on_a_full_disk(disk: Path) -> None:
    """The first save on a full disk fails in its write, and its files are removed."""
    # Without an earlier checkpoint, no size is known in advance.
    run = RunDir(disk / "run")
    with pytest.raises(CheckpointError, match=r"step_00000002.partial could not be written: .*"):
        trained(run, 4, Net(lambda number: fill(disk) if number == 2 else None))
    assert list(run.checkpoints.iterdir()) == []


@pytest.mark.lab
def test_a_disk_that_turns_read_only(disk: Path, tmp_path: Path) -> None:
    """A save on a disk that turned read-only ends with a clear line; older checkpoints stay."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    (disk / "checkpoints").mkdir()
    run.checkpoints.symlink_to(disk / "checkpoints")

    def before(number: int) -> None:
        # The pass before the second checkpoint.
        if number == 4:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

    with pytest.raises(CheckpointError, match=r"Read-only file system.*00002 is complete$"):
        trained(run, 6, Net(before))
    assert run.newest_complete_checkpoint() == (2, run.checkpoint_folder(2))
    assert read_json_or_raise_damaged(run.checkpoint_folder(2) / "manifest.json")["step"] == 2
