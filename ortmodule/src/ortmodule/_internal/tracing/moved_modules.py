"""Names of the TorchScript exporter that torch 2.9 has moved, for ORT 1.19, which imports them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from ortmodule._internal.base.repair_registry import repair

# The old name of each module, and its name in torch 2.9 and later.
_MOVED_MODULES = {
    "torch.onnx._internal.jit_utils": "torch.onnx._internal.torchscript_exporter.jit_utils",
    "torch.onnx._globals": "torch.onnx._internal.torchscript_exporter._globals",
    "torch.onnx._type_utils": "torch.onnx._internal.torchscript_exporter._type_utils",
}


@repair(
    "alias_moved_exporter_modules",
    "before import",
    10,
    fault="On torch 2.9 and later ORTModule does not import: the exporter's private modules have "
    "other names.",
    example="tracing/test_compat.py::test_each_check_passes[import]",
)
def alias_moved_exporter_modules() -> bool:
    """Restore the old names of the TorchScript exporter's private modules, which ORT 1.19 imports.

    Torch 2.9 and later have moved these modules.
    """
    moved_names = [name for name in _MOVED_MODULES if importlib.util.find_spec(name) is None]
    for name in moved_names:
        module = importlib.import_module(_MOVED_MODULES[name])
        parent, _, leaf = name.rpartition(".")
        sys.modules[name] = module
        setattr(importlib.import_module(parent), leaf, module)
    return bool(moved_names)


@repair(
    "restore_convolution_symbolics",
    "after import",
    90,
    fault="On torch 2.9 and later every convolution ends the export.",
    example="tracing/test_compat.py::test_each_check_passes[convolution]",
)
def restore_convolution_symbolics() -> bool:
    """Restore the names by which ORT's export of a convolution gets the exporter's (torch 2.9+)."""
    public_module: Any = importlib.import_module("torch.onnx.symbolic_opset9")
    lost_names = [
        name for name in ("_convolution", "_convolution_mode") if not hasattr(public_module, name)
    ]
    for name in lost_names:
        moved_module = importlib.import_module(
            "torch.onnx._internal.torchscript_exporter.symbolic_opset9"
        )
        setattr(public_module, name, getattr(moved_module, name))
    return bool(lost_names)
