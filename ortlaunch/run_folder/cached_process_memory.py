"""Bytes of a rank's interpreter and libraries, as the newest run of this environment measured them.

Each run on a CPU records them before its model's engine is built; plans and advice read them.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ortlaunch.base.cache import (
    cache_file_path_by_hashed_key,
    create_private_cache_folder_or_refuse,
)
from ortlaunch.base.errors import FileError
from ortlaunch.launch_plan import USUAL_PROCESS, ProcessMemory
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import read_json_or_raise_damaged, write_json_atomically

# A CUDA build of torch loads library files of 600 MiB more: a process took 998 MiB.
_CUDA_BUILD = USUAL_PROCESS._replace(files=700 << 20)


def cached_or_usual_process_memory(recipe: Recipe) -> ProcessMemory:
    """Return the bytes of a process with the libraries of the recipe's engine."""
    try:
        own_bytes, file_bytes = read_json_or_raise_damaged(_record_path(recipe), list)
        return ProcessMemory(int(own_bytes), int(file_bytes), is_measured=True)
    except (OSError, ValueError, TypeError, FileError):
        return USUAL_PROCESS if _torch_version().endswith("+cpu") else _CUDA_BUILD


def cache_process_memory_if_writable(recipe: Recipe, measured_memory: ProcessMemory) -> None:
    """Keep the bytes of this process for later plans; without effect if the cache is unwritable."""
    try:
        create_private_cache_folder_or_refuse("processes")
        write_json_atomically(_record_path(recipe), [measured_memory.own, measured_memory.files])
    # Plans have usual values then.
    except (OSError, FileError):
        return


def _record_path(recipe: Recipe) -> Path:
    """Return the file of the cache for everything that decides which libraries a rank loads."""
    library_name = "ort" if recipe.engine.name in ("ort", "auto") else "torch"
    return cache_file_path_by_hashed_key(
        "processes", [sys.prefix, _torch_version(), library_name, recipe.model.factory]
    )


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
