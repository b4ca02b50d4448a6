"""A config of Trainer's to import, and what the account says of a key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ortlaunch.other_tools import Imported


def config(folder: Path, **keys: Any) -> Path:
    """A config of Trainer's, of these keys beside what a recipe must have."""
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


def said(found: Imported, where: str) -> dict[str, str]:
    """Key -> text, of one list of the account."""
    return {remark.key: remark.text for remark in getattr(found.account, where)}
