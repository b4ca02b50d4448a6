"""Checkpoints: written completely or not at all, the newest found, old ones pruned."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ortlaunch.base.errors import CheckpointError
from ortlaunch.rank import Rank
from ortlaunch.run_folder.checkpoint_hold import (
    is_checkpoint_locked_by_reader,
    lock_chosen_checkpoint_and_yield_step,
)
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker import checkpoint
from ortlaunch.worker.checkpoint import transaction
from ortlaunch.worker.checkpoint.saver import remove_old_checkpoints_and_exports
from ortlaunch.worker.process_group.distributed import DistributedContext

GROUP: Any = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))


class Writer:
    """A stepper whose snapshots are two files, or fail in the middle."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.state: dict[str, Any] = {}

    def named_state(self) -> Writer:
        return self

    def write_rank_file_and_index(self, folder: Path) -> dict[str, Any]:
        (folder / "part").mkdir()
        (folder / "part" / "weights").write_text("12345")
        if self.fails:
            raise OSError("No space left on device")
        (folder / "state").write_text(json.dumps(self.state))
        return {}


def take(writer: Writer, state: dict[str, Any], group: DistributedContext) -> Writer:
    """Return the writer as its own snapshot."""
    writer.state = state
    return writer


@pytest.fixture(autouse=True)
def writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a Writer write all checkpoints."""
    monkeypatch.setattr(transaction, "snapshot_of_this_rank", take)


def save(run: RunDir, step: int, fails: bool = False) -> Path:
    stepper: Any = Writer(fails)
    return checkpoint.write_checkpoint_of_step(
        run, {}, GROUP, stepper, step, {"step": step, "samples": 8 * step}
    )


def test_a_checkpoint_names_its_files(tmp_path: Path) -> None:
    """The manifest has step, ranks and every file with its size; COMPLETE is written last."""
    folder = save(RunDir(tmp_path), 5)
    manifest = json.loads((folder / "manifest.json").read_text())
    state = json.dumps({"step": 5, "samples": 40}).encode()
    assert manifest == {"step": 5, "samples": 40, "ranks": 1, "files": {
        "part/weights": {"bytes": 5, "crc32": zlib.crc32(b"12345")},
        "state": {"bytes": len(state), "crc32": zlib.crc32(state)},
    }}  # fmt: skip
    assert (folder / "COMPLETE").stat().st_mtime_ns >= (folder / "manifest.json").stat().st_mtime_ns


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    """Steps are compared as numbers; a folder without COMPLETE, or with another name, is none."""
    run = RunDir(tmp_path)
    assert run.newest_complete_checkpoint() is None
    for step in (9, 100_000_000, 20):
        save(run, step)
    with pytest.raises(
        CheckpointError, match=r"step_\d+.partial could not be written: OSError: No space left"
    ):
        save(run, 200_000_000, fails=True)
    # A user's own folder.
    (run.checkpoints / "mine").mkdir()
    (run.checkpoints / "mine" / "COMPLETE").touch()
    found = run.newest_complete_checkpoint()
    assert found is not None
    assert found == (100_000_000, run.checkpoint_folder(100_000_000))


def test_all_ranks_take_the_one_that_rank_0_sees(tmp_path: Path) -> None:
    """All ranks use the checkpoint that rank 0 sees, also if a shared disk shows an older one."""
    run = RunDir(tmp_path)
    other: Any = SimpleNamespace(gather=lambda mine: [[4, "step_00000004"], mine])
    assert checkpoint.newest_checkpoint_seen_by_rank_0(run, other) == (4, run.checkpoint_folder(4))
    save(run, 2)
    assert checkpoint.newest_checkpoint_seen_by_rank_0(run, other) == (4, run.checkpoint_folder(4))
    assert checkpoint.newest_checkpoint_seen_by_rank_0(run, GROUP) == (2, run.checkpoint_folder(2))


def test_what_was_half_written_is_written_anew(tmp_path: Path) -> None:
    """A folder that a failed save left is removed before the next save."""
    run = RunDir(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"step_\d+.partial could not be written: OSError: No space left"
    ):
        save(run, 5, fails=True)
    assert list(run.checkpoints.iterdir()) == []
    # Folders of machines that failed while they saved.
    for left in (
        run.partial_checkpoint_folder(3),
        run.partial_checkpoint_folder(5),
        run.checkpoint_folder(4),
    ):
        left.mkdir()
        (left / "old").touch()
    folder = save(run, 5)
    assert list(run.checkpoints.iterdir()) == [folder]
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "COMPLETE", "manifest.json", "part/weights", "state",
    ]  # fmt: skip


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a flipped bit": ("part/weights", flip, "weights differs from the file that was saved"),
    "a cut file": ("state", lambda path: os.truncate(path, 9), "state has 9 bytes of "),
    "a missing file": ("part/weights", Path.unlink, "weights: No such file"),
    # Opening it fails with IsADirectoryError.
    "a folder in its place": (
        "state",
        lambda path: (path.unlink(), path.mkdir()),
        "state: Is a directory",
    ),  # type: ignore[func-returns-value]
    "a flipped bit in the manifest": (
        "manifest.json",
        flip,
        "manifest.json differs from the file that was saved",
    ),
    "no manifest": ("manifest.json", Path.unlink, "manifest.json or COMPLETE cannot be read"),
    "an empty mark": (
        "COMPLETE",
        lambda path: os.truncate(path, 0),
        "manifest.json differs from the file that was saved",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_set_aside(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged checkpoint is reported and renamed, and the one before it is used."""
    file, damage, wrong = DAMAGE[kind]
    run = RunDir(tmp_path)
    for step in (10, 20, 30):
        save(run, step)
    checkpoint.rename_damaged_until_newest_intact_or_refuse(run, GROUP)
    assert capsys.readouterr().out == ""
    damage(run.checkpoint_folder(30) / file)
    checkpoint.rename_damaged_until_newest_intact_or_refuse(run, GROUP)
    assert run.newest_complete_checkpoint() == (20, run.checkpoint_folder(20))
    said = capsys.readouterr().out
    assert said.startswith(f"{run.checkpoint_folder(30)} is damaged: {wrong}")
    assert (run.checkpoints / "step_00000030.broken").is_dir()


