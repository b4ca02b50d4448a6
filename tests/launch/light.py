"""`ortlaunch` with ranks that load no torch; the command, launchers and supervisors are real.

`python light.py train ...` is the command. Its plan has this file as the worker: a rank that logs
steps, and ends as the recipe's `how` requests or after `train.max_steps`. It serves tests of the
parts around a rank, which start many ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from ortlaunch.base import module_start
from ortlaunch.rank import LAUNCHER_VARIABLE, Rank
from ortlaunch.run_folder.folder import RunDir, write_json_atomically, write_text_atomically
from ortlaunch.worker.supervision.requests import RankRequest, RankRequests


def live(run: RunDir, rank: Rank, *_: object) -> int:
    """Log steps until a stop is requested; rank 1 ends in its third step if the recipe sets how."""
    import yaml

    recipe = yaml.safe_load(run.recipe.read_text())
    how = recipe["model"]["arguments"].get("how", "")
    if how == "ignore SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    requests = RankRequests()
    requests.handle_signals_as_requests_and_tell_supervisor()
    # As collectives do: no rank trains while another one cannot handle a request yet.
    _agree(run, rank, f"began-{os.environ.get(LAUNCHER_VARIABLE)}", 60)
    for step in range(1, recipe["train"]["max_steps"] + 1):
        if rank.rank == 0 and requests.requested:
            write_text_atomically(run.checkpoint_folder(step) / "COMPLETE", "")
            run.save_request.unlink(missing_ok=True)
        # A checkpoint was written above, as a stop requires.
        if requests.requested.stops:
            return _stop(run, rank, step, requests.requested)
        requests.requested = RankRequest.NOTHING
        if rank.rank == 1 and step == 3:
            _end(how, run)
        if rank.rank == 0:
            with run.metrics.open("a") as file:
                file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
        time.sleep(0.1)
    return 0


def _stop(run: RunDir, rank: Rank, step: int, asked: RankRequest) -> int:
    _agree(run, rank, "stopped", 2)
    by = (
        json.loads(run.stop_request.read_text())["by"]
        if run.stop_request.exists()
        else asked.signal.name
    )
    if rank.rank == 0:
        write_json_atomically(
            run.stopped, {"step": step, "steps": 9, "by": by, "exit_status": asked.exit_status}
        )
    return asked.exit_status


def _agree(run: RunDir, rank: Rank, on: str, seconds: float) -> None:
    """Wait for the other ranks, as a collective does, which fails if one has gone."""
    folder = run.path / "agreed" / on
    write_text_atomically(folder / str(rank.rank), "")
    deadline = time.monotonic() + seconds
    while len(list(folder.glob("[0-9]*"))) < rank.world_size:
        if time.monotonic() > deadline:
            raise RuntimeError("Connection closed by peer")
        time.sleep(0.02)


def _end(how: str, run: RunDir) -> None:
    if how == "exit 7":
        sys.exit(7)
    if how == "raise":
        raise ValueError("planted")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave with 0":
        # This skips all handlers that run when the interpreter ends.
        os._exit(0)
        # The parent of a rank is its supervisor.
    if how == "kill the supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if how == "fill the disk":
        # More than the small disk of the test has.
        (run.path / "fill").write_bytes(bytes(1 << 24))


def _be_a_rank() -> int:
    from ortlaunch.worker import __main__ as worker

    worker.join_ranks_and_run_task = live
    return worker.supervise_rank_of_run_folder()


def _be_the_command() -> None:
    from ortlaunch.cli import main

    real = module_start.module_command
    # Only the worker is replaced: launchers and their helpers stay the real ones.
    module_start.module_command = lambda module, *more: (
        (sys.executable, __file__, "rank") if module == "ortlaunch.worker" else real(module, *more)
    )
    main()


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        del sys.argv[1]
        sys.exit(_be_a_rank())
    _be_the_command()
