"""Where ortlaunch keeps what is made once: built extensions, trained tokenizers, tokenized corpora.

`$ORTLAUNCH_CACHE`, else `$XDG_CACHE_HOME/ortlaunch`, else `~/.cache/ortlaunch`. Standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """The cache folder; not created here."""
    own = os.environ.get("ORTLAUNCH_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "ortlaunch"
