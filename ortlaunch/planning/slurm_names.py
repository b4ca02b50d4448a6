"""Slurm's short forms: `host[1-2,04]` for nodes, `2(x3),1` for tasks on each of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ortlaunch.errors import PlanError
from ortlaunch.planning.hosts import Host

_GROUP = re.compile(r"([^\[\],]*)\[([^\]]*)\]")


def hosts_of_step(environ: Mapping[str, str]) -> tuple[Host, ...] | None:
    """Return the nodes of this process's Slurm step, with their tasks; None if Slurm names none.

    Raises:
        PlanError: names and tasks do not fit together.
    """
    # A step may use fewer nodes than its job, so its variables come first.
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not names or not layout:
        return None
    nodes = node_names(names)
    tasks = tasks_per_node(layout)
    if len(nodes) != len(tasks):
        raise PlanError(
            f"Slurm names {len(nodes)} nodes ({names}), and tasks for {len(tasks)} ({layout})"
        )
    return tuple(Host(name, count, tuple(range(count))) for name, count in zip(nodes, tasks))


def hosts_of_job(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the nodes of this process's Slurm job, with their tasks; none outside of a job."""
    job = {"SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"}
    return hosts_of_step({name: value for name, value in environ.items() if name in job}) or ()


def node_names(text: str) -> list[str]:
    """Expand `a,host[1-2,04]-ib` to a, host1-ib, host2-ib, host04-ib, in Slurm's order."""
    return [name for part in _parts(text) for name in _expanded(part)]


def tasks_per_node(text: str) -> list[int]:
    """Expand `2(x3),1` to 2, 2, 2, 1.

    Raises:
        PlanError: the text has another form.
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None:
            raise PlanError(f"{text!r} is no layout of tasks; Slurm writes for example 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _parts(text: str) -> Iterator[str]:
    """Yield the parts that commas outside of brackets separate."""
    return (match[0] for match in re.finditer(r"(?:[^,\[]|\[[^\]]*\])+", text))


def _expanded(part: str) -> Iterator[str]:
    """Yield the names of one part."""
    match = _GROUP.match(part)
    if match is None:
        yield part
        return
    for number in match[2].split(","):
        first, dash, last = number.partition("-")
        for value in range(int(first), int(last) + 1) if dash else [first]:
            # Numbers keep their leading zeros: `04` stays `04`.
            yield from (
                f"{match[1]}{str(value).zfill(len(first))}{rest}"
                for rest in _expanded(part[match.end() :])
            )
