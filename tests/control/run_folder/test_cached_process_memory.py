"""The memory of a rank's interpreter and libraries: measured by runs, read by plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlaunch.launch_plan import USUAL_PROCESS, ProcessMemory
from ortlaunch.run_folder import cached_process_memory as module
from ortlaunch.run_folder.cached_process_memory import (
    cache_process_memory_if_writable,
    cached_or_usual_process_memory,
)
from tests.makers import bert, recipe

MEASURED = ProcessMemory(500 << 20, 400 << 20, is_measured=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a CPU build of torch."""
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_torch_version", lambda: "2.13.0+cpu")


def test_the_newest_run_of_an_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans use what a run measured, with the same torch, engine and module of the user."""
    run = bert(engine={"name": "eager"})
    assert cached_or_usual_process_memory(run) == USUAL_PROCESS
    cache_process_memory_if_writable(run, MEASURED)
    assert cached_or_usual_process_memory(bert(engine={"name": "inductor"})) == MEASURED
    # The user's module may load libraries of its own.
    for other in (recipe(engine={"name": "eager"}), bert(engine={"name": "ort"})):
        assert cached_or_usual_process_memory(other) == USUAL_PROCESS
    monkeypatch.setattr(module, "_torch_version", lambda: "2.13.0+cu130")
    assert cached_or_usual_process_memory(run).total > USUAL_PROCESS.total + (500 << 20)


@pytest.mark.parametrize("text", ["", "[", "[]", "[null, 1]", '{"x": 1}', "null"])
def test_a_damaged_file_is_no_measurement(tmp_path: Path, text: str) -> None:
    """A file that cannot be read gives usual values, and the next run replaces it."""
    cache_process_memory_if_writable(bert(), MEASURED)
    # A file for each environment.
    [file] = tmp_path.glob("processes/*.json")
    file.write_text(text)
    assert cached_or_usual_process_memory(bert()) == USUAL_PROCESS


def test_ranks_of_a_host_share_library_files() -> None:
    """Private bytes count for each rank, those of files once."""
    assert (MEASURED.total >> 20, MEASURED.bytes_of_ranks(3) >> 20) == (900, 1900)
