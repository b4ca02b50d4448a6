"""`ortlaunch selftest`."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ortlaunch.cli.options import (
    ExcludeOption,
    FindingsAsJson,
    HostfileOption,
    IncludeOption,
    LauncherOption,
    Overrides,
    PortOption,
    PortsOption,
    RanksPerHostOption,
    launch_options_from_typed_values,
    parse_port_range,
)


def selftest(
    overrides: Overrides = None,
    launcher: LauncherOption = None,
    nproc_per_node: RanksPerHostOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    port: PortOption = 0,
    ports: PortsOption = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="A new folder for the runs, shared by all hosts; selftest-TIME by default.",
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Queue a Slurm job without a question, if Slurm is here."),
    ] = False,
    json: FindingsAsJson = False,
) -> None:
    """Check this machine or --hostfile's as doctor does, then measure and train under each backend.

    Ranks measure matmuls, links and the all-reduce; slow hosts are named. Trainings of a tiny model
    (one process, torchrun, mpirun, the hosts; a Slurm job, after a question) must have their ranks
    where the plan has them, and equal losses. Engine eager on the CPU; override it as in
    engine.name=ort. Exit status 1 if a check failed.
    """
    from ortlaunch.base.process import signals_to_handle
    from ortlaunch.commands.selftest import SelftestRequest
    from ortlaunch.commands.selftest import check_hosts_and_train_with_each_launcher as run
    from ortlaunch.doctor.finding import FAILED, findings_json, summarize_findings

    options = launch_options_from_typed_values(launcher, nproc_per_node, hostfile, include, exclude)
    # Exits as after Ctrl-C: `finally` blocks end all that was started, and cancel a Slurm job.
    for signal_number in signals_to_handle((signal.SIGTERM, signal.SIGHUP)):
        signal.signal(signal_number, lambda received_signal, _: sys.exit(128 + received_signal))

    # Without a terminal nobody can answer, so no job is queued.
    def may_queue(question: str) -> bool:
        return yes or (sys.stdin.isatty() and typer.confirm(question, err=True))

    # Ranks of other hosts need the whole path.
    selftest_folder = (folder or Path(time.strftime("selftest-%Y%m%d-%H%M%S"))).absolute()
    request = SelftestRequest(
        selftest_folder, tuple(overrides or ()), options, port, parse_port_range(ports)
    )
    findings = []
    for finding in run(request, may_queue, os.environ):
        findings.append(finding)
        # The table is printed as it grows, for a selftest takes minutes. JSON is one document.
        if not json:
            print(finding, flush=True)
    typer.echo(
        findings_json(findings)
        if json
        else f"{summarize_findings(findings)}; the runs are in {selftest_folder}"
    )
    raise typer.Exit(any(finding.verdict == FAILED for finding in findings))
