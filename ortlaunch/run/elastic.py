"""Choose the usable hosts of the host file for a start, by `launch.preflight` and `launch.nodes`.

With `launch.nodes: {min, max}`, a lost host leads to a new plan on the others.
launch/restarts.py starts the ranks again; each time all hosts of the host file are checked, so that
a host that is available again is used again. Never imports torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from ortlaunch.doctor.finding import FAILED, Finding, refused
from ortlaunch.doctor.hosts import HostRequirements, check_hosts
from ortlaunch.errors import LaunchError
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run.checkup import host_requirements
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.units import counted

# A switch that is started again is back after some minutes.
_HOSTS_SECONDS = 600.0
_LOOK_SECONDS = 10.0


def on_fit_hosts(whole: ResolvedRun, run: RunDir, again: bool) -> tuple[ResolvedRun, list[str]]:
    """Return the run on its usable hosts, and lines about them.

    It detects faults that would let ranks of several hosts fail, before they start.

    Args:
        whole: the run on all hosts of the host file.
        again: whether the ranks have been started before. Any fault of a host then excludes it from
            an elastic run; at the first start only an unreachable host is excluded.

    Raises:
        LaunchError: a host is not usable, or fewer hosts than launch.nodes.min are; after a start it
            waits ten minutes for them.
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
    out = _lost_hosts(asked, elastic is not None, again)
    if elastic is None:
        return whole, []
    deadline = time.monotonic() + (_HOSTS_SECONDS if again else 0.0)
    is_reported = False
    while len(whole.world.hosts) - len(out) < elastic.min:
        told = _too_few(len(whole.world.hosts) - len(out), elastic.min, out.values())
        if time.monotonic() >= deadline or run.stop_request.exists():
            raise LaunchError(told)
        if not is_reported:
            minutes = f"{_HOSTS_SECONDS / 60:g} minutes"
            print(f"ortlaunch: {told}\nwaiting {minutes} for them", file=sys.stderr, flush=True)
        is_reported = True
        time.sleep(_LOOK_SECONDS)
        out = _lost_hosts(asked, elastic is not None, again)
    names = [host.name for host in whole.world.hosts if host.name not in out]
    now = whole.on_hosts(names)
    how = (
        f"{counted(len(names), 'host')} of {len(whole.world.hosts)}, "
        f"accumulation {now.work.batch.accumulation_steps}"
    )
    return now, [
        f"launch.nodes {elastic}: on {how}",
        *(f"  left out: {finding}" for finding in out.values()),
    ]


def _lost_hosts(asked: HostRequirements, is_elastic: bool, again: bool) -> dict[str, Finding]:
    """Return the first finding of each host that an elastic run leaves out.

    Raises:
        LaunchError: a host has another fault, which ends the command.
    """
    found = check_hosts(asked._replace(quick=True))
    wrong = [finding for finding in found if finding.verdict == FAILED]
    lost = [one for one in wrong if is_elastic and (again or one.check == "reached")]
    out = {finding.host: finding for finding in reversed(lost)}
    if unfit := [finding for finding in wrong if finding.host not in out]:
        raise refused(unfit)
    return out


def _too_few(there: int, least: int, wrong: Iterable[Finding]) -> str:
    table = "\n".join(map(str, wrong))
    return f"launch.nodes.min is {least}, and {counted(there, 'host')} can be used:\n{table}"
