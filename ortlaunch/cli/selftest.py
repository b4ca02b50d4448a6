"""`ortlaunch selftest`."""

import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ortlaunch.cli.options import Overrides


def selftest(
    overrides: Overrides = None,
    hostfile: Annotated[str | None, typer.Option("--hostfile", "-H", help="Hosts to start ranks on, too.")] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Queue a job of one or two nodes, too.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="A new folder for the runs, which all hosts share; selftest-TIME by default."),
    ] = None,
) -> None:
    """Train a tiny model under each backend here: one process, torchrun, mpirun, hosts; Slurm with --slurm.

    Ranks must be where the plan has them, and losses equal; exit status 1 where one is not. Engine eager on the CPU;
    override it as in engine.name=ort.
    """
    from ortlaunch.commands.selftest import selftest as run
    from ortlaunch.process import heeded

    for number in heeded((signal.SIGTERM, signal.SIGHUP)):  # as Ctrl-C: what was started ends, a job is cancelled
        signal.signal(number, lambda given, _: sys.exit(128 + given))
    equal = run((folder or Path(time.strftime("selftest-%Y%m%d-%H%M%S"))).absolute(), hostfile, overrides or (), slurm)
    raise typer.Exit(not equal)
