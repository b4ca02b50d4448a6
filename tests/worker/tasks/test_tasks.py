"""The table of what ranks can be told to do."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from ortlaunch.worker import tasks
from ortlaunch.worker.tasks import TASKS


@pytest.mark.parametrize("name", TASKS)
def test_a_task_takes_the_session_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's word alone chooses the module that runs."""
    module, seen = import_module(TASKS[name]), list[Any]()
    assert list(inspect.signature(module.run).parameters) == ["session"]
    monkeypatch.setattr(module, "run", seen.append)
    session: Any = SimpleNamespace(plan=SimpleNamespace(task=name))
    tasks.run(session)
    assert seen == [session]
