"""Wait for the end of a run, with a bar if it is requested."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ortlaunch.errors import RunError
from ortlaunch.other_runs import status
from ortlaunch.other_runs.status import Status
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.folder import RunDir


def wait(run: RunDir, progress: bool, check: bool = True) -> Status:
    """Wait for the end of a run; arguments, result and errors are those of `Run.wait`."""
    with _bar(progress) as show:
        last = status.wait(run, show)
    code = last.job.exit_status or 0
    if check and code not in (0, EXIT_SAVED):
        raise RunError(last.job.verdict or str(last), code)
    return last


@contextlib.contextmanager
def _bar(wanted: bool) -> Iterator[Callable[[Status], None] | None]:
    """Yield a function that shows a status in a bar of tqdm; None if it is not wanted."""
    if not wanted:
        yield None
        return
    # It chooses the widget of a notebook, or the bar of a terminal.
    from tqdm.auto import tqdm

    with tqdm(unit="step") as bar:

        def show(found: Status) -> None:
            bar.total = found.steps
            bar.n = found.step or 0
            loss = {"loss": found.metrics["loss"]} if "loss" in found.metrics else {}
            bar.set_postfix(state=found.state.value, **loss)

        yield show
