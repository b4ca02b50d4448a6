"""A start that is cut at any of its writes, as by SIGKILL or a power failure: the next one goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ortlaunch import cli, recipe
from ortlaunch.base import module_start
from tests.launch.tiny import RECIPE, needs_mpi, write_recipe
from tests.makers import plan

# Exit statuses of the child process: the verb has started a process, or was cut.
STARTED = 42
CUT = 43
SWEEP = (
    "sweep={space: {optimizer.learning_rate: {choice: [0.1, 0.2]}}, trials: 2, "
    "metrics: [{metric: loss, mode: min}]}"
)
TRAIN = ("train", RECIPE, "--run-dir=run")
OTHERS = {
    "train": TRAIN,
    "mpi": ("train", RECIPE, "--run-dir=run", "--launcher=mpi", "--nproc-per-node=2"),
    "auto": ("train", RECIPE, "--run-dir=run", "batch.micro_size=auto", "batch.global_size=4",
             "batch.accumulation_steps=null"),
    "parity": ("parity", RECIPE, "--run-dir=run", "engine.name=inductor"),
    "evaluate": ("evaluate", "trained"),
    "bench": ("bench", RECIPE, "--out=run", "--engines=eager"),
    "sweep": ("sweep", RECIPE, "--run-dir=run", SWEEP),
    "submit": ("submit", RECIPE, "--run-dir=run"),
}  # fmt: skip
MPI = [pytest.mark.slow, pytest.mark.ci, needs_mpi]
VERBS = [
    pytest.param(words, id=name, marks=MPI if name == "mpi" else MPI[:2])
    for name, words in OTHERS.items()
]


def prepare(folder: Path) -> None:
    """Write a recipe, and the folder `trained` of a run with a checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    source = {"format": "custom", "factory": "mine:data"}
    path = write_recipe(folder, data={"train": source, "evaluation": source})
    trained = folder / "trained"
    (trained / "checkpoints" / "step_00000002").mkdir(parents=True)
    loaded = recipe.load_recipe(path).recipe
    (trained / "recipe.yaml").write_text(recipe.dump_recipe_yaml(loaded))
    (trained / "plan.json").write_text(replace(plan(loaded), modules=str(folder)).to_json())
    for name, text in (("manifest.json", '{"step": 2, "files": {}}'), ("COMPLETE", "")):
        (trained / "checkpoints" / "step_00000002" / name).write_text(text)


def cut_hook(folder: Path, number: int) -> Callable[[str, tuple[Any, ...]], None]:
    """Return an audit hook that ends the process at its n-th write below the folder.

    A file that is to be opened then exists, and is empty.
    """
    names = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in names or not isinstance(arguments[0], (str, os.PathLike)):
            return
        path = os.path.abspath(arguments[0])
        reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if reads or not path.startswith(f"{folder}/"):
            return
        count += 1
        if count == number:
            if event == "open":
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            os._exit(CUT)

    return hook


def run(words: tuple[str, ...], folder: Path, output: Path, cut: int = 0) -> int:
    """Run a verb in a child process until it starts ranks, or to a cut; return its exit status."""
    # A fork has all modules loaded, so that a start takes milliseconds.
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w")
        os.chdir(folder)
        popen = subprocess.Popen.__init__

        # Programs of the machine, such as git, run as usual.
        def started(self: Any, argv: Any, *rest: Any, **options: Any) -> None:
            if module_start.__file__ in argv or any("die_with_parent" in word for word in argv):
                os._exit(STARTED)
            popen(self, argv, *rest, **options)

        subprocess.Popen.__init__ = started  # type: ignore[method-assign]
        sys.argv = ["ortlaunch", *words]
        if cut:
            sys.addaudithook(cut_hook(folder, cut))
        cli.main()
    except SystemExit as error:
        sys.stdout.flush()
        os._exit(error.code if isinstance(error.code, int) else 1)
    finally:
        os._exit(77)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the commands, and an sbatch that only answers."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tools / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return tmp_path / "here"


def test_a_start_goes_on_after_any_cuts(here: Path, tmp_path: Path) -> None:
    """Starts in one folder, each cut one write later than the one before, all go on."""
    prepare(here)
    output = tmp_path / "output"
    number = 1
    # Each start finds the files of all starts before it.
    while (status := run(TRAIN, here, output, number)) == CUT:
        number += 1
    assert (status, number > 20) == (STARTED, True), output.read_text()


@pytest.mark.parametrize("words", VERBS)
def test_a_start_goes_on_after_a_cut_at_any_write(
    words: tuple[str, ...], here: Path, tmp_path: Path
) -> None:
    """After a cut at the n-th write, the same command gets as far as without a cut, for every n."""
    output = tmp_path / "output"
    prepare(here)
    # `submit` starts no ranks, and ends by itself.
    expected = run(words, here, output)
    assert expected in (STARTED, 0), output.read_text()
    for number in range(1, 100):
        prepare(here)
        if run(words, here, output, number) != CUT:
            break
        assert run(words, here, output) == expected, (number, output.read_text())
    assert number > 10
