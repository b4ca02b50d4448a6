"""On which hosts a run starts now: those of the host file that are fit, by `launch.preflight` and `launch.nodes`.

With `launch.nodes: {min, max}` a host lost is a new plan on the others. The ranks are started again by restarts.py;
each time all hosts of the host file are looked at, so that one that is back is taken in. Never imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from ortlaunch.doctor.finding import FAILED, Finding, refused
from ortlaunch.doctor.hosts import look
from ortlaunch.errors import LaunchError
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run.checkup import asked_of
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.units import counted


def on_fit_hosts(whole: ResolvedRun, run: RunDir, again: bool) -> tuple[ResolvedRun, list[str]]:
    """The run on the hosts that it can have, and lines on that: what would let ranks of several fail is found first.

    Args:
        whole: on all hosts of the host file.
        again: the ranks have been started before: what is wrong with a host of an elastic run now keeps that host out,
            where at the first start only one that is not reached is left out.

    Raises:
        LaunchError: a host is not fit, or fewer than launch.nodes.min are there.
    """
    launch = whole.file.recipe.launch
    elastic = whole.file.recipe.launch.elastic
    if elastic is None and (again or len(whole.world.hosts) == 1 or not launch.preflight):
        return whole, []
    if "SLURM_JOB_ID" in os.environ:
        note = "launch.preflight: not inside a job of Slurm's, where hosts are not reached by ssh: ortlaunch doctor"
        return whole, [note]
    asked = asked_of(whole, Path(os.path.abspath(run.path)))
    wrong = [finding for finding in look(asked._replace(quick=True)) if finding.verdict == FAILED]
    lost = [
        finding
        for finding in wrong
        if elastic is not None and (again or finding.check == "reached")
    ]
    out = {finding.host: finding for finding in reversed(lost)}
    unfit = [finding for finding in wrong if finding.host not in out]
    if unfit:
        raise refused(unfit)
    if elastic is None:
        return whole, []
    names = [host.name for host in whole.world.hosts if host.name not in out]
    if len(names) < elastic.min:
        raise LaunchError(_too_few(len(names), elastic.min, wrong))
    now = whole.on_hosts(names)
    how = f"{counted(len(names), 'host')} of {len(whole.world.hosts)}, accumulation {now.work.batch.accumulation_steps}"
    return now, [
        f"launch.nodes {elastic}: on {how}",
        *(f"  left out: {finding}" for finding in out.values()),
    ]


def _too_few(there: int, least: int, wrong: list[Finding]) -> str:
    table = "\n".join(map(str, wrong))
    return f"launch.nodes.min is {least}, and {counted(there, 'host')} can be used:\n{table}"
