"""Slurm's short forms: `host[1-2,04]` for nodes, `2(x3),1` for tasks on each of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ortlaunch.base.errors import PlanError
from ortlaunch.planning.hosts import Host

_GROUP = re.compile(r"([^\[\],]*)\[([^\]]*)\]")


def slurm_step_hosts_or_none(environ: Mapping[str, str]) -> tuple[Host, ...] | None:
    """Return the nodes of this process's Slurm step, with their tasks; None if Slurm names none.

    Raises:
        PlanError: names and tasks do not fit together.
    """
    # A step may use fewer nodes than its job, so its variables come first.
    node_list = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    task_layout = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not node_list or not task_layout:
        return None
    nodes = expand_node_names(node_list)
    task_counts = expand_tasks_per_node(task_layout)
    if len(nodes) != len(task_counts):
        raise PlanError(
            f"Slurm names {len(nodes)} nodes ({node_list}), and tasks for {len(task_counts)} ({task_layout})"
        )
    return tuple(
        Host(name, task_count, tuple(range(task_count)))
        for name, task_count in zip(nodes, task_counts)
    )


def slurm_job_hosts_or_empty(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the nodes of this process's Slurm job, with their tasks; none outside of a job."""
    job_variables = {"SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE"}
    return (
        slurm_step_hosts_or_none(
            {name: value for name, value in environ.items() if name in job_variables}
        )
        or ()
    )


def expand_node_names(node_list: str) -> list[str]:
    """Expand `a,host[1-2,04]-ib` to a, host1-ib, host2-ib, host04-ib, in Slurm's order."""
    return [
        name
        for part in _comma_separated_parts(node_list)
        for name in _expand_bracketed_node_names(part)
    ]


def expand_tasks_per_node(task_layout: str) -> list[int]:
    """Expand `2(x3),1` to 2, 2, 2, 1.

    Raises:
        PlanError: the text has another form.
    """
    task_counts = []
    for part in task_layout.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None:
            raise PlanError(
                f"{task_layout!r} is no layout of tasks; Slurm writes for example 2(x3),1"
            )
        task_counts += [int(match[1])] * int(match[2] or 1)
    return task_counts


def _comma_separated_parts(node_list: str) -> Iterator[str]:
    """Yield the parts that commas outside of brackets separate."""
    return (match[0] for match in re.finditer(r"(?:[^,\[]|\[[^\]]*\])+", node_list))


def _expand_bracketed_node_names(node_list_part: str) -> Iterator[str]:
    """Yield the names of one part."""
    match = _GROUP.match(node_list_part)
    if match is None:
        yield node_list_part
        return
    for range_text in match[2].split(","):
        range_start, dash, range_end = range_text.partition("-")
        for node_number in range(int(range_start), int(range_end) + 1) if dash else [range_start]:
            # Numbers keep their leading zeros: `04` stays `04`.
            yield from (
                f"{match[1]}{str(node_number).zfill(len(range_start))}{expanded_rest}"
                for expanded_rest in _expand_bracketed_node_names(node_list_part[match.end() :])
            )
