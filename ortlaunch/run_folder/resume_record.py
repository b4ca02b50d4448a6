"""resume.json: where the newest start of a run began; the control side writes it, ranks read it.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ortlaunch.errors import DamagedFile
from ortlaunch.run_folder.folder import RunDir, read_json, write_json
from ortlaunch.run_folder.records import as_json, from_json


@dataclass(frozen=True)
class ResumeRecord:
    """Where the newest start began, and what had changed since that checkpoint was written."""

    choice: str
    """`--resume` as it was typed: `auto`, `never`, a step or a folder."""
    allow: tuple[str, ...]
    """Each `--allow`."""
    checkpoint: str | None
    """Folder of the checkpoint; null: the run began at step 0."""
    step: int
    """Of that checkpoint."""
    exact: bool
    """Whether this step and no earlier one was requested."""
    source: str | None
    """Where the run folder's first checkpoint came from, if that was another folder."""
    skipped: tuple[str, ...]
    """Checkpoints that could not be used, each with the reason, for a person."""
    changes: tuple[str, ...]
    """A line for each change, for a person."""

    @classmethod
    def read(cls, run: RunDir) -> ResumeRecord:
        """The record of a run folder; `FROM_THE_BEGINNING` where it has none.

        Raises:
            DamagedFile: the file cannot be read.
        """
        if not run.resume.exists():
            return FROM_THE_BEGINNING
        try:
            return from_json(cls, read_json(run.resume))
        except TypeError as error:
            raise DamagedFile(f"{run.resume}: is damaged: {error}") from None

    def write(self, run: RunDir) -> None:
        """Replace the record of a run folder."""
        write_json(run.resume, as_json(self))


FROM_THE_BEGINNING = ResumeRecord("auto", (), None, 0, False, None, (), ())
