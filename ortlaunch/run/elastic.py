"""`launch.nodes: {min, max}`: on which of its hosts a run starts now; a host lost is a new plan on the others.

The ranks are started again by restarts.py; each time all hosts of the host file are looked at, so that one that is back
is taken in. Never imports torch.
"""

from __future__ import annotations

from ortlaunch.doctor.finding import FAILED, Finding, refused
from ortlaunch.doctor.hosts import Asked, look
from ortlaunch.errors import LaunchError
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.units import counted


def on_present(whole: ResolvedRun, asked: Asked, again: bool) -> tuple[ResolvedRun, list[str]]:
    """The run on the hosts that are there, and a line on each of the others.

    Args:
        whole: on all hosts of the host file.
        again: the ranks have been started before: what is wrong with a host now keeps that host out, where at the first
            start only one that is not reached is left out.

    Raises:
        LaunchError: fewer hosts than launch.nodes.min are there, or one is not fit at the first start.
    """
    elastic = whole.file.recipe.launch.elastic
    assert elastic is not None
    wrong = [finding for finding in look(asked._replace(quick=True)) if finding.verdict == FAILED]
    out = {finding.host: finding for finding in reversed(wrong) if again or finding.check == "reached"}
    unfit = [finding for finding in wrong if finding.host not in out]
    names = [host.name for host in whole.world.hosts if host.name not in out]
    if unfit:
        raise refused(unfit)
    if len(names) < elastic.min:
        raise LaunchError(_too_few(len(names), elastic.min, wrong))
    now = whole.on_hosts(names)
    batch = now.plan.batch
    how = f"{counted(len(names), 'host')} of {len(whole.world.hosts)}, accumulation {batch.accumulation_steps}"
    return now, [f"launch.nodes {elastic}: on {how}", *(f"  left out: {finding}" for finding in out.values())]


def _too_few(there: int, least: int, wrong: list[Finding]) -> str:
    table = "\n".join(map(str, wrong))
    return f"launch.nodes.min is {least}, and {counted(there, 'host')} can be used:\n{table}"
