"""Whole runs that stand still, or are killed and go on by themselves: parts of benchmarks/supervision.py, as tests."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pytest

from benchmarks import supervision


@pytest.mark.slow
@pytest.mark.ci
def test_a_rank_that_sleeps_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within `train.stall_seconds` and a little, with its stack; status 124, and no process stays."""
    monkeypatch.setattr(supervision, "STALLS", ("sleep",))
    good, line = next(supervision.stalls(tmp_path / "stalls", "torchrun", argparse.Namespace()))
    assert good, line


@pytest.mark.slow
@pytest.mark.parametrize("how", supervision.STALLS)
@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
def test_every_stall(how: str, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped ranks and guardians, a collective of its own, data that hang."""
    monkeypatch.setattr(supervision, "STALLS", (how,))
    good, line = next(supervision.stalls(tmp_path / "stalls", launcher, argparse.Namespace()))
    assert good, line


@pytest.mark.slow
def test_a_run_that_is_killed_finishes_by_itself(tmp_path: Path) -> None:
    """kill -9 of a rank at random moments: the weights of a run that was never killed."""
    random.seed(1)
    for good, line in supervision.kills(tmp_path / "kills", "torchrun", argparse.Namespace(kills=2)):
        assert good, line


@pytest.mark.slow
@pytest.mark.ci
def test_a_failure_that_repeats_stops_the_second_time(tmp_path: Path) -> None:
    """A rank that raises in step 7, always, under `launch.max_restarts: 3`."""
    good, line = next(supervision.twice(tmp_path / "twice", "torchrun", argparse.Namespace()))
    assert good, line
