"""resume.json: the checkpoint from which a run last started, written by the control side for ranks.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ortlaunch.base.errors import DamagedFile
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged, write_json_atomically
from ortlaunch.run_folder.records import json_values_of_record, record_from_json_values


@dataclass(frozen=True)
class ResumeRecord:
    """The checkpoint at which the newest start began, and all changes since it was written."""

    choice: str
    """`--resume` as it was typed: `auto`, `never`, a step or a folder."""
    allow: tuple[str, ...]
    """Each `--allow`."""
    checkpoint: str | None
    """Folder of the checkpoint; null: the run began at step 0."""
    step: int
    """Optimizer steps of that checkpoint."""
    exact: bool
    """Whether this step and no earlier one was requested."""
    source: str | None
    """The folder of the run's first checkpoint, if it is another run's."""
    skipped: tuple[str, ...]
    """Checkpoints that could not be used, each with the reason, as text."""
    changes: tuple[str, ...]
    """One line of text for each change."""

    @classmethod
    def read_or_from_the_beginning(cls, run: RunDir) -> ResumeRecord:
        """Return the record of a run folder; `FROM_THE_BEGINNING` if it has none.

        Raises:
            DamagedFile: the file cannot be read.
        """
        if not run.resume.exists():
            return FROM_THE_BEGINNING
        try:
            return record_from_json_values(cls, read_json_or_raise_damaged(run.resume))
        # Valid JSON with a missing or mistyped field.
        except TypeError as error:
            raise DamagedFile(f"{run.resume}: is damaged: {error}") from None

    def write(self, run: RunDir) -> None:
        """Write the record to a run folder."""
        write_json_atomically(run.resume, json_values_of_record(self))


# Stands for a missing file, so that readers need no case for a run that never resumed.
FROM_THE_BEGINNING = ResumeRecord("auto", (), None, 0, False, None, (), ())
