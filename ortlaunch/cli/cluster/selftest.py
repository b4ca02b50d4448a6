"""`ortlaunch selftest`."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ortlaunch.cli.options import (
    FindingsAsJson,
    Overrides,
    PortOption,
    PortsOption,
    port_range,
    with_launch_options,
)


@with_launch_options
def selftest(
    overrides: Overrides = None,
    options: Any = None,
    port: PortOption = 0,
    ports: PortsOption = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="A new folder for the runs, which all hosts share; selftest-TIME by default.",
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", "-y", help="Queue a job without a question, where this place has Slurm."
        ),
    ] = False,
    json: FindingsAsJson = False,
) -> None:
    """Check this machine or --hostfile's as doctor does; then start ranks, measure, and train under each backend.

    Ranks measure matrix products, links and the all-reduce, and a slow host is named. Trainings of a tiny model (one
    process, torchrun, mpirun, the hosts; a job of Slurm's, after a question) must have their ranks where the plan has
    them, and equal losses. Engine eager on the CPU; override it as in engine.name=ort. Exit status 1 where a check
    failed.
    """
    from ortlaunch.commands.selftest import SelftestRequest
    from ortlaunch.commands.selftest import selftest as run
    from ortlaunch.doctor.finding import FAILED, as_json, summary
    from ortlaunch.process import heeded

    for number in heeded(
        (signal.SIGTERM, signal.SIGHUP)
    ):  # as Ctrl-C: what was started ends, a job is cancelled
        signal.signal(number, lambda given, _: sys.exit(128 + given))

    def may_queue(question: str) -> bool:
        return yes or (sys.stdin.isatty() and typer.confirm(question, err=True))

    new = (folder or Path(time.strftime("selftest-%Y%m%d-%H%M%S"))).absolute()
    request = SelftestRequest(new, tuple(overrides or ()), options, port, port_range(ports))
    findings = []
    for finding in run(request, may_queue, os.environ):
        findings.append(finding)
        if not json:
            print(finding, flush=True)
    typer.echo(as_json(findings) if json else f"{summary(findings)}; the runs are in {new}")
    raise typer.Exit(any(finding.verdict == FAILED for finding in findings))
