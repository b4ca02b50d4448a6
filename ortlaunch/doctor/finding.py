"""What the doctor says: one check of one host, the table of all, and what is wrong as an error."""

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
    """One check of one host."""

    __pydantic_config__ = {"extra": "forbid", "use_attribute_docstrings": True}  # of its schema

    host: str
    """As the host file has it."""
    check: str
    """Of a host: `reached`, `interpreter`, `packages`, `alias`, `address`, `interface`, `port`, `udp`, `mtu`, `gpus`,
    `run folder`, `disk`, `clock`, `cpus`, `/dev/shm`, `open files`, `memlock`, `gpus idle` or `stale`. Of this machine,
    too: `python`, `torch`, `ort`, `deepspeed`, `mpi`, `nccl`, `cache` or `recipe`. Of `selftest`:
    `matrix rate`, `link`, `all-reduce` or `ranks`, and `train BACKEND`."""
    verdict: Literal["ok", "warning", "failed"]
    """`failed`: a run on it would fail."""
    what: str
    """What was found."""
    mend: str = ""
    """What to do; empty where nothing is wrong."""
    figures: dict[str, float] = field(default_factory=dict)
    """What was measured, by name with its unit: of `matrix rate`, `link` and `all-reduce`."""

    def __str__(self) -> str:
        """For a person."""
        mend = f"; {self.mend}" if self.mend else ""
        return f"  {self.host:<20} {self.check:<12} {self.verdict:<8} {self.what}{mend}"


def judged(
    host: str, check: str, good: bool, what: str, mend: str, *, else_: Literal["warning", "failed"]
) -> Finding:
    """OK, or what it is else, with its mend."""
    return Finding(host, check, OK if good else else_, what, "" if good else mend)


def told(findings: Sequence[Finding]) -> str:
    """The table, what is wrong last, and the verdict."""
    ordered = sorted(findings, key=lambda one: (OK, WARNING, FAILED).index(one.verdict))
    return "\n".join([*map(str, ordered), summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """`ready`, or how many checks failed."""
    failed = sum(one.verdict == FAILED for one in findings)
    return f"{failed} of {len(findings)} checks failed" if failed else "ready"


def as_json(findings: Sequence[Finding]) -> str:
    """All of them; the schema is `ortlaunch schema --doctor`."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)


def refused(wrong: Sequence[Finding]) -> LaunchError:
    """The table of what is wrong, as an error."""
    table = "\n".join(map(str, wrong))
    return LaunchError(
        f"the hosts are not ready, and nothing was started (launch.preflight):\n{table}"
    )
