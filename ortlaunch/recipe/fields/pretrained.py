"""The config.json of a pretrained model on this host: from its folder, or from the hub's cache.

Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from ortlaunch.recipe.fields.section import MAX_COUNT


def read_local_model_config_or_none(model_name: str) -> dict[str, Any] | None:
    """Return the model's config, or None where it is not on this host or is no JSON object."""
    folder = (
        Path(model_name)
        if Path(model_name).is_dir()
        else _cached_hub_snapshot_folder_or_none(model_name)
    )
    with contextlib.suppress(OSError, ValueError):
        config = (
            json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
        )
        return config if isinstance(config, dict) and _has_only_positive_sizes(config) else None
    return None


def _has_only_positive_sizes(model_config: dict[str, Any]) -> bool:
    """Return whether all sizes are positive integers; a damaged file would give wrong estimates."""
    sizes = [
        value
        for key, value in model_config.items()
        if key.endswith(("_size", "_layers", "_heads")) and value is not None
    ]
    return all(isinstance(value, int) and 0 < value <= MAX_COUNT for value in sizes)


def _cached_hub_snapshot_folder_or_none(model_name: str) -> Path | None:
    """Return the cached snapshot of a hub repository, NAME or NAME@REVISION, or None."""
    repository, _, revision = model_name.partition("@")
    # The order of precedence that huggingface_hub documents.
    huggingface_home = (
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    )
    hub_cache = Path(os.environ.get("HF_HUB_CACHE") or Path(huggingface_home) / "hub").expanduser()
    repository_folder = hub_cache / f"models--{repository.replace('/', '--')}"
    if revision and (repository_folder / "snapshots" / revision).is_dir():
        return repository_folder / "snapshots" / revision
    with contextlib.suppress(OSError, ValueError):
        # It has the commit that the branch, by default main, had at the last download.
        return (
            repository_folder
            / "snapshots"
            / (repository_folder / "refs" / (revision or "main")).read_text().strip()
        )
    return None
