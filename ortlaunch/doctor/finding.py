"""Results of `ortlaunch doctor`: one check of a host, the table of all, failures as an error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

from ortlaunch.errors import LaunchError

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
    `mpi`, `nccl`, `cache`, `recipe` or `data`. For `selftest`: `matrix rate`, `link`, `all-reduce` or
    `ranks`, and `train BACKEND`."""
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


def judged(
    host: str, check: str, good: bool, what: str, mend: str, *, else_: Literal["warning", "failed"]
) -> Finding:
    """Return a finding that is OK if `good`, else has the verdict `else_` and the remedy."""
    return Finding(host, check, OK if good else else_, what, "" if good else mend)


def format_findings(findings: Sequence[Finding]) -> str:
    """Return the table of findings and the summary; failures come last, where a reader looks."""
    ordered = sorted(findings, key=lambda one: (OK, WARNING, FAILED).index(one.verdict))
    return "\n".join([*map(str, ordered), summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """Return `ready`, or the number of failed checks."""
    failed = sum(one.verdict == FAILED for one in findings)
    return f"{failed} of {len(findings)} checks failed" if failed else "ready"


def as_json(findings: Sequence[Finding]) -> str:
    """Return all findings as JSON; `ortlaunch schema --doctor` prints its schema."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)


def refused(wrong: Sequence[Finding]) -> LaunchError:
    """Return the failed checks as an error."""
    table = "\n".join(map(str, wrong))
    return LaunchError(
        f"the hosts are not ready, and nothing was started (launch.preflight):\n{table}"
    )
