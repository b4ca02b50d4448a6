"""The config.json of a pretrained model on this host: from its folder, or from the hub's cache.

Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ortlaunch.recipe.fields.section import MOST


def config_of(name: str) -> dict[str, Any] | None:
    """Return the model's config, or None where it is not on this host or is no JSON object."""
    folder = Path(name) if Path(name).is_dir() else _snapshot(name)
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
        return found if isinstance(found, dict) and _counts(found) else None
    return None


def _counts(config: dict[str, Any]) -> bool:
    """Return whether all sizes are positive integers; a damaged file would give wrong estimates."""
    sizes = [
        value
        for key, value in config.items()
        if key.endswith(("_size", "_layers", "_heads")) and value is not None
    ]
    return all(isinstance(value, int) and 0 < value <= MOST for value in sizes)


def _snapshot(name: str) -> Path | None:
    """Return the cached snapshot of a hub repository, NAME or NAME@REVISION, or None."""
    repository, _, revision = name.partition("@")
    # The order of precedence that huggingface_hub documents.
    home = (
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    model = cache / f"models--{repository.replace('/', '--')}"
    if revision and (model / "snapshots" / revision).is_dir():
        return model / "snapshots" / revision
    with contextlib.suppress(OSError, ValueError):
        # It has the commit that the branch, by default main, had at the last download.
        return model / "snapshots" / (model / "refs" / (revision or "main")).read_text().strip()
    return None
