"""Sources of ORT and torch that repairs know; a repair of another source is not applied.

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
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ortmodule._internal.native.extensions import ORT_VERSION

PACKAGE = "onnxruntime.training.ortmodule"
TRANSITION = "_graph_transition_manager:GraphTransitionManager"
PROCESSED = "_graph_transition_manager:PostExportProcessedModelInfo"
TRAINING = "_training_manager:TrainingManager"
MANAGER = "_graph_execution_manager:GraphExecutionManager"
SHAPES = "onnxruntime.tools.symbolic_shape_infer:SymbolicShapeInference"
EVALUATION = "_inference_manager:InferenceManager"

# The first 16 digits of the sha256 of the source, from its `def` to its last line, in ONNX Runtime
# Training 1.19.2.
KNOWN_SOURCE_HASHES = {
    f"{TRANSITION}.get_post_processed_model": "a766fd8849dbdd15",
    f"{TRANSITION}._export_model": "c78321fdd45b86ef",
    f"{TRANSITION}._get_exported_model": "dec39cba4428f95e",
    f"{TRANSITION}._add_check_label_sparsity_hook": "e99a910898fcadc0",
    f"{SHAPES}._broadcast_shapes": "8d6ef97161c5555a",
    f"{SHAPES}._check_merged_dims": "5e2c03720d3c04f4",
    f"{SHAPES}._infer_PythonOp": "31c2c03f6dede5b9",
    f"{SHAPES}._onnx_infer_single_node": "676f5d33dee7ee1b",
    f"{SHAPES}._infer_Slice": "321394f15641126c",
    f"{SHAPES}._infer_Split_Common": "c475321ced0d9214",
    f"{SHAPES}._get_int_or_float_values": "676b3db4154bcd1f",
    f"{SHAPES}._infer_aten_upsample": "9eb5016911b439f2",
    f"{PROCESSED}.restore_outputs": "faecc5bfae8ec00d",
    f"{TRAINING}.forward": "e4a9f9b107877f89",
    f"{TRAINING}._create_autofunction_class": "0028d11175495ec4",
    f"{TRAINING}._build_graph": "f83f91604f964faf",
    f"{TRAINING}._create_execution_agent": "d25d6cd3c6333ed3",
    f"{EVALUATION}.forward": "1f8e3538efd4c23d",
    f"{MANAGER}.__getstate__": "8c59e5cbc2348a1c",
    "_utils:patch_torch_module_ort_forward_method": "1367e8c025932ee9",
    "_io:parse_outputs_for_onnx_export_and_extract_schema": "c83275c7f572b599",
    "_custom_autograd_function_exporter:_default_export": "aa1d3d1bf6199e03",
    "__init__:_override_gradient_checkpoint": "cec15e65a7037fcf",
    "_mem_efficient_grad_mgmt:post_processing_enable_mem_efficient_training": "3244fee3a0d1c060",
    "_logger:_suppress_os_stream_output": "4ae7fde249f21bb1",
    "options:_RuntimeOptions.memory_optimizer_is_enabled": "b490d1ca93ec18c7",
}

# Torch's functions, and texts that their source must contain.
TORCH_SOURCE_TEXTS = {
    "torch.nn.functional:cross_entropy": ("torch._C._nn.cross_entropy_loss(",),
    "torch.nn.modules.batchnorm:_BatchNorm.forward": ("F.batch_norm(",),
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator": ("yield",),
    "torch.utils.checkpoint:checkpoint": (
        "CheckpointFunction.apply(function, preserve, *args)",
        "_checkpoint_without_reentrant_generator(",
    ),
    "torch.onnx.symbolic_opset14:scaled_dot_product_attention": (
        'g.op(\n            "Dropout",\n',
    ),
}
# Of the sha256 in hexadecimal: 64 bits, enough to detect a change.
_HASH_DIGITS = 16


def source_mismatch_text_or_empty(qualified_function_names: Sequence[str]) -> str:
    """Return why a repair of these functions does not fit the installed packages; empty if it does."""
    torch_names = [name for name in qualified_function_names if name.startswith("torch.")]
    changed_names = [
        name
        for name in torch_names
        if not all(
            text in function_source_on_disk_or_empty(name) for text in TORCH_SOURCE_TEXTS[name]
        )
    ]
    if changed_names:
        return f"the source of {', '.join(changed_names)} is not as in the torch that it is written for"
    ort_names = [name for name in qualified_function_names if name not in torch_names]
    if not ort_names:
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
        for name in ort_names
        if short_source_hash(function_source_on_disk_or_empty(name)) != KNOWN_SOURCE_HASHES[name]
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
