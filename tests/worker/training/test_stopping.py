"""A stop whose checkpoint cannot be written: the exit status of the signal, and the reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ortlaunch.base.errors import CheckpointError, NotSaved
from ortlaunch.rank import Rank
from ortlaunch.run_folder.folder import RunDir, write_json_atomically, write_text_atomically
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.requests import RankRequest
from ortlaunch.worker.training.stopping import (
    remove_save_request_after_save,
    write_and_print_stop_record_if_stopped,
)


@pytest.fixture
def session(tmp_path: Path) -> Any:
    """The parts of a session that a stop uses."""
    group = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    recipe = SimpleNamespace(train=SimpleNamespace(steps=9))
    return SimpleNamespace(run=RunDir(tmp_path), group=group, recipe=recipe)


def test_a_folder_that_is_not_writable(session: Any) -> None:
    """A stop without a checkpoint ends with 128 + the signal; the error has the reason."""
    for asked, status in ((RankRequest.TERMINATE, 143), (RankRequest.INTERRUPT, 130)):
        with (
            pytest.raises(NotSaved) as caught,
            remove_save_request_after_save(session, SimpleNamespace(), asked),
        ):  # type: ignore[arg-type]
            raise CheckpointError("Permission denied")
        said = f"stopped by {asked.signal.name}, and nothing was saved: Permission denied"
        assert (str(caught.value), caught.value.exit_status) == (said, status)
    # Without a stop, the failed save raises its own error.
    with (
        pytest.raises(CheckpointError, match=r"^Permission"),
        remove_save_request_after_save(session, SimpleNamespace(), RankRequest.SAVE),
    ):  # type: ignore[arg-type]
        raise CheckpointError("Permission denied")


def test_a_save_that_failed_and_was_told(session: Any) -> None:
    """A stop whose save failed under checkpoint.on_failure: continue ends without stopped.json."""
    write_json_atomically(session.run.stop_request, {"by": "`ortlaunch stop`"})
    with pytest.raises(
        NotSaved, match=r"^stopped by `ortlaunch stop`, and nothing was saved: see NOT SAVED above"
    ) as caught:
        write_and_print_stop_record_if_stopped(session, RankRequest.STOP, 3)
    assert (caught.value.exit_status, session.run.stopped.exists()) == (138, False)
    # With the checkpoint of this step, stopped.json is written.
    write_text_atomically(session.run.checkpoint_folder(3) / "COMPLETE", "")
    assert write_and_print_stop_record_if_stopped(session, RankRequest.STOP, 3) is RankRequest.STOP
    assert '"exit_status": 85' in session.run.stopped.read_text()
