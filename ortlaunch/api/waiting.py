"""Wait for the end of a run, with a progress bar on request."""

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
def _bar(progress: bool) -> Iterator[Callable[[Status], None] | None]:
    """Yield a function that shows a status in a progress bar; None without a bar."""
    if not progress:
        yield None
        return
    # tqdm.auto shows a widget in a notebook, else a bar in the terminal.
    from tqdm.auto import tqdm

    with tqdm(unit="step") as bar:

        def show(now: Status) -> None:
            bar.total = now.steps
            bar.n = now.step or 0
            loss = {"loss": now.metrics["loss"]} if "loss" in now.metrics else {}
            bar.set_postfix(state=now.state.value, **loss)

        yield show
