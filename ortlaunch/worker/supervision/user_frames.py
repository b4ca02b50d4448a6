"""Frames of a traceback in the user's own files: the line that raised, and a short traceback.

Standard library only, because a rank that fails early has nothing else.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator

from ortlaunch.units import count_with_noun
from ortlaunch.worker.supervision.module_copies import is_own

_FRAME = re.compile(r'  File "([^"]+)", line \d+')


def raised_at(error: BaseException) -> str | None:
    """Return `file:line` of the last frame in the user's files, or None.

    Errors that this one was raised from count, too.
    """
    for each in _chain(error):
        for frame in reversed(traceback.extract_tb(each.__traceback__)):
            if is_own(frame.filename):
                below = os.path.relpath(frame.filename)
                return f"{frame.filename if below.startswith(os.pardir) else below}:{frame.lineno}"
    return None


def described(error: Exception) -> str:
    """Return an error's type, message and line in the user's files.

    For an error without a message, the source line that raised it replaces the message.
    """
    own = raised_at(error)
    kind = type(error).__name__
    at = f", at {own}" if own else ""
    if str(error):
        return f"{kind}: {error}{at}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{kind} in {os.path.basename(frame.filename)}, {frame.name}: {frame.line}{at}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        # The same order as Python prints: an explicit cause, else the context.
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def folded(text: str) -> str:
    """Return a traceback in which frames outside the user's files are only counted."""
    kept = list[str]()
    hidden = 0
    own = True
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            own = is_own(frame[1])
            hidden += not own
        # Any other line than the source code of the frame above.
        elif not line.startswith("    "):
            own = True
        if own:
            kept += (
                [f"  ... {count_with_noun(hidden, 'frame')} of ortlaunch and of packages"]
                if hidden
                else []
            )
            kept.append(line)
            hidden = 0
    return "\n".join(kept)
