"""`ortlaunch doctor`."""

import os
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
    shipped_recipes,
)


def doctor(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            help="A recipe: also check its packages and the room for its checkpoints.",
            show_default=False,
            autocompletion=shipped_recipes,
        ),
    ] = None,
    overrides: Overrides = None,
    launcher: LauncherOption = None,
    nproc_per_node: RanksPerHostOption = None,
    hostfile: HostfileOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir", help="A folder that all hosts must share; the current one by default."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="cuda: compare the number of GPUs with the slots. The recipe's by default.",
        ),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option("--interface", help="A network interface that every host must have."),
    ] = None,
    port: PortOption = 0,
    ports: PortsOption = None,
    json: FindingsAsJson = False,
) -> None:
    """Check this machine, or the hosts of --hostfile or of the current Slurm job, before a run.

    This machine: installed packages, GPUs, disk, limits. Hosts, all in parallel: reachability,
    versions, addresses, ports of each other (TCP, UDP, packets of the MTU), shared folder, disk,
    clock, limits, ranks left behind. On hosts that are fit, ranks then measure matrix products,
    links and the all-reduce, and slow hosts are named. Exit status 1 if a check failed.
    """
    from ortlaunch.doctor.finding import FAILED, findings_json, format_findings
    from ortlaunch.run.checkup import CheckupOptions, check_hosts_or_this_machine

    options = launch_options_from_typed_values(launcher, nproc_per_node, hostfile, include, exclude)
    if device not in (None, "cpu", "cuda"):
        raise typer.BadParameter(f"got {device}; cpu or cuda", param_hint="--device")
    checkup_options = CheckupOptions(run_dir, device, interface, port, parse_port_range(ports))
    findings = check_hosts_or_this_machine(
        recipe, tuple(overrides or ()), options, checkup_options, os.environ
    )
    typer.echo(findings_json(findings) if json else format_findings(findings))
    # True is status 1.
    raise typer.Exit(any(finding.verdict == FAILED for finding in findings))
