"""Read a run folder's contents for the report. Drawing is done elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ortlaunch.errors import DamagedFile, InputError, OrtlaunchError
from ortlaunch.other_runs import status
from ortlaunch.other_runs.status import Status
from ortlaunch.recipe.text.place import HIDDEN, SECRET, without_secrets
from ortlaunch.recipe.text.yaml_text import load_dumped
from ortlaunch.run_folder.folder import RunDir, read_own_json, read_own_text
from ortlaunch.run_folder.lines import read_json_lines
from ortlaunch.run_folder.resume_record import ResumeRecord


@dataclass(frozen=True)
class Record:
    """The contents of one run folder."""

    run: RunDir
    label: str
    status: Status
    recipe: dict[str, Any]
    lines: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    engine: dict[str, Any]
    profile: dict[str, Any]
    memory: dict[str, Any]
    summary: dict[str, Any]
    environment: dict[str, Any]
    confusion: dict[str, Any]
    saves: list[dict[str, Any]]
    bad_steps: list[dict[str, Any]]
    slow_ranks: list[dict[str, Any]]
    commands: list[dict[str, Any]]
    exports: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    """Results of `ortlaunch evaluate`, one evaluation.json each."""
    resumed: int
    """Step from which the last start continued; 0 for a new run or an unreadable record."""
    kept: list[int]
    """Steps of the complete checkpoints that still exist."""
    # Errors of files that could not be read, each once.
    unreadable: list[str] = field(default_factory=list)

    @property
    def logged(self) -> list[dict[str, Any]]:
        """Lines of logged steps, which have a loss."""
        return [line for line in self.lines if "loss" in line]

    @property
    def ort(self) -> dict[str, Any]:
        """ONNX Runtime's part of engine.json; empty for other engines."""
        return self.engine.get("onnxruntime") or {}

    @property
    def starts(self) -> list[int]:
        """Steps from which later starts continued, ascending; a start from 0 is not listed."""
        later = [one.resumed for one in self.status.job.attempts[1:]]
        return sorted({step for step in (*later, self.resumed) if step})


def read(paths: Sequence[Path]) -> list[Record]:
    """Read every run.

    Raises:
        InputError: a folder is given twice, or some cannot be read as runs; names all of these.
    """
    runs = []
    wrong = []
    # Collect all wrong folders, so that the user can mend the command at once.
    for path, label in zip(paths, labels(paths)):
        try:
            runs.append(_read(RunDir(path), label))
        except OrtlaunchError as error:
            wrong.append(str(error))
    if wrong:
        raise InputError("\n".join(wrong))
    return runs


def labels(paths: Sequence[Path]) -> list[str]:
    """Return a short unique name of each folder: as few of its last path parts as needed.

    Raises: InputError: a folder is given twice.
    """
    parts = [path.resolve().parts for path in paths]
    # The shortest unique suffix of the paths; a path given twice never becomes unique.
    for length in range(1, max(map(len, parts), default=1) + 1):
        short = ["/".join(each[-length:]) for each in parts]
        if len(set(short)) == len(short):
            return short
    raise InputError(f"the same run folder is given twice: {', '.join(map(str, paths))}")


def _read(run: RunDir, label: str) -> Record:
    found = status.read_status(run)
    files = _Files(found.unreadable)
    folders = sorted((run.path / "evaluations").glob("*/evaluation.json"))
    return Record(
        run=run, label=label, status=found,
        recipe=files.yaml(run.recipe), lines=files.lines(run.metrics, "step"),
        engine=files.json(run.engine), profile=files.json(run.profile),
        memory=files.json(run.memory), summary=files.json(run.summary),
        environment=files.json(run.environment), confusion=files.json(run.confusion),
        saves=files.lines(run.saves), bad_steps=files.lines(run.bad_steps),
        slow_ranks=files.lines(run.slow_ranks), commands=files.lines(run.commands), exports=files.lines(run.exports),
        evaluations=[files.json(path) for path in folders],
        resumed=files.resumed(run),
        kept=[step for step, _ in run.complete_checkpoints()],
        unreadable=files.unreadable,
    )  # fmt: skip


class _Files:
    """Reader of files that may be absent; it collects errors of files that cannot be read."""

    def __init__(self, unreadable: Sequence[str]) -> None:
        self.unreadable = list(unreadable)

    def json(self, path: Path) -> dict[str, Any]:
        """Return a JSON mapping; empty where there is no file."""
        return self._mapping(path, read_own_json)

    def resumed(self, run: RunDir) -> int:
        """Return the step after which the newest start began; 0 if it cannot be read."""
        try:
            return ResumeRecord.read(run).step
        except DamagedFile as error:
            self._remember([str(error)])
            return 0

    def yaml(self, path: Path) -> dict[str, Any]:
        """Return a YAML mapping without the values of secrets; empty where there is no file."""
        return dict(
            without_secrets(self._mapping(path, lambda path: load_dumped(read_own_text(path))))
        )

    def lines(self, path: Path, *names: str) -> list[dict[str, Any]]:
        """Return every readable line that has these keys. An unfinished last line is left out."""
        found = read_json_lines(path, *names)
        self._remember(found.unreadable)
        return found.values

    def _mapping(self, path: Path, reader: Callable[[Path], Any]) -> dict[str, Any]:
        try:
            value = reader(path) if path.exists() else {}
        except DamagedFile as error:
            self._remember([str(error)])
            return {}
        # ValueError: the file is not UTF-8.
        except (ValueError, yaml.YAMLError) as error:
            self._remember([f"{path} cannot be read: {' '.join(str(error).split())}"])
            return {}
        # The file holds no mapping: it is damaged or of another version. The report leaves it out.
        return value if isinstance(value, dict) else {}

    def _remember(self, said: Sequence[str]) -> None:
        self.unreadable += [each for each in said if each not in self.unreadable]


def command(line: Mapping[str, Any]) -> str:
    """Return the command that the user entered. Secret values of KEY=VALUE words are hidden."""
    words = [str(word) for word in line.get("argv", [])]
    parts = [(word, *word.partition("=")) for word in words]
    hidden = [
        f"{key}={HIDDEN}" if equals and SECRET.search(key) else word
        for word, key, equals, _ in parts
    ]
    # The first word is the program's path.
    return " ".join(["ortlaunch", *hidden[1:]])


def number(value: Any) -> float | None:
    """Return a finite number of a record, or None for any other value."""
    try:
        # Records write nan and inf as text, which float() reads as well.
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    # inf - inf and nan - nan are nan, which does not equal 0.
    return found if found - found == 0 else None
