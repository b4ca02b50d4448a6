"""Make `onnxruntime.training.ortmodule` 1.19.2 importable and correct on the installed torch.

The module owns every repair that the import of ORTModule needs; each one is applied only where
needed. No file is edited on disk, and torch stays unchanged for the user's code. The module must
not import the worker.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import sys
import types
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ortmodule._internal.base import custom_functions, repair_registry
from ortmodule._internal.base.patching import (
    ModuleView,
    hide_package_unless_loaded,
    set_environment_variables_temporarily,
)
from ortmodule._internal.base.repair_registry import Repair
from ortmodule._internal.errors import MissingDependency
from ortmodule._internal.native import cuda_libraries, extensions

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction

_ORTMODULE = "onnxruntime.training.ortmodule"


@functools.cache
def import_ortmodule_with_repairs_once() -> ModuleType:
    """Return the module `onnxruntime.training.ortmodule`, with the repairs that its import needs.

    Raises:
        MissingDependency: a package or extension is missing; has the command to type.
    """
    _require_built_extensions()
    repair_registry.apply_fitting_repairs_and_record_others_once(_BEFORE_IMPORT)
    ortmodule = _import_ortmodule_and_hook_deepspeed_import()
    repair_registry.apply_fitting_repairs_and_record_others_once(_AFTER_IMPORT)
    return ortmodule


# ------------------------------------------------------------------------ repairs before the import


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


# The old name of each module, and its name in torch 2.9 and later.
_MOVED_MODULES = {
    "torch.onnx._internal.jit_utils": "torch.onnx._internal.torchscript_exporter.jit_utils",
    "torch.onnx._globals": "torch.onnx._internal.torchscript_exporter._globals",
    "torch.onnx._type_utils": "torch.onnx._internal.torchscript_exporter._type_utils",
}


def restore_checkpoint_functions() -> bool:
    """Restore `checkpoint` of torch and DeepSpeed after a failed import of ORTModule.

    `import onnxruntime.training`, as for its FusedAdam, also imports ORTModule. On torch 2.9 and
    later that fails without an error, after `checkpoint` has been replaced. A second import would
    replace the replacement, which then passes its own arguments on to the layer.
    """
    restored_flags = [
        _undo_ort_checkpoint_replacement(name)
        for name in ("torch.utils.checkpoint", "deepspeed")
        if name in sys.modules
    ]
    # After the list, not in place of it: `any` would stop at the first one that was restored.
    return any(restored_flags)


def _undo_ort_checkpoint_replacement(patched_module_name: str) -> bool:
    module: Any = sys.modules[patched_module_name]
    module = (
        getattr(module, "checkpointing", None) if patched_module_name == "deepspeed" else module
    )
    checkpoint_before: Any = getattr(module, "checkpoint", None)
    unwrapped_checkpoint = checkpoint_before
    # ORT's replacement is a closure over the original function.
    while getattr(unwrapped_checkpoint, "__qualname__", "").startswith(
        "_override_gradient_checkpoint."
    ):
        unwrapped_checkpoint = inspect.getclosurevars(unwrapped_checkpoint).nonlocals[
            "original_checkpoint"
        ]
    if unwrapped_checkpoint is not checkpoint_before:
        module.checkpoint = unwrapped_checkpoint
    return unwrapped_checkpoint is not checkpoint_before


def load_cuda_libraries() -> bool:
    """Load the CUDA wheel's CUDA 11 and cuDNN 8 libraries, which torch's wheels do not include."""
    import torch

    are_needed = (
        extensions.installed_ort_package_name_or_refuse() == "onnxruntime-training"
        and torch.cuda.is_available()
    )
    if are_needed:
        cuda_libraries.load_installed_cuda_libraries()
    return are_needed


# ------------------------------------------------------------------------- repairs after the import


def load_cached_extensions() -> bool:
    """Let ORT load its C++ extensions from the cache (every torch).

    ORT searches for its extensions only inside site-packages.
    """
    ortmodule: Any = importlib.import_module(_ORTMODULE)
    package = importlib.import_module(f"{_ORTMODULE}.torch_cpp_extensions")
    package.__path__.insert(0, str(extensions.extension_cache_folder()))
    for name in extensions.required_extension_names():
        if not (name == extensions.INTEROP and extensions.reason_interop_is_unbuildable_or_empty()):
            _load_extension_or_refuse(f"{package.__name__}.{name}")
    # ORT records this error at its import and would raise it with the first ORTModule.
    if "extensions were not detected" in str(ortmodule._FALLBACK_INIT_EXCEPTION):
        ortmodule._FALLBACK_INIT_EXCEPTION = None
    return True


def disable_custom_autograd() -> bool:
    """Turn custom autograd functions off if torch_interop_utils could not be built for this torch.

    The replacement module has only the names that ORT uses. If it had every attribute, the lazy
    imports of transformers would mistake it for other modules.
    """
    if not extensions.reason_interop_is_unbuildable_or_empty():
        return False
    package = importlib.import_module(f"{_ORTMODULE}.torch_cpp_extensions")
    stand_in: Any = ModuleType(f"{package.__name__}.torch_interop_utils")
    stand_in.get_custom_function_forward_runner = custom_functions.raise_interop_extension_missing
    stand_in.get_custom_function_backward_runner = custom_functions.raise_interop_extension_missing
    stand_in.clear_all_grad_fns = lambda: None
    sys.modules[stand_in.__name__] = package.torch_interop_utils = stand_in  # type: ignore[attr-defined]
    # ORT reads the variable when it imports this module.
    with set_environment_variables_temporarily(ORTMODULE_ENABLE_CUSTOM_AUTOGRAD="0"):
        importlib.import_module(f"{_ORTMODULE}._custom_autograd_function")
    return True


def skip_padding_hook() -> bool:
    """Skip ORT's marking of padding on CUDA, which needs torch_interop_utils."""
    if not extensions.reason_interop_is_unbuildable_or_empty():
        return False
    manager = importlib.import_module(
        f"{_ORTMODULE}._graph_transition_manager"
    ).GraphTransitionManager
    manager._add_check_embedding_sparsity_hook = staticmethod(lambda *args: [])
    return True


