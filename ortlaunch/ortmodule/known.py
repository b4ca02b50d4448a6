"""ORTModule 1.19.2's functions by name: the source that the repairs know, and the class to repair.

A name is `module:Class.function` inside onnxruntime.training.ortmodule; the module `__init__` is the package itself.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
from types import ModuleType
from typing import Any

PACKAGE = "onnxruntime.training.ortmodule"
TRANSITION = "_graph_transition_manager:GraphTransitionManager"
PROCESSED = "_graph_transition_manager:PostExportProcessedModelInfo"
TRAINING = "_training_manager:TrainingManager"
MANAGER = "_graph_execution_manager:GraphExecutionManager"
EVALUATION = "_inference_manager:InferenceManager"

# The first 16 digits of the sha256 of the source, from its `def` to its last line, in ONNX Runtime Training 1.19.2.
KNOWN = {
    f"{TRANSITION}.get_post_processed_model": "a766fd8849dbdd15",
    f"{TRANSITION}._export_model": "c78321fdd45b86ef",
    f"{TRANSITION}._get_exported_model": "dec39cba4428f95e",
    f"{TRANSITION}._add_check_label_sparsity_hook": "e99a910898fcadc0",
    f"{PROCESSED}.restore_outputs": "faecc5bfae8ec00d",
    f"{TRAINING}.forward": "e4a9f9b107877f89",
    f"{TRAINING}._create_autofunction_class": "0028d11175495ec4",
    f"{TRAINING}._build_graph": "f83f91604f964faf",
    f"{TRAINING}._create_execution_agent": "d25d6cd3c6333ed3",
    f"{EVALUATION}.forward": "1f8e3538efd4c23d",
    f"{MANAGER}.__getstate__": "8c59e5cbc2348a1c",
    "_io:parse_outputs_for_onnx_export_and_extract_schema": "c83275c7f572b599",
    "__init__:_override_gradient_checkpoint": "cec15e65a7037fcf",
    "_mem_efficient_grad_mgmt:post_processing_enable_mem_efficient_training": "3244fee3a0d1c060",
    "options:_RuntimeOptions.memory_optimizer_is_enabled": "b490d1ca93ec18c7",
}


def owner(name: str) -> Any:
    """The class, or where the name has none the module, that a function belongs to."""
    module, _, path = name.partition(":")
    found: Any = _module(module)
    return getattr(found, path) if path else found


@functools.cache
def digest(function: str) -> str:
    """The same digits of the source on disk of a function of ORTModule's; empty where there is none."""
    module, _, path = function.partition(":")
    try:
        text = inspect.getsource(_module(module))
        node: Any = ast.parse(text)
        for name in path.split("."):
            node = next(child for child in node.body if getattr(child, "name", None) == name)
    except (ImportError, OSError, StopIteration):
        return ""
    return hashlib.sha256(str(ast.get_source_segment(text, node)).encode()).hexdigest()[:16]


def _module(name: str) -> ModuleType:
    return importlib.import_module(PACKAGE if name == "__init__" else f"{PACKAGE}.{name}")
