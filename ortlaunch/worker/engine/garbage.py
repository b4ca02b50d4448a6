"""When a rank looks for garbage: rarely while libraries load, and afterwards not in what they left.

Every look goes through all that is there, and an eighth of a start went into looks that found next to nothing.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
_RARELY = 50_000  # objects between two looks


def look_rarely() -> None:
    """Until `look_as_usual`."""
    gc.set_threshold(_RARELY)


def look_as_usual() -> None:
    """Collect once, then leave out all that is there now: libraries and the session, which stay to the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_USUAL)
