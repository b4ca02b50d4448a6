"""The config.json of a pretrained model that lies here: in its folder, or in the hub's cache.
Nothing is downloaded."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ortlaunch.recipe.fields.section import MOST


def config_of(name: str) -> dict[str, Any] | None:
    """Fields of the model's config, or None where it is not on this host or is no JSON object."""
    folder = Path(name) if Path(name).is_dir() else _snapshot(name)
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
        return found if isinstance(found, dict) and _counts(found) else None
    return None


def _counts(config: dict[str, Any]) -> bool:
    """Whether its sizes are sizes; a damaged file would be counted wrongly, or not at all."""
    sizes = [
        value
        for key, value in config.items()
        if key.endswith(("_size", "_layers", "_heads")) and value is not None
    ]
    return all(isinstance(value, int) and 0 < value <= MOST for value in sizes)


def _snapshot(name: str) -> Path | None:
    """Where huggingface_hub keeps what the main branch of a repository was when it was last asked
    for."""
    home = (
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    model = cache / f"models--{name.replace('/', '--')}"
    with contextlib.suppress(OSError, ValueError):
        return model / "snapshots" / (model / "refs" / "main").read_text().strip()
    return None
