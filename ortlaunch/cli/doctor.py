"""`ortlaunch doctor`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ortlaunch.cli.options import Overrides, shipped_recipes, with_launch_options


@with_launch_options
def doctor(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            help="A recipe: what it needs is looked at, too, and room for its checkpoints.",
            show_default=False,
            autocompletion=shipped_recipes,
        ),
    ] = None,
    overrides: Overrides = None,
    options: Any = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="A folder that must be shared; the current one by default.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="cuda: GPUs are counted beside the slots. The recipe's by default."),
    ] = None,
    interface: Annotated[
        str | None, typer.Option("--interface", help="A network interface that every host must have.")
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Of the first host, that ranks are to meet at; 0: any.")
    ] = 0,
    ports: Annotated[
        str | None,
        typer.Option("--ports", metavar="LOW-HIGH", help="Ports that all hosts are to reach of each other; any else."),
    ] = None,
    fabric: Annotated[
        bool,
        typer.Option("--fabric", help="Start ranks there, too, and measure matrix products, links and the all-reduce."),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Every finding, as JSON; its schema: `ortlaunch schema --doctor`.")
    ] = False,
) -> None:
    """Look before a run: at this machine, or at the hosts of --hostfile or of the Slurm job that this runs in.

    This machine: what is installed, GPUs, disk, limits. Hosts, all at once: reached, versions, addresses, ports of
    each other (TCP, UDP, packets of the MTU), shared folder, disk, clock, limits, ranks left behind.
    Exit status 1 where a check failed.
    """
    import json as texts
    from dataclasses import asdict

    from ortlaunch.doctor.finding import FAILED, told
    from ortlaunch.run.checkup import Place, checkup

    if device not in (None, "cpu", "cuda"):
        raise typer.BadParameter(f"got {device}; cpu or cuda", param_hint="--device")
    low, _, high = (ports or "0-0").partition("-")
    if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high) <= 65535 and (int(low) or not ports)):
        raise typer.BadParameter(f"got {ports}; two ports from 1 to 65535, as 40000-50000", param_hint="--ports")
    wanted = (int(low), int(high)) if ports else None
    found = checkup(
        recipe, tuple(overrides or ()), options, Place(run_dir, device, interface, port, wanted, fabric), os.environ
    )
    typer.echo(texts.dumps([asdict(finding) for finding in found], indent=2) if json else told(found))
    raise typer.Exit(any(finding.verdict == FAILED for finding in found))
