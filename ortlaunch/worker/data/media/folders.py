"""Folders of images or recordings, in the forms of torchvision's and Hugging Face's folders.

FOLDER/CLASS/FILE, or FOLDER/metadata.csv (.jsonl, .parquet) with the files' names in a column.
Either may be in FOLDER/SPLIT.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ortlaunch.base.cache import add_cache_note
from ortlaunch.worker.data.file_rows import DataError, MissingData, Row, read_file_rows

_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_FILES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".wav", ".webp")
_SPLITS = {
    "train",
    "training",
    "validation",
    "valid",
    "val",
    "dev",
    "test",
    "testing",
    "evaluation",
}


def metadata_file_or_class_files(data_folder: str, split: str) -> list[str]:
    """Return the metadata of a folder, or else the files of its classes, sorted by class and name.

    Args:
        data_folder: the folder.
        split: name of the sub-folder to read if all sub-folders are splits.

    Raises:
        DataError: the folder has neither of them, or a class has no files.
        MissingData: there is no such folder or split.
    """
    if not os.path.isdir(data_folder):
        raise MissingData(f"data.*.path: no folder {data_folder!r} (current folder: {os.getcwd()})")
    names = [name for name in sorted(os.listdir(data_folder)) if not name.startswith(".")]
    if metadata_paths := [os.path.join(data_folder, name) for name in names if name in _METADATA]:
        return metadata_paths[:1]
    classes = [name for name in names if os.path.isdir(os.path.join(data_folder, name))]
    if split in classes and {*classes} <= _SPLITS:
        return metadata_file_or_class_files(os.path.join(data_folder, split), split)
    if not {*classes} - _SPLITS:
        problem = f"{_METADATA[0]}, nor a sub-folder for each class, nor the split {split!r}"
        raise MissingData(
            f"{data_folder}: has neither {problem}; it has {', '.join(classes) or 'none'}"
        )
    return [
        path
        for name in classes
        for path in _media_paths_of_class_noting_other_files(os.path.join(data_folder, name))
    ]


def rows_of_metadata_or_class_files(paths: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of files of folders: of metadata its own, of any other file one."""
    for file_number, path in enumerate(paths, 1):
        folder, name = os.path.split(path)
        if name in _METADATA:
            yield from read_file_rows(path, name.rpartition(".")[2])
        else:
            values = {"file_name": name, "label": os.path.basename(folder)}
            yield Row(values, path, file_number / len(paths))


def _media_paths_of_class_noting_other_files(class_folder: str) -> list[str]:
    entries = [entry for entry in os.scandir(class_folder) if not entry.name.startswith(".")]
    paths = sorted(entry.path for entry in entries if entry.name.lower().endswith(_FILES))
    inner_folders = [f"{entry.name} is a folder in it; " for entry in entries if entry.is_dir()]
    if inner_folders or not paths:
        problem = f"is a class and has no files ({', '.join(_FILES)}) alone"
        raise DataError(
            f"{class_folder}: {problem}; {''.join(inner_folders[:1])}metadata.csv may name classes"
        )
    if len(paths) < len(entries):
        add_cache_note(
            f"{class_folder}: {len(entries) - len(paths):,} files are no images and are not read"
        )
    return paths
