"""Every error that ortlaunch raises for a person to read.

    OrtlaunchError
    ├── InputError            what the user wrote is wrong: exit status 2, nothing was started
    │   ├── RecipeError       the recipe or an override; carries all problems at once
    │   ├── HostfileError     the host file or an --include/--exclude filter
    │   ├── PlanError         recipe and hosts do not fit together
    │   ├── RankError         the launcher's environment is partial or contradictory
    │   ├── DamagedFile       a file of a run's folder is not as it was written, or of another version
    │   └── MissingDependency a package or a built extension is absent
    ├── LaunchError           processes could not be started or agreed on
    │   ├── WorldError        the launcher started another world than the plan's
    │   └── DeviceError       a rank has no GPU to train on
    ├── EngineError           the chosen engine cannot run this model
    │   └── ParityError       it runs the model, and what comes out is not what plain PyTorch computes
    ├── FileError             a file or the output of ours cannot be read or written; made by file_errors.py
    ├── BadStepError          the numbers of a step are bad
    │   ├── NonFiniteError    a loss or a gradient is inf or nan, and would spoil the weights
    │   └── LossSpikeError    a loss jumped, and train.on_spike asks for an end
    ├── HookError             the user's own hook, metric or samples raised
    └── CheckpointError       a checkpoint cannot be written or read
        ├── LastSaveError     the save at the end failed, and checkpoint.on_failure is continue
        └── NotSaved          a stop that was asked for found nowhere to save: 128 + its signal

A class has the cause that the record of a failed rank takes from it. Imports cause alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ortlaunch.cause import Cause

# What a terminal obeys, and marks that turn the direction of a line; no line feed, tab, or line end of Windows.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]|\r(?!\n)")


def printable(text: str) -> str:
    """A text of somebody else's for a terminal: each control character as it is written in Python."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class OrtlaunchError(Exception):
    """Base class; ``str(error)`` is the whole message for the user."""

    exit_status = 1
    cause: Cause | None = None

    @property
    def detail(self) -> str:
        """One line of it."""
        return str(self).strip().partition("\n")[0]


class InputError(OrtlaunchError):
    """What the user wrote is wrong; nothing was started."""

    exit_status = 2
    cause = Cause.BAD_INPUT


class RecipeError(InputError):
    """One or more problems in a recipe; ``problems`` holds a full line for each of them."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class HostfileError(InputError):
    """A host file or a host filter is wrong."""


class PlanError(InputError):
    """The recipe and the hosts do not fit together."""


class RankError(InputError):
    """The environment that should say which rank this is, is partial or contradicts itself."""


class DamagedFile(InputError, ValueError):
    """A file of a run's folder cannot be read: cut, empty, binary, or of another version; the message names it."""


class MissingDependency(InputError):
    """A package or a built extension is absent; the message says what to type."""

    cause = Cause.MISSING_MODULE


class LaunchError(OrtlaunchError):
    """Processes could not be started, or did not agree on what they run."""


class WorldError(LaunchError):
    """The launcher started another world than the plan's."""

    cause = Cause.OTHER_WORLD


class DeviceError(LaunchError):
    """A rank has no GPU to train on."""

    cause = Cause.NO_GPU


class EngineError(OrtlaunchError):
    """The engine cannot run this model; the message says why and what to try."""


class ParityError(EngineError):
    """Loss or gradients on the engine are not plain PyTorch's; the message names the parameters."""


class FileError(OrtlaunchError):
    """A file or the output of ours cannot be read or written; status 2 where another place would do, else 1."""

    def __init__(self, message: str, exit_status: int) -> None:
        self.exit_status = exit_status
        super().__init__(message)


FIRST_PARAMETER = "the first parameter whose gradient is not finite"


class BadStepError(OrtlaunchError):
    """The numbers of a step are bad; ``found`` is its record where the step was not taken, else None."""

    def __init__(self, message: str, found: Any = None) -> None:
        self.found = found
        super().__init__(message)

    @property
    def detail(self) -> str:
        """With the parameter, where one is named."""
        parameter = self.found.parameter if self.found else None
        return super().detail + (f"; {FIRST_PARAMETER}: {parameter}" if parameter else "")


class NonFiniteError(BadStepError):
    """A loss or a gradient is inf or nan; the message names the step, the samples and the parameter."""

    cause = Cause.NOT_FINITE

    def __init__(self, message: str, found: Any = None) -> None:
        super().__init__(message, found)
        if found and found.kind == "gradient":
            self.cause = Cause.GRADIENT_NOT_FINITE


class LossSpikeError(BadStepError):
    """A loss is far above those before it; the message names the step and the samples."""

    cause = Cause.LOSS_SPIKE


class HookError(OrtlaunchError):
    """The user's own hook, metric or samples raised, or what they returned means nothing; the message names them."""


class CheckpointError(OrtlaunchError):
    """A checkpoint cannot be written or read."""

    cause = Cause.DAMAGED_CHECKPOINT


class LastSaveError(CheckpointError):
    """The save at the end failed, and the recipe wants to go on: the export is still to be written."""


class NotSaved(CheckpointError):
    """A stop was asked for, and its checkpoint could not be written; leaves as the signal alone would have."""

    def __init__(self, message: str, exit_status: int) -> None:
        self.exit_status = exit_status
        super().__init__(message)
