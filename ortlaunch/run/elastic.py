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

from ortlaunch.base.errors import LaunchError
from ortlaunch.base.units import count_with_noun
from ortlaunch.doctor.finding import FAILED, Finding, failed_checks_error
from ortlaunch.doctor.hosts import HostRequirements, probe_and_judge_all_hosts
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run.checkup import requirements_of_run_on_hosts
from ortlaunch.run_folder.folder import RunDir

# A switch that is started again is back after some minutes.
_HOSTS_SECONDS = 600.0
_LOOK_SECONDS = 10.0


def check_hosts_and_return_shrunk_run_and_lines(
    run_on_all_hosts: ResolvedRun, run: RunDir, is_restart: bool
) -> tuple[ResolvedRun, list[str]]:
    """Return the run on its usable hosts, and lines about them.

    It detects faults that would let ranks of several hosts fail, before they start.

    Args:
        run_on_all_hosts: the run on all hosts of the host file.
        is_restart: whether the ranks have been started before. Any fault of a host then excludes it from
            an elastic run; at the first start only an unreachable host is excluded.

    Raises:
        LaunchError: a host is not usable, or fewer hosts than launch.nodes.min are; after a start it
            waits ten minutes for them.
    """
    launch = run_on_all_hosts.recipe_file.recipe.launch
    elastic = launch.elastic
    hosts = run_on_all_hosts.world.hosts
    is_only_this_host = len(hosts) == 1 and hosts[0].is_here
    if elastic is None and (is_restart or is_only_this_host or not launch.preflight):
        return run_on_all_hosts, []
    # Hosts of a Slurm job are not reached by ssh, which the check needs.
    if "SLURM_JOB_ID" in os.environ:
        note = (
            "launch.preflight: skipped inside a Slurm job, whose hosts are not reached by ssh; "
            "use ortlaunch doctor"
        )
        return run_on_all_hosts, [note]
    requirements = requirements_of_run_on_hosts(run_on_all_hosts, Path(os.path.abspath(run.path)))
    finding_by_excluded_host = _excluding_finding_by_host_or_refuse_failed(
        requirements, elastic is not None, is_restart
    )
    if elastic is None:
        return run_on_all_hosts, []
    deadline = time.monotonic() + (_HOSTS_SECONDS if is_restart else 0.0)
    is_reported = False
    while len(run_on_all_hosts.world.hosts) - len(finding_by_excluded_host) < elastic.min:
        message = _too_few_hosts_message(
            len(run_on_all_hosts.world.hosts) - len(finding_by_excluded_host),
            elastic.min,
            finding_by_excluded_host.values(),
        )
        if time.monotonic() >= deadline or run.stop_request.exists():
            raise LaunchError(message)
        if not is_reported:
            minutes = f"{_HOSTS_SECONDS / 60:g} minutes"
            print(f"ortlaunch: {message}\nwaiting {minutes} for them", file=sys.stderr, flush=True)
        is_reported = True
        time.sleep(_LOOK_SECONDS)
        finding_by_excluded_host = _excluding_finding_by_host_or_refuse_failed(
            requirements, elastic is not None, is_restart
        )
    names = [
        host.name
        for host in run_on_all_hosts.world.hosts
        if host.name not in finding_by_excluded_host
    ]
    smaller_run = run_on_all_hosts.copy_restricted_to_hosts(names)
    size_text = (
        f"{count_with_noun(len(names), 'host')} of {len(run_on_all_hosts.world.hosts)}, "
        f"accumulation {smaller_run.workload.batch.accumulation_steps}"
    )
    return smaller_run, [
        f"launch.nodes {elastic}: on {size_text}",
        *(f"  left out: {finding}" for finding in finding_by_excluded_host.values()),
    ]


def _excluding_finding_by_host_or_refuse_failed(
    requirements: HostRequirements, is_elastic: bool, is_restart: bool
) -> dict[str, Finding]:
    """Return the first finding of each host that an elastic run leaves out.

    Raises:
        LaunchError: a host has another fault, which ends the command.
    """
    findings = probe_and_judge_all_hosts(requirements._replace(checks_failures_only=True))
    failures = [finding for finding in findings if finding.verdict == FAILED]
    excluding_findings = [
        finding for finding in failures if is_elastic and (is_restart or finding.check == "reached")
    ]
    finding_by_host = {finding.host: finding for finding in reversed(excluding_findings)}
    if unusable := [finding for finding in failures if finding.host not in finding_by_host]:
        raise failed_checks_error(unusable)
    return finding_by_host


def _too_few_hosts_message(
    usable_host_count: int, min_hosts: int, findings: Iterable[Finding]
) -> str:
    table = "\n".join(map(str, findings))
    return f"launch.nodes.min is {min_hosts}, and {count_with_noun(usable_host_count, 'host')} can be used:\n{table}"
