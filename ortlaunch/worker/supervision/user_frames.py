"""Frames of a traceback in the user's own files: the line that raised, and a short traceback.

Standard library only, because a rank that fails early has nothing else.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator

from ortlaunch.base.units import count_with_noun
from ortlaunch.worker.supervision.module_copies import is_user_file

_FRAME = re.compile(r'  File "([^"]+)", line \d+')


def last_user_source_location_or_none(error: BaseException) -> str | None:
    """Return `file:line` of the last frame in the user's files, or None.

    Errors that this one was raised from count, too.
    """
    for chained_error in _error_chain(error):
        for frame in reversed(traceback.extract_tb(chained_error.__traceback__)):
            if is_user_file(frame.filename):
                relative_path = os.path.relpath(frame.filename)
                return f"{frame.filename if relative_path.startswith(os.pardir) else relative_path}:{frame.lineno}"
    return None


def error_type_message_and_location(error: Exception) -> str:
    """Return an error's type, message and line in the user's files.

    For an error without a message, the source line that raised it replaces the message.
    """
    user_location = last_user_source_location_or_none(error)
    error_type = type(error).__name__
    location_text = f", at {user_location}" if user_location else ""
    if str(error):
        return f"{error_type}: {error}{location_text}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{error_type} in {os.path.basename(frame.filename)}, {frame.name}: {frame.line}{location_text}"


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        # The same order as Python prints: an explicit cause, else the context.
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def traceback_with_foreign_frames_counted(traceback_text: str) -> str:
    """Return a traceback in which frames outside the user's files are only counted."""
    shown_lines = list[str]()
    hidden_frames = 0
    is_user_frame = True
    for line in traceback_text.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            is_user_frame = is_user_file(frame[1])
            hidden_frames += not is_user_frame
        # Any other line than the source code of the frame above.
        elif not line.startswith("    "):
            is_user_frame = True
        if is_user_frame:
            shown_lines += (
                [f"  ... {count_with_noun(hidden_frames, 'frame')} of ortlaunch and of packages"]
                if hidden_frames
                else []
            )
            shown_lines.append(line)
            hidden_frames = 0
    return "\n".join(shown_lines)
