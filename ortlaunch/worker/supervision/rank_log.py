"""One stream of a rank's output in its log file.

A log that cannot be written does not end the rank; it is reported once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import BinaryIO


class RankLog:
    """A log file, open while the context is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._is_gap_reported = False

    def __enter__(self) -> RankLog:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that the log is complete when its writer is killed.
            self._file = open(self._path, "ab", buffering=0)
            # Opening an existing file does not change its time, which shows that this rank began.
            os.utime(self._path)
        except OSError as error:
            self._print_once_that_log_is_incomplete(error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def append_bytes_disk_accepts(self, output_bytes: bytes) -> None:
        """Append the data; a part that the disk rejects is lost."""
        try:
            while self._file and output_bytes:
                output_bytes = output_bytes[self._file.write(output_bytes) :]
        except OSError as error:
            self._print_once_that_log_is_incomplete(error)

    def _print_once_that_log_is_incomplete(self, error: OSError) -> None:
        if not self._is_gap_reported:
            self._is_gap_reported = True
            print(
                f"ortlaunch: {self._path} is not complete: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )
