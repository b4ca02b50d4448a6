"""train.hook: the calls of the user's own class, its request to stop, and its failures."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import HookError, InputError
from ortlaunch.run_folder.folder import read_json_or_raise_damaged
from ortlaunch.worker.data.user_data import DataError
from tests.training import Trained, train_here
from tests.worker.tasks.test_train import ROWS, Line

SECTIONS = {"checkpoint": {"every_steps": 2, "every_minutes": None}, "log": {"every_steps": 1}}
TOLD: list[tuple[str, int, Any]] = []


class Listens:
    """A hook that records its calls."""

    def on_step(self, step: int, values: dict[str, Any]) -> None:
        TOLD.append(("step", step, values["loss"]))

    def on_evaluation(self, step: int, values: dict[str, float]) -> str | None:
        TOLD.append(("evaluation", step, values))
        return None

    def on_checkpoint(self, step: int, folder: str) -> None:
        TOLD.append(("checkpoint", step, Path(folder).name))
        assert (Path(folder) / "COMPLETE").exists()


class Stops:
    """A hook that requests a stop after step 2's checkpoint."""

    def on_checkpoint(self, step: int, folder: str) -> str:
        return "stop"


class Fails:
    """A hook that raises an error."""

    def on_evaluation(self, step: int, values: dict[str, float]) -> None:
        raise KeyError("accuracy")


class Answers:
    """A hook that returns an invalid value."""

    def on_step(self, step: int, values: dict[str, Any]) -> bool:
        return True


class Silent:
    """A hook without a method."""


class Foreign(Listens):
    """A hook with a method of another tool's callbacks."""

    def on_train_end(self, *arguments: Any) -> None: ...


class Misspelt(Listens):
    """A hook with a misspelt method."""

    def onstep(self, step: int, values: dict[str, Any]) -> None: ...


class Helps(Listens):
    """A hook with a method for its own use."""

    def once(self) -> None: ...


def trained(folder: Path, name: str) -> Trained:
    TOLD.clear()
    # Under a name that the recipe can import.
    sys.modules["hooks_of_a_test"] = sys.modules[__name__]
    train = {"max_steps": 5, "evaluate_every_steps": 3, "hook": f"hooks_of_a_test:{name}"}
    return train_here(folder, Line(), ROWS, evaluation=ROWS[:4], train=train, **SECTIONS)


def test_what_it_is_told(tmp_path: Path) -> None:
    """Each logged step, evaluation and complete checkpoint is one call, in order."""
    found = trained(tmp_path, "Listens")
    assert [(kind, step) for kind, step, _ in TOLD] == [
        ("step", 1), ("step", 2), ("checkpoint", 2), ("step", 3), ("evaluation", 3), ("step", 4), ("checkpoint", 4),
        ("step", 5), ("evaluation", 5), ("checkpoint", 5),
    ]  # fmt: skip
    assert [(step, value) for kind, step, value in TOLD if kind == "step"] == found.values("loss")
    assert TOLD[4] == ("evaluation", 3, {"loss": dict(found.values("evaluation_loss"))[3]})


def test_it_may_have_methods_of_its_own(tmp_path: Path) -> None:
    """A method with a name unlike ours is allowed."""
    assert trained(tmp_path, "Helps").state.step == 5


def test_it_stops_the_run(tmp_path: Path) -> None:
    """The run stops right after the checkpoint, and stopped.json names the hook."""
    before = signal.getsignal(signal.SIGUSR1)
    found = trained(tmp_path, "Stops")
    assert found.state.step == 2
    assert read_json_or_raise_damaged(found.run.stopped) == {
        "step": 2, "steps": 5, "by": "train.hook (hooks_of_a_test:Stops.on_checkpoint)", "exit_status": 85,
    }  # fmt: skip
    # The signal's handler is restored.
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [("Fails", HookError,
      r"hooks_of_a_test:Fails.on_evaluation raised KeyError after step 3: 'accuracy'\n.*line \d+"),
     ("Answers", HookError, r'Answers.on_step returned True; it returns "stop", or nothing'),
     ("Silent", InputError,
      r"train.hook: hooks_of_a_test:Silent has none of on_step, on_evaluation, on_checkpoint"),
     ("Foreign", InputError,
      r"Foreign has 'on_train_end', which is never called; valid are on_step, on_evaluation"),
     ("Misspelt", InputError,
      r"Misspelt has 'onstep', which is never called; valid are .*; did you mean on_step\?"),
     ("Nobody", DataError, r"train.hook: module 'hooks_of_a_test' has no function 'Nobody'")],
)  # fmt: skip
def test_it_fails(name: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    """The error names class and method, and the line that raised it."""
    with pytest.raises(error, match=f"(?s){message}"):
        trained(tmp_path, name)
