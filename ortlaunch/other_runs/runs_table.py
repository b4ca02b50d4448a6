"""The table of `ortlaunch list`: its columns, and the row of a run."""

from __future__ import annotations

from ortlaunch.other_runs.status import Status

HEAD = f"{'state':<10} {'step':>12}  {'job':<16} {'started':<19}  folder"


def line(status: Status) -> str:
    """Return the row of a run in the list, for a person."""
    step = (
        "-" if status.step is None else f"{status.step}{f'/{status.steps}' if status.steps else ''}"
    )
    # The process is on another host, so the recorded state may be out of date.
    sure = "" if status.certain else "?"
    job = f"{status.job.backend} {status.job.id}"
    return (
        f"{status.state.value + sure:<10} {step:>12}  {job:<16} {status.job.started[:19]}  "
        f"{status.run}"
    )
