"""Choose the usable hosts of the host file for a start, by `launch.preflight` and `launch.nodes`.

With `launch.nodes: {min, max}`, a lost host leads to a new plan on the others.
launch/restarts.py starts the ranks again; each time all hosts of the host file are checked, so that
a host that is available again is used again. Never imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from ortlaunch.doctor.finding import FAILED, Finding, refused
from ortlaunch.doctor.hosts import check_hosts
from ortlaunch.errors import LaunchError
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run.checkup import host_requirements
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.units import counted


def on_fit_hosts(whole: ResolvedRun, run: RunDir, again: bool) -> tuple[ResolvedRun, list[str]]:
    """Return the run on its usable hosts, and lines about them.

    It detects faults that would let ranks of several hosts fail, before they start.

    Args:
        whole: the run on all hosts of the host file.
        again: whether the ranks have been started before. Any fault of a host then excludes it from
            an elastic run; at the first start only an unreachable host is excluded.

    Raises:
        LaunchError: a host is not usable, or fewer hosts than launch.nodes.min are.
    """
    launch = whole.file.recipe.launch
    elastic = whole.file.recipe.launch.elastic
    if elastic is None and (again or len(whole.world.hosts) == 1 or not launch.preflight):
        return whole, []
    # Hosts of a Slurm job are not reached by ssh, which the check needs.
    if "SLURM_JOB_ID" in os.environ:
        note = (
            "launch.preflight: skipped inside a Slurm job, whose hosts are not reached by ssh; "
            "use ortlaunch doctor"
        )
        return whole, [note]
    asked = host_requirements(whole, Path(os.path.abspath(run.path)))
    wrong = [
        finding for finding in check_hosts(asked._replace(quick=True)) if finding.verdict == FAILED
    ]
    lost = [
        finding
        for finding in wrong
        if elastic is not None and (again or finding.check == "reached")
    ]
    # The first finding of each host is the one that is shown.
    out = {finding.host: finding for finding in reversed(lost)}
    unfit = [finding for finding in wrong if finding.host not in out]
    # Faults other than a lost host end the command, at the first start of an elastic run, too.
    if unfit:
        raise refused(unfit)
    if elastic is None:
        return whole, []
    names = [host.name for host in whole.world.hosts if host.name not in out]
    if len(names) < elastic.min:
        raise LaunchError(_too_few(len(names), elastic.min, wrong))
    now = whole.on_hosts(names)
    how = (
        f"{counted(len(names), 'host')} of {len(whole.world.hosts)}, "
        f"accumulation {now.work.batch.accumulation_steps}"
    )
    return now, [
        f"launch.nodes {elastic}: on {how}",
        *(f"  left out: {finding}" for finding in out.values()),
    ]


def _too_few(there: int, least: int, wrong: list[Finding]) -> str:
    table = "\n".join(map(str, wrong))
    return f"launch.nodes.min is {least}, and {counted(there, 'host')} can be used:\n{table}"
