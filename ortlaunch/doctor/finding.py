"""Results of `ortlaunch doctor`: one check of a host, the table of all, failures as an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

from ortlaunch.base.errors import LaunchError

OK: Final = "ok"
WARNING: Final = "warning"
FAILED: Final = "failed"


@dataclass(frozen=True)
class Finding:
    """The result of one check of one host."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # of its schema

    host: str
    """Name of the host, as in the host file."""
    check: str
    """For a host: `reached`, `interpreter`, `packages`, `alias`, `address`, `interface`, `port`,
    `udp`, `mtu`, `gpus`, `run folder`, `disk`, `temporary`, `clock`, `cpus`, `/dev/shm`, `open files`,
    `memlock`, `gpus idle` or `stale`. For this machine also `python`, `torch`, `ort`, `deepspeed`,
    `mpi`, `nccl`, `cache`, `recipe` or `data`. Of the ranks on the hosts: `matrix rate`, `link`,
    `all-reduce` or `ranks`."""
    verdict: Literal["ok", "warning", "failed"]
    """`failed`: a run on this host would fail."""
    what: str
    """The observation."""
    mend: str = ""
    """The remedy; "" if nothing is wrong."""
    figures: dict[str, float] = field(default_factory=dict)
    """Measured values by name with unit, for `matrix rate`, `link` and `all-reduce`."""

    def __str__(self) -> str:
        """Return one line of the table."""
        mend = f"; {self.mend}" if self.mend else ""
        return f"  {self.host:<20} {self.check:<14} {self.verdict:<8} {self.what}{mend}"


def finding_ok_or_with_remedy(
    host_name: str,
    check_name: str,
    is_good: bool,
    observation: str,
    remedy: str,
    *,
    verdict_if_not_good: Literal["warning", "failed"],
) -> Finding:
    """Return a finding that is OK if `is_good`, else has the verdict `verdict_if_not_good` and the remedy."""
    return Finding(
        host_name,
        check_name,
        OK if is_good else verdict_if_not_good,
        observation,
        "" if is_good else remedy,
    )


def format_findings(findings: Sequence[Finding]) -> str:
    """Return the table of findings and the summary; failures come last, where a reader looks."""
    sorted_findings = sorted(
        findings, key=lambda finding: (OK, WARNING, FAILED).index(finding.verdict)
    )
    return "\n".join([*map(str, sorted_findings), summarize_findings(findings)])


def summarize_findings(findings: Sequence[Finding]) -> str:
    """Return `ready`, or the number of failed checks."""
    failure_count = sum(finding.verdict == FAILED for finding in findings)
    return f"{failure_count} of {len(findings)} checks failed" if failure_count else "ready"


def findings_json(findings: Sequence[Finding]) -> str:
    """Return all findings as JSON; `ortlaunch schema --output doctor` prints its schema."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)


def failed_checks_error(failed_findings: Sequence[Finding]) -> LaunchError:
    """Return the failed checks as an error."""
    table = "\n".join(map(str, failed_findings))
    return LaunchError(
        f"the hosts are not ready, and nothing was started (launch.preflight):\n{table}"
    )
