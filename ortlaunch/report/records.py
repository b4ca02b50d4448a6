"""Read a run folder's contents for the report. Drawing is done elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ortlaunch.base.errors import DamagedFile, InputError, OrtlaunchError
from ortlaunch.base.units import number_or_none
from ortlaunch.recipe.text.source_location import (
    HIDDEN_VALUE,
    SECRET_NAME,
    values_with_hidden_secrets,
)
from ortlaunch.recipe.text.yaml_text import load_dumped
from ortlaunch.run_folder.folder import (
    RunDir,
    read_json_or_raise_damaged,
    read_text_or_raise_damaged,
)
from ortlaunch.run_folder.lines import read_json_lines_with_keys
from ortlaunch.run_folder.resume_record import ResumeRecord
from ortlaunch.started_runs import status
from ortlaunch.started_runs.status import Status


@dataclass(frozen=True)
class Record:
    """The contents of one run folder."""

    run: RunDir
    label: str
    status: Status
    recipe: dict[str, Any]
    lines: list[dict[str, object]]
    """Lines of metrics.jsonl."""
    engine: dict[str, Any]
    profile: dict[str, object]
    memory: dict[str, Any]
    summary: dict[str, Any]
    environment: dict[str, object]
    confusion: dict[str, Any]
    saves: list[dict[str, object]]
    bad_steps: list[dict[str, object]]
    slow_ranks: list[dict[str, object]]
    commands: list[dict[str, object]]
    exports: list[dict[str, object]]
    evaluations: list[dict[str, object]]
    """Results of `ortlaunch evaluate`, one evaluation.json each."""
    resumed: int
    """Step from which the last start continued; 0 for a new run or an unreadable record."""
    kept: list[int]
    """Steps of the complete checkpoints that still exist."""
    # Errors of files that could not be read, each once.
    unreadable: list[str] = field(default_factory=list)

    @property
    def logged(self) -> list[dict[str, object]]:
        """Lines of logged steps, which have a loss."""
        return [line for line in self.lines if "loss" in line]

    @property
    def ort(self) -> dict[str, Any]:
        """ONNX Runtime's part of engine.json; empty for other engines."""
        return self.engine.get("onnxruntime") or {}

    @property
    def starts(self) -> list[int]:
        """Steps from which later starts continued, ascending; a start from 0 is not listed."""
        resumed_steps = [attempt.resumed for attempt in self.status.job.attempts[1:]]
        return sorted({step for step in (*resumed_steps, self.resumed) if step})


def read_run_records_or_refuse(run_folders: Sequence[Path]) -> list[Record]:
    """Read every run.

    Raises:
        InputError: a folder is given twice, or some cannot be read as runs; names all of these.
    """
    read_runs = []
    error_texts = []
    # Collect all wrong folders, so that the user can mend the command at once.
    for path, label in zip(run_folders, shortest_unique_folder_labels(run_folders)):
        try:
            read_runs.append(_read_run_record(RunDir(path), label))
        except OrtlaunchError as error:
            error_texts.append(str(error))
    if error_texts:
        raise InputError("\n".join(error_texts))
    return read_runs


def shortest_unique_folder_labels(run_folders: Sequence[Path]) -> list[str]:
    """Return a short unique name of each folder: as few of its last path parts as needed.

    Raises: InputError: a folder is given twice.
    """
    path_parts = [path.resolve().parts for path in run_folders]
    # The shortest unique suffix of the paths; a path given twice never becomes unique.
    for part_count in range(1, max(map(len, path_parts), default=1) + 1):
        short_labels = ["/".join(parts_of_path[-part_count:]) for parts_of_path in path_parts]
        if len(set(short_labels)) == len(short_labels):
            return short_labels
    raise InputError(f"the same run folder is given twice: {', '.join(map(str, run_folders))}")


