"""All runs of this user, each at one moment."""

from __future__ import annotations

from ortlaunch.errors import OrtlaunchError
from ortlaunch.runs import registry
from ortlaunch.runs.status import Status, look


def looks(newest: int | None) -> list[Status]:
    """How each of the newest runs goes or went; one whose files are none of ours any more is left out."""
    found = []
    for run in registry.runs()[:newest]:
        try:
            found.append(look(run))
        except OrtlaunchError:
            continue
    return found


HEAD = f"{'state':<10} {'step':>12}  {'job':<16} {'started':<19}  folder"


def line(status: Status) -> str:
    """For a person."""
    step = (
        "-" if status.step is None else f"{status.step}{f'/{status.steps}' if status.steps else ''}"
    )
    sure = "" if status.certain else "?"
    job = f"{status.job.backend} {status.job.id}"
    return f"{status.state.value + sure:<10} {step:>12}  {job:<16} {status.job.started[:19]}  {status.run}"
