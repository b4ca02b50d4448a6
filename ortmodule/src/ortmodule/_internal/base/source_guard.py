"""Comparison of the sources of ORT and torch with those that a repair knows.

The registry reports each repair that is not applied. A function's name is `module:Class.function`,
with torch's own module, or with one inside onnxruntime.training.ortmodule (`__init__` is the
package itself). ORT has one last release, so its source is compared by a hash. Torch has many
releases, so only the text that a repair builds on is compared. DeepSpeed's sources are in
ortmodule/deepspeed/known_sources.py. Torch and ORT are imported only on use.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ortmodule._internal.native.extensions import ORT_VERSION

PACKAGE = "onnxruntime.training.ortmodule"
KnownSource = str | tuple[str, ...]
"""Of ORT the first digits of the sha256 of a function's source, from its `def` to its last line in
ONNX Runtime Training 1.19.2; of torch the texts that the source must contain."""
# Of the sha256 in hexadecimal: 64 bits, enough to detect a change.
_HASH_DIGITS = 16


def source_mismatch_text_or_empty(known_sources: Mapping[str, KnownSource]) -> str:
    """Return why a repair of these functions does not fit the installed packages; empty if it does."""
    changed_names = [
        name
        for name, texts in known_sources.items()
        if isinstance(texts, tuple)
        and not all(text in function_source_on_disk_or_empty(name) for text in texts)
    ]
    if changed_names:
        return f"the source of {', '.join(changed_names)} is not as in the torch that it is written for"
    hash_by_ort_name = {
        name: known for name, known in known_sources.items() if isinstance(known, str)
    }
    if not hash_by_ort_name:
        return ""
    import onnxruntime

    # A build for CUDA has a local version, such as 1.19.2+cu118.
    if onnxruntime.__version__.partition("+")[0] != ORT_VERSION:
        return (
            f"it is written for ONNX Runtime {ORT_VERSION}, and {onnxruntime.__version__} is "
            "installed"
        )
    changed_names = [
        name
        for name, known_hash in hash_by_ort_name.items()
        if short_source_hash(function_source_on_disk_or_empty(name)) != known_hash
    ]
    return (
        f"the source of {', '.join(changed_names)} is not that of {ORT_VERSION}"
        if changed_names
        else ""
    )


def owning_class_or_module(qualified_name: str) -> Any:
    """Return the class of a function, or its module if the name has no class."""
    module_name, _, class_name = qualified_name.partition(":")
    owner_module: Any = _import_module(module_name)
    return getattr(owner_module, class_name) if class_name else owner_module


@functools.cache
def function_source_on_disk_or_empty(qualified_name: str) -> str:
    """Return the source on disk of a function, from its `def` to its last line, or an empty string.

    The file is read, not the object, because a repair may already have replaced the object. The
    exception is a name that its module imports from another one, as torch's exporter does since
    2.9.
    """
    module_name, _, path_in_module = qualified_name.partition(":")
    try:
        node, lines = _syntax_tree_and_source_lines(module_name)
        if hasattr(_import_module(module_name), path_in_module) and path_in_module not in {
            getattr(child, "name", None) for child in node.body
        }:
            return inspect.getsource(getattr(_import_module(module_name), path_in_module))
        for name in path_in_module.split("."):
            node = next(child for child in node.body if getattr(child, "name", None) == name)
    except (ImportError, OSError, StopIteration):
        return ""
    # ast.get_source_segment would split the whole file each time: 1 s of a core for all names.
    return "\n".join(lines[node.lineno - 1 : node.end_lineno])[node.col_offset :]


def short_source_hash(source_text: str) -> str:
    """Return the first digits of the text's sha256."""
    return hashlib.sha256(source_text.encode()).hexdigest()[:_HASH_DIGITS]


@functools.cache
def _syntax_tree_and_source_lines(module_name: str) -> tuple[Any, list[str]]:
    text = inspect.getsource(_import_module(module_name))
    return ast.parse(text), text.split("\n")


def _import_module(module_name: str) -> ModuleType:
    ort_module_name = PACKAGE if module_name == "__init__" else f"{PACKAGE}.{module_name}"
    return importlib.import_module(
        module_name if module_name.startswith(("torch.", "onnxruntime.")) else ort_module_name
    )
