"""Bytes of a rank's interpreter and libraries, as the newest run of this environment measured them.

Each run on a CPU records them before its model's engine is built; plans and advice read them.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ortlaunch.cache import cache_folder, cache_root
from ortlaunch.errors import FileError
from ortlaunch.json_types import Json
from ortlaunch.launch_plan import USUAL_PROCESS, ProcessMemory
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import write_json

# A CUDA build of torch loads library files of 600 MiB more: a process took 998 MiB.
_CUDA_BUILD = USUAL_PROCESS._replace(files=700 << 20)


def process_memory(recipe: Recipe) -> ProcessMemory:
    """Return the bytes of a process with the libraries of the recipe's engine."""
    try:
        own, files = _recorded()[_environment(recipe)]
        return ProcessMemory(int(own), int(files), is_measured=True)
    except (ValueError, KeyError, TypeError, FileError):
        return USUAL_PROCESS if _torch_version().endswith("+cpu") else _CUDA_BUILD


def record_process_memory(recipe: Recipe, memory: ProcessMemory) -> None:
    """Keep the bytes of this process for later plans; without effect if the cache is unwritable."""
    try:
        cache_folder()
        write_json(_file(), {**_recorded(), _environment(recipe): [memory.own, memory.files]})
    # Plans have usual values then.
    except (OSError, FileError):
        return


def _recorded() -> Json:
    try:
        values = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _file() -> Path:
    return cache_root() / "process_memory.json"


def _environment(recipe: Recipe) -> str:
    """Return everything that decides which libraries a rank loads, as a key."""
    engine = "ort" if recipe.engine.name in ("ort", "auto") else "torch"
    own = recipe.model.factory or ""
    return f"{sys.prefix} torch {_torch_version()} {engine} {own}".rstrip()


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
