"""Wait for the end of a run, with a progress bar on request."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ortlaunch.base.errors import RunError
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.started_runs import status
from ortlaunch.started_runs.status import Status


def wait_for_run_end_or_raise(
    run: RunDir, show_progress: bool, raises_if_failed: bool = True
) -> Status:
    """Wait for the end of a run; arguments, result and errors are those of `Run.wait`."""
    with _open_progress_bar_and_yield_update_or_none(show_progress) as show:
        last_status = status.poll_status_until_run_end(run, show)
    exit_status = last_status.job.exit_status or 0
    if raises_if_failed and exit_status not in (0, EXIT_SAVED):
        raise RunError(last_status.end_text() or str(last_status), exit_status)
    return last_status


@contextlib.contextmanager
def _open_progress_bar_and_yield_update_or_none(
    show_progress: bool,
) -> Iterator[Callable[[Status], None] | None]:
    """Yield a function that shows a status in a progress bar; None without a bar."""
    if not show_progress:
        yield None
        return
    # tqdm.auto shows a widget in a notebook, else a bar in the terminal.
    from tqdm.auto import tqdm

    with tqdm(unit="step") as bar:

        def show(current_status: Status) -> None:
            bar.total = current_status.steps
            bar.n = current_status.step or 0
            loss = (
                {"loss": current_status.metrics["loss"]} if "loss" in current_status.metrics else {}
            )
            bar.set_postfix(state=current_status.state.value, **loss)

        yield show
