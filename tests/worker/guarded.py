"""A rank that runs a piece of code under its supervisor, without torch and without a launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any, NamedTuple

from ortlaunch.run_folder.folder import RunDir, write_text_atomically
from tests.makers import host, plan, recipe

GUARDED = """
import ctypes, os, signal, sys, time
import ortlaunch.worker.supervision.rank_process, ortlaunch.worker.supervision.end_record
from ortlaunch.base.errors import EngineError, InputError
from ortlaunch.rank import Rank
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.supervision.rank_supervisor import fork_and_supervise_rank_then_end_alike

def live(watchdog):
    print("to stdout", flush=True)
    if "QUIET" not in os.environ:
        print("to stderr", file=sys.stderr, flush=True)
    if os.environ["LIFE"] == "return_85":
        return 85
    exec(os.environ["LIFE"], globals())

ortlaunch.worker.supervision.rank_process.GRACE_SECONDS = 0.3
ortlaunch.worker.supervision.rank_process._OTHERS_SECONDS = float(os.environ.get("OTHERS", "5"))
if "FULL" in os.environ:  # as a disk is: what has its room already can still be written
    def write_json(path, value):
        raise OSError(28, "No space left on device")
    ortlaunch.run_folder.error_record.write_json_atomically = write_json
rank = int(sys.argv[1])
sys.exit(fork_and_supervise_rank_then_end_alike(Rank(rank, 2, rank, 2), RunDir(sys.argv[2]), live))
"""


class Ended(NamedTuple):
    """The end of a rank: its supervisor's status and output, and the record that it left."""

    status: int
    out: str
    err: str
    record: dict[str, Any] | None


def write_plan(run: RunDir, launcher: str, task: str = "train") -> None:
    """Write the plan of two ranks of this host, which may take two seconds to save."""
    made = plan(recipe(launch={"grace_seconds": 2}), [host("localhost", 2)], launcher)
    write_text_atomically(run.plan, replace(made, task=task).to_json())


def guarded(run: RunDir, life: str, rank: int = 1, **environ: str) -> Ended:
    """Run this code as a rank with its supervisor."""
    command = [sys.executable, "-c", GUARDED, str(rank), str(run)]
    env = {**os.environ, "LIFE": life, **environ}
    # Some launchers are started with this signal ignored.
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        # A rank that hangs fails its test.
        result = subprocess.run(command, env=env, capture_output=True, timeout=30, check=False)
    finally:
        signal.signal(signal.SIGUSR1, before)
    record = (
        json.loads(run.rank_error_path(rank).read_text())
        if run.rank_error_path(rank).exists()
        else None
    )
    return Ended(result.returncode, result.stdout.decode(), result.stderr.decode(), record)
