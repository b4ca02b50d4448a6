"""Ends of real runs, planted by tools/planted_ends.py: `diagnose` and `train` name the true cause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import labs

TOOL = Path(__file__).parents[2] / "tools" / "planted_ends.py"


def planted(*names: str) -> str:
    """The tool's table for these ends, all of which are right."""
    done = subprocess.run([sys.executable, str(TOOL), "--only", *names], capture_output=True, text=True, timeout=170,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(names)} of {len(names)} right" in done.stdout
    assert "not by train" not in done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(180)
def test_a_crash_and_a_bad_sample() -> None:
    """An assertion in C++ with its words, and the sample whose loss is nan."""
    said = planted("abort", "nan")
    assert "uncaught C++ exception): what():  planted" in said
    assert "17 of data.train; the first parameter whose gradient is not finite: layer.weight" in said


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_real_out_of_memory_kill() -> None:
    """The kernel ends a rank in a control group with a limit, and that is what is said."""
    if os.geteuid() != 0 or not Path("/sys/fs/cgroup").is_dir():
        labs.skip("makes a control group, which takes root")
    assert "out of memory: the kernel ended rank 1" in planted("by the kernel")
