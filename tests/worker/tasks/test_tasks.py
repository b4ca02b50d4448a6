"""The table of the tasks of ranks."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from ortlaunch.tables.tasks import TASKS
from ortlaunch.worker import tasks


@pytest.mark.parametrize("name", TASKS)
def test_a_task_takes_the_session_or_its_request_and_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's task alone selects the module, whose only argument is a session or a request."""
    module = import_module(TASKS[name].module)
    seen = list[Any]()
    if TASKS[name].request is not None:
        # Such a task runs in a process without a session.
        (given,) = inspect.signature(module.run, eval_str=True).parameters.values()
        assert given.annotation is TASKS[name].request
        return
    assert list(inspect.signature(module.run).parameters) == ["session"]
    monkeypatch.setattr(module, "run", seen.append)
    session: Any = SimpleNamespace(plan=SimpleNamespace(traits=TASKS[name]))
    tasks.run(session)
    assert seen == [session]
