"""`ortlaunch doctor`."""

import os
from pathlib import Path
from typing import Annotated, Optional

import typer


def doctor(
    hostfile: Annotated[Optional[str], typer.Option("--hostfile", "-H", help="Hosts to look at, all at once.")] = None,
    run_dir: Annotated[
        Optional[Path], typer.Option("--run-dir", help="A folder that must be shared; the current one by default.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cuda: GPUs are counted beside the slots.")] = "cpu",
    interface: Annotated[
        Optional[str], typer.Option("--interface", help="A network interface that every host must have.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Every finding, as JSON; its schema: `ortlaunch schema --doctor`.")
    ] = False,
) -> None:
    """Look at hosts before a run: reached, versions, addresses, shared folder, disk, clock, ranks left behind.

    Those of --hostfile, else of the Slurm job that this runs in, else this one. Exit status 1 where a check failed.
    """
    import json as texts
    from dataclasses import asdict

    from ortlaunch.doctor.hosts import FAILED, Asked, look, told
    from ortlaunch.plan import Node
    from ortlaunch.planning.hosts import Host, read_hostfile
    from ortlaunch.planning.slurm_names import hosts_of_job

    hosts = read_hostfile(hostfile, 1).hosts if hostfile else hosts_of_job(os.environ) or (Host("localhost", 1, (0,)),)
    nodes = tuple(Node(host.name, host.slots, 0, host.devices) for host in hosts)
    folder = Path(os.path.abspath(run_dir or ".")) if len(nodes) > 1 else None
    found = look(Asked(nodes, device, folder, interface=interface))
    typer.echo(texts.dumps([asdict(finding) for finding in found], indent=2) if json else told(found))
    raise typer.Exit(any(finding.verdict == FAILED for finding in found))