def keep_booleans_of_autograd_functions() -> bool:
    """Repair boolean arguments and results of custom autograd functions (every torch).

    The functions get booleans as uint8, and cannot return any.
    """
    if extensions.reason_interop_is_unbuildable_or_empty():
        return False
    custom_functions.patch_ort_export_of_custom_functions()
    return True


def import_ort_hooks_without_warning() -> None:
    """Silence ORT's warning that its ZeRO 3 hooks do not support DeepSpeed 0.16.

    A user cannot act on that warning. Where DeepSpeed is not imported yet, the hooks do not load it.
    """
    with warnings.catch_warnings(), hide_package_unless_loaded("deepspeed"):
        warnings.filterwarnings("ignore", message="DeepSpeed import error")
        importlib.import_module("onnxruntime.training.utils.hooks")


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


def export_chunks_with_sizes() -> None:
    """Replace ORT's export of `chunk` (every torch).

    With ORT's, the exporter uses the first batch's sizes as constants.
    """
    forms = importlib.import_module("ortmodule._internal.tracing.part_forms")
    _ort_symbolic_registry().register("ConstantChunk", "prim", forms.constant_chunk)


def disable_global_forms() -> None:
    """Do not let ORT register its forms of operators for all exports of the process (every torch).

    With them an export by the user has operators that only ONNX Runtime Training runs, such as ATen
    for an Embedding. ORT's own export uses them (operator_table.wrap_export_with_exact_forms_without_fast_path).
    """
    _ort_symbolic_registry().register_all = lambda opset: None


def _ort_symbolic_registry() -> Any:
    module = importlib.import_module(f"{_ORTMODULE}._custom_op_symbolic_registry")
    return module.CustomOpSymbolicRegistry


def skip_nvtx_without_cuda() -> bool:
    """Hide `torch.cuda.nvtx` from ORT on CPU-only torch builds where it raises.

    ORT marks ranges in every forward pass.
    """
    import torch

    if torch.cuda.is_available() or _cuda_nvtx_works():
        return False
    # ORT checks hasattr(torch.cuda.nvtx, "range_push") first, so it skips an nvtx without names.
    helpers: Any = importlib.import_module("onnxruntime.training.utils.torch_profile_utils")
    helpers.torch = ModuleView(torch, cuda=ModuleView(torch.cuda, nvtx=types.SimpleNamespace()))
    return True


def _is_default_exporter_dynamo() -> bool:
    """Return whether `torch.onnx.export` defaults to the dynamo exporter (torch 2.9 and later).

    ORT cannot read the graphs of that exporter.
    """
    import torch

    return inspect.signature(torch.onnx.export).parameters["dynamo"].default is True