def _read_run_record(run: RunDir, label: str) -> Record:
    run_status = status.read_status(run)
    file_reader = _FileReader(run_status.unreadable)
    evaluation_paths = sorted((run.path / "evaluations").glob("*/evaluation.json"))
    return Record(
        run=run,
        label=label,
        status=run_status,
        recipe=file_reader.read_yaml_mapping_hiding_secrets(run.recipe),
        lines=file_reader.read_lines(run.metrics, "step"),
        engine=file_reader.read_json(run.engine),
        profile=file_reader.read_json(run.profile),
        memory=file_reader.read_json(run.memory),
        summary=file_reader.read_json(run.summary),
        environment=file_reader.read_json(run.environment),
        confusion=file_reader.read_json(run.confusion),
        saves=file_reader.read_lines(run.saves),
        bad_steps=file_reader.read_lines(run.bad_steps),
        slow_ranks=file_reader.read_lines(run.slow_ranks),
        commands=file_reader.read_lines(run.commands),
        exports=file_reader.read_lines(run.exports),
        evaluations=[file_reader.read_json(path) for path in evaluation_paths],
        resumed=file_reader.read_resumed_step_or_zero(run),
        kept=[step for step, _ in run.complete_checkpoints()],
        unreadable=file_reader.unreadable,
    )


class _FileReader:
    """Reader of files that may be absent; it collects errors of files that cannot be read."""

    def __init__(self, unreadable: Sequence[str]) -> None:
        self.unreadable = list(unreadable)

    def read_json(self, path: Path) -> dict[str, object]:
        """Return a JSON mapping; empty where there is no file."""
        return self._read_mapping_or_note_error(path, read_json_or_raise_damaged)

    def read_resumed_step_or_zero(self, run: RunDir) -> int:
        """Return the step after which the newest start began; 0 if it cannot be read."""
        try:
            return ResumeRecord.read_or_from_the_beginning(run).step
        except DamagedFile as error:
            self._add_unreadable([str(error)])
            return 0

    def read_yaml_mapping_hiding_secrets(self, path: Path) -> dict[str, object]:
        """Return a YAML mapping without the values of secrets; empty where there is no file."""
        return dict(
            values_with_hidden_secrets(
                self._read_mapping_or_note_error(
                    path, lambda path: load_dumped(read_text_or_raise_damaged(path))
                )
            )
        )

    def read_lines(self, path: Path, *required_keys: str) -> list[dict[str, object]]:
        """Return every readable line that has these keys. An unfinished last line is left out."""
        parsed_lines = read_json_lines_with_keys(path, *required_keys)
        self._add_unreadable(parsed_lines.unreadable)
        return parsed_lines.values

    def _read_mapping_or_note_error(
        self, path: Path, read_file: Callable[[Path], Any]
    ) -> dict[str, object]:
        try:
            value = read_file(path) if path.exists() else {}
        except DamagedFile as error:
            self._add_unreadable([str(error)])
            return {}
        # ValueError: the file is not UTF-8.
        except (ValueError, yaml.YAMLError) as error:
            self._add_unreadable([f"{path} cannot be read: {' '.join(str(error).split())}"])
            return {}
        # The file holds no mapping: it is damaged or of another version. The report leaves it out.
        return value if isinstance(value, dict) else {}

    def _add_unreadable(self, messages: Sequence[str]) -> None:
        self.unreadable += [message for message in messages if message not in self.unreadable]


def typed_command_with_hidden_secrets(command_record: Mapping[str, Any]) -> str:
    """Return the command that the user entered. Secret values of KEY=VALUE words are hidden."""
    argv_words = [str(word) for word in command_record.get("argv", [])]
    word_parts = [(word, *word.partition("=")) for word in argv_words]
    shown_words = [
        f"{key}={HIDDEN_VALUE}" if equals and SECRET_NAME.search(key) else word
        for word, key, equals, _ in word_parts
    ]
    # The first word is the program's path.
    return " ".join(["ortlaunch", *shown_words[1:]])


def finite_number_or_none(value: Any) -> float | None:
    """Return a finite number of a record, or None for any other value."""
    number = number_or_none(value)
    return None if number is None or not math.isfinite(number) else number
