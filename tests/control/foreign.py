"""Configs of the Hugging Face Trainer to import, and the remarks of the report by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ortlaunch.importers import ImportedRecipe


def config(folder: Path, **keys: Any) -> Path:
    """Write a Trainer config with these keys and the required ones, and return its path.

    A key with the value "absent" is left out.
    """
    words = {
        "block_size": 64,
        "model_name_or_path": "here",
        "train_file": "a.txt",
        "learning_rate": 0.1,
        **keys,
    }
    path = folder / "config.json"
    path.write_text(
        json.dumps({name: value for name, value in words.items() if value != "absent"}, indent=1)
    )
    return path


def said(found: ImportedRecipe, where: str) -> dict[str, str]:
    """Return the text of each remark by key, of one list of the import report."""
    return {remark.key: remark.text for remark in getattr(found.import_report, where)}
