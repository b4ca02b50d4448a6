"""Every error that this package raises for the user. Standard library only.

ORTModuleError            ONNX Runtime cannot run this model, or not on this machine
├── SettingError          a setting does not fit; `setting` has its name
└── MissingDependency     a package or a built extension is absent; `command` installs it
"""

from __future__ import annotations


class ORTModuleError(Exception):
    """ONNX Runtime cannot run this model; the message has the reason and a suggestion."""


class SettingError(ORTModuleError):
    """A setting that does not fit the installed versions, this model or an earlier ORTModule."""

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"setting {setting}: {problem}")
        self.setting = setting
        self.problem = problem


class MissingDependency(ORTModuleError):
    """A package or a built extension is absent.

    Args:
        problem: what is absent.
        command: what to type in a shell; empty where no command helps.
    """

    def __init__(self, problem: str, command: str = "") -> None:
        super().__init__(f"{problem}. Type: {command}" if command else problem)
        self.problem = problem
        self.command = command
