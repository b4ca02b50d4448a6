"""Every error that ortlaunch raises for the user.

    OrtlaunchError
    ├── InputError            the user's input is wrong: exit status 2, nothing was started
    │   ├── RecipeError       the recipe or an override; carries all problems at once
    │   ├── HostfileError     the host file or an --include/--exclude filter
    │   ├── PlanError         recipe and hosts do not fit together
    │   ├── RankError         the launcher's environment is partial or contradictory
    │   ├── DamagedFile       a file of a run's folder is not as it was written, or of another version
    │   └── MissingDependency a package or a built extension is absent
    ├── LaunchError           processes could not be started or agreed on
    │   ├── WorldError        the launcher started another world than the plan's
    │   └── DeviceError       a rank has no GPU to train on
    ├── RunError              a run that Python waits for, or a process on its results, failed
    ├── EngineError           the chosen engine cannot run this model
    │   └── ParityError       it runs the model, and its results differ from plain PyTorch's
    ├── FileError             ortlaunch's file or output cannot be read or written (file_errors.py)
    ├── BadStepError          the numbers of a step are bad
    │   ├── NonFiniteError    a loss or a gradient is inf or nan, and would spoil the weights
    │   └── LossSpikeError    a loss jumped, and train.on_spike requests an end
    ├── DataWorkerError       a process of data.workers ended, or could not hand over a batch
    ├── HookError             the user's own hook, metric or samples raised
    └── CheckpointError       a checkpoint cannot be written or read
        ├── LastSaveError     the save at the end failed, and checkpoint.on_failure is continue
        └── NotSaved          a requested stop could not save: 128 + its signal

Each class has the cause for the record of a failed rank. Imports only cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ortlaunch.base.cause import Cause

# Control characters of a terminal, marks that change the direction of text, and halves of surrogate
# pairs, which no encoding has. Line feed, tab and the line end of Windows are allowed.
CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)


def escape_control_characters(text: str) -> str:
    """Return foreign text that is safe for a terminal: control characters as Python escapes."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def first_message_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# git-lfs leaves such a text where a large file was not fetched.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
IS_LFS_POINTER = "is a pointer of git-lfs in place of the file; type in its folder: git lfs pull"


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from, or while they were handled."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class OrtlaunchError(Exception):
    """The base class; ``str(error)`` is the whole message for the user."""

    exit_status = 1
    cause: Cause | None = None

    def __init__(self, message: str = "", exit_status: int | None = None) -> None:
        super().__init__(message)
        self.exit_status = self.exit_status if exit_status is None else exit_status

    @property
    def detail(self) -> str:
        """The first line of the message."""
        return str(self).strip().partition("\n")[0]


class InputError(OrtlaunchError):
    """An error in the user's input; nothing was started."""

    # A restart of the same command would fail again (rank.NO_FAULT).
    exit_status = 2
    cause = Cause.BAD_INPUT


class RecipeError(InputError):
    """One or more problems in a recipe; ``problems`` has a full line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class HostfileError(InputError):
    """A host file or a host filter is wrong."""


class PlanError(InputError):
    """The recipe and the hosts do not fit together."""


class RankError(InputError):
    """The environment variables of the rank are incomplete or contradict each other."""


class DamagedFile(InputError, ValueError):
    """A file of a run folder cannot be read: cut, empty, binary, or of another version."""


class MissingDependency(InputError):
    """A package or a built extension is absent; the message has the command that installs it."""

    cause = Cause.MISSING_MODULE


class LaunchError(OrtlaunchError):
    """Processes could not be started, or did not agree on what they run."""


class RunError(OrtlaunchError):
    """A run, or a process that works on its results, ended with an error.

    The message is the verdict, or the output of that process; ``exit_status`` is its own.
    """


class WorldError(LaunchError):
    """The launcher started another world than the plan's."""

    cause = Cause.OTHER_WORLD


class DeviceError(LaunchError):
    """A rank has no GPU to train on."""

    cause = Cause.NO_GPU


class EngineError(OrtlaunchError):
    """The engine cannot run this model; the message has the reason and a suggestion."""


class ParityError(EngineError):
    """Loss or gradients on the engine are not plain PyTorch's; the message names the parameters."""


class FileError(OrtlaunchError):
    """A file or output of ortlaunch cannot be read or written.

    The exit status is 2 if another location would help, else 1.
    """


FIRST_PARAMETER = "first parameter with a gradient that is not finite"


class BadStepError(OrtlaunchError):
    """The loss or gradient of a step is bad; ``found`` is its record if the step was left out."""

    def __init__(self, message: str, bad_step: Any = None) -> None:
        self.bad_step = bad_step
        super().__init__(message)

    @property
    def detail(self) -> str:
        """The first line of the message, with the parameter if the record names one."""
        parameter = self.bad_step.parameter if self.bad_step else None
        return super().detail + (f"; {FIRST_PARAMETER}: {parameter}" if parameter else "")


class NonFiniteError(BadStepError):
    """A loss or gradient is inf or nan; the message names step, samples and parameter."""

    cause = Cause.NOT_FINITE

    def __init__(self, message: str, bad_step: Any = None) -> None:
        super().__init__(message, bad_step)
        # In fp16 this cause means a collapsed loss scale (diagnose/conclude.py).
        if bad_step and bad_step.kind == "gradient":
            self.cause = Cause.GRADIENT_NOT_FINITE


class LossSpikeError(BadStepError):
    """A loss is far above those before it; the message names the step and the samples."""

    cause = Cause.LOSS_SPIKE


class DataWorkerError(OrtlaunchError):
    """A process of `data.workers` ended, or could not hand over a batch; the message is all."""

    cause = Cause.BAD_INPUT


class HookError(OrtlaunchError):
    """The user's hook, metric or samples raised an error or returned an invalid value."""


class CheckpointError(OrtlaunchError):
    """A checkpoint cannot be written or read."""

    cause = Cause.DAMAGED_CHECKPOINT


class LastSaveError(CheckpointError):
    """The save at the end failed, and the recipe requests to continue with the export."""


class NotSaved(CheckpointError):
    """A stop was requested, and its checkpoint could not be written; exits as by the signal alone."""