def test_nothing_begins_anew_by_itself(tmp_path: Path) -> None:
    """If no checkpoint is undamaged, the run ends with the damage of each."""
    run = RunDir(tmp_path)
    for step in (10, 20):
        flip(save(run, step) / "state")
    with pytest.raises(
        CheckpointError,
        match=r"(?s)00020 is damaged.*00010 is damaged.*No complete checkpoint is left",
    ):
        checkpoint.rename_damaged_until_newest_intact_or_refuse(run, GROUP)
    with pytest.raises(
        CheckpointError,
        match=r"No complete checkpoint is left in .*00010.broken, step_00000020.broken",
    ):
        # A second start, as a scheduler makes it.
        checkpoint.rename_damaged_until_newest_intact_or_refuse(run, GROUP)


@pytest.mark.parametrize("name", ["part/weights", "manifest.json", "COMPLETE"])
def test_an_error_of_reading_is_no_damage(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk or a server that fails for a moment ends the run, but no checkpoint is renamed."""
    run = RunDir(tmp_path)
    real = io.open
    for step in (10, 20):
        save(run, step)

    def fails(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(name):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", fails)
    monkeypatch.setattr("io.open", fails)
    with pytest.raises(
        CheckpointError, match=r"could not be read, and was not changed: .*Stale file handle"
    ):
        checkpoint.rename_damaged_until_newest_intact_or_refuse(run, GROUP)
    monkeypatch.undo()
    assert [step for step, _ in run.complete_checkpoints()] == [10, 20]


def test_a_folder_that_cannot_be_listed_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose checkpoints cannot be listed does not start from the beginning."""
    run = RunDir(tmp_path)
    save(run, 10)
    monkeypatch.setattr(
        os,
        "listdir",
        lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error", str(path))),
    )
    with pytest.raises(OSError, match="I/O error"):
        run.complete_checkpoints()


def test_a_whole_one_that_was_set_aside_is_taken_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a run gives up, the newest undamaged one of those set aside is renamed back."""
    run = RunDir(tmp_path)
    for step in (9, 10, 100_000_000, 200_000_000):
        folder = save(run, step)
        folder.rename(f"{folder}.broken")
    # The newest one is really damaged.
    flip(run.checkpoints / "step_200000000.broken" / "state")
    checkpoint.rename_damaged_until_newest_intact_or_refuse(run, GROUP)
    assert run.complete_checkpoints() == [(100_000_000, run.checkpoint_folder(100_000_000))]
    assert "is intact when read again: renamed back to step_100000000\n" in capsys.readouterr().out


def test_one_that_a_command_reads_is_not_pruned(tmp_path: Path) -> None:
    """A checkpoint that `ortlaunch export` of a living run reads is kept until the export ends."""
    run = RunDir(tmp_path)
    for step in (1, 2):
        save(run, step)
    chosen = iter((1, 2))
    # Pruned since it was chosen: the choice is made again.
    shutil.rmtree(run.checkpoint_folder(1))
    with lock_chosen_checkpoint_and_yield_step(run, lambda: next(chosen)) as step:
        assert step == 2
        for later in (3, 4):
            save(run, later)
            remove_old_checkpoints_and_exports(run, 1, None)
        assert [step for step, _ in run.complete_checkpoints()] == [2, 4]
        assert is_checkpoint_locked_by_reader(run.checkpoint_folder(2))
    remove_old_checkpoints_and_exports(run, 1, None)
    assert [step for step, _ in run.complete_checkpoints()] == [4]


def test_what_is_being_written_is_no_checkpoint(tmp_path: Path) -> None:
    """A failed save leaves older checkpoints, names the newest, and removes its own folder."""
    run = RunDir(tmp_path)
    save(run, 10)
    with pytest.raises(CheckpointError, match=f"{run.checkpoint_folder(10)} is complete"):
        save(run, 20, fails=True)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000010"]


def test_a_disk_without_room_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save does not start if the disk has less free space than the last checkpoint's size."""
    run = RunDir(tmp_path)
    save(run, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20))
    with pytest.raises(
        CheckpointError, match=r"20 B are free, and a checkpoint needs 32 B. .*00010 is complete"
    ):
        save(run, 20)
    assert not run.partial_checkpoint_folder(20).exists()
