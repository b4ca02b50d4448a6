"""Ranks that a test starts by torchrun; torchrun is killed when they take too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def torchrun(ranks: int, *command: str, timeout: float, cwd: Path = TESTS) -> None:
    """Run `-m MODULE ARGUMENT...` or a script on `ranks` ranks of one thread each.

    Raises:
        AssertionError: a rank failed; the message is the end of the output.
        TimeoutExpired: the ranks took more than `timeout` seconds.
    """
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    quiet = {
        "PYTHONPATH": os.pathsep.join([str(cwd), str(TESTS)]),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    process = subprocess.Popen(
        [*launcher, *command], cwd=cwd, env={**os.environ, **quiet},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            # Reaches torchrun only: torch starts each rank in a session of its own, so a rank that
            # hangs can survive.
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-4000:]