def _interop_is_refused() -> bool:
    return bool(extensions.reason_interop_is_unbuildable_or_empty())


_CUSTOM_EXPORT = "_custom_autograd_function_exporter:_default_export"
_SDPA = "torch.onnx.symbolic_opset14:scaled_dot_product_attention"
_BEFORE_IMPORT: tuple[Repair, ...] = (
    Repair("alias_moved_exporter_modules", install=alias_moved_exporter_modules),
    Repair("restore_checkpoint_functions", install=restore_checkpoint_functions),
    Repair("load_cuda_libraries", install=load_cuda_libraries),
)
# Repairs with only a name are steps of an export (pipeline.py), for every torch.
_AFTER_IMPORT: tuple[Repair, ...] = (
    Repair("load_cached_extensions", install=load_cached_extensions),
    Repair("disable_custom_autograd", install=disable_custom_autograd),
    Repair("export_with_torchscript", install=_is_default_exporter_dynamo),
    Repair("refuse_custom_backward", install=_interop_is_refused),
    Repair("skip_padding_hook", install=skip_padding_hook),
    Repair(
        "keep_booleans_of_autograd_functions",
        (_CUSTOM_EXPORT,),
        keep_booleans_of_autograd_functions,
    ),
    Repair("export_exact_forms", install=disable_global_forms),
    Repair("export_sdpa_dropout", (_SDPA,)),
    Repair("keep_constants_apart"),
    Repair("trace_swapped_weights"),
    Repair("propagate_inplace_views"),
    Repair("stop_gradient_under_no_grad"),
    Repair("infer_shapes_without_weights"),
    Repair("silence_export_warnings", install=import_ort_hooks_without_warning),
    Repair("restore_convolution_symbolics", install=restore_convolution_symbolics),
    Repair("export_chunks_with_sizes", install=export_chunks_with_sizes),
    Repair("skip_nvtx_without_cuda", install=skip_nvtx_without_cuda),
)


# -------------------------------------------------------------------------------------- their parts


def _import_ortmodule_and_hook_deepspeed_import() -> ModuleType:
    try:
        # ORT replaces DeepSpeed's `checkpoint` too, and for that would import DeepSpeed.
        with hide_package_unless_loaded("deepspeed"):
            ortmodule = importlib.import_module(_ORTMODULE)
    except ImportError as error:
        pip_extra = extensions.EXTRA_BY_PACKAGE[extensions.installed_ort_package_name_or_refuse()]
        raise MissingDependency(
            f"ONNX Runtime Training does not import: {error}",
            f'pip install "ortmodule[{pip_extra}]"',
        ) from error
    if _CHECKPOINTING not in sys.modules:
        sys.meta_path.insert(
            0, _DeepSpeedCheckpointReplacer(ortmodule._override_gradient_checkpoint)
        )
    return ortmodule


_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"


class _DeepSpeedCheckpointReplacer(importlib.abc.MetaPathFinder):
    """Replaces DeepSpeed's `checkpoint` once DeepSpeed is imported, as ORT does at its own import."""

    def __init__(self, replace_checkpoint: AnyFunction) -> None:
        self.override = replace_checkpoint

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return the spec of DeepSpeed's module, whose loader also replaces; else None."""
        if name != _CHECKPOINTING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        original_exec = loader.exec_module

        def load_and_replace(module: Any) -> None:
            original_exec(module)
            module.checkpoint = self.override(module.checkpoint)

        loader.exec_module = load_and_replace
        return spec


def _load_extension_or_refuse(module_name: str) -> None:
    try:
        importlib.import_module(module_name)
    except ImportError as error:
        folder = extensions.extension_cache_folder()
        raise MissingDependency(
            f"the built extension does not load: {error}",
            f"rm -r {str(folder)!r} && {extensions.SETUP_COMMAND}",
        ) from error


def _require_built_extensions() -> None:
    if missing := extensions.missing_or_damaged_buildable_extension_names():
        missing_reason = "; ".join(
            [
                f"{', '.join(missing)} not in {extensions.extension_cache_folder()}",
                *extensions.descriptions_of_extensions_changed_since_build(),
            ]
        )
        raise MissingDependency(
            f"ORT's torch extensions are not built for this stack ({missing_reason})",
            extensions.SETUP_COMMAND,
        )


def _cuda_nvtx_works() -> bool:
    import torch

    try:
        torch.cuda.nvtx.range_push("ortmodule")
        torch.cuda.nvtx.range_pop()
    except RuntimeError:
        return False
    return True
