"""Loading of ORT's C++ extensions and of CUDA's libraries, and ORTModule where one is missing."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from typing import Any

from ortmodule._internal.base import custom_functions
from ortmodule._internal.base.patching import ModuleView, set_environment_variables_temporarily
from ortmodule._internal.base.repair_registry import TRANSITION, repair
from ortmodule._internal.base.source_guard import PACKAGE, owning_class_or_module
from ortmodule._internal.errors import MissingDependency
from ortmodule._internal.native import cuda_libraries, extensions


@repair(
    "load_cuda_libraries",
    "before import",
    30,
    fault="The CUDA wheel does not find its CUDA 11 and cuDNN 8 libraries, which torch's wheels "
    "do not include.",
    example="native/test_cuda_kernels.py::test_every_node_has_a_cuda_kernel",
)
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


@repair(
    "load_cached_extensions",
    "after import",
    10,
    fault="C++ extensions are found only inside site-packages: the first ORTModule raises an "
    "error.",
    example="tracing/test_compat.py::test_each_check_passes[extensions]",
)
def load_cached_extensions() -> bool:
    """Let ORT load its C++ extensions from the cache (every torch).

    ORT searches for its extensions only inside site-packages.
    """
    ortmodule: Any = importlib.import_module(PACKAGE)
    package = importlib.import_module(f"{PACKAGE}.torch_cpp_extensions")
    package.__path__.insert(0, str(extensions.extension_cache_folder()))
    for name in extensions.required_extension_names():
        if name == extensions.INTEROP and extensions.reason_interop_is_unbuildable_or_empty():
            continue
        try:
            importlib.import_module(f"{package.__name__}.{name}")
        except ImportError as error:
            folder = extensions.extension_cache_folder()
            raise MissingDependency(
                f"the built extension does not load: {error}",
                f"rm -r {str(folder)!r} && {extensions.SETUP_COMMAND}",
            ) from error
    # ORT records this error at its import and would raise it with the first ORTModule.
    if "extensions were not detected" in str(ortmodule._FALLBACK_INIT_EXCEPTION):
        ortmodule._FALLBACK_INIT_EXCEPTION = None
    return True


@repair(
    "disable_custom_autograd",
    "after import",
    20,
    fault="Where ORT's extension torch_interop_utils cannot be built, the first ORTModule ends "
    "in an ImportError.",
    example="tracing/test_compat.py::test_each_check_passes[stand-in]",
)
def disable_custom_autograd() -> bool:
    """Turn custom autograd functions off if torch_interop_utils could not be built for this torch.

    The replacement module has only the names that ORT uses. If it had every attribute, the lazy
    imports of transformers would mistake it for other modules.
    """
    if not extensions.reason_interop_is_unbuildable_or_empty():
        return False
    package = importlib.import_module(f"{PACKAGE}.torch_cpp_extensions")
    stand_in: Any = types.ModuleType(f"{package.__name__}.torch_interop_utils")
    stand_in.get_custom_function_forward_runner = custom_functions.raise_interop_extension_missing
    stand_in.get_custom_function_backward_runner = custom_functions.raise_interop_extension_missing
    stand_in.clear_all_grad_fns = lambda: None
    sys.modules[stand_in.__name__] = package.torch_interop_utils = stand_in  # type: ignore[attr-defined]
    # ORT reads the variable when it imports this module.
    with set_environment_variables_temporarily(ORTMODULE_ENABLE_CUSTOM_AUTOGRAD="0"):
        importlib.import_module(f"{PACKAGE}._custom_autograd_function")
    return True


@repair(
    "skip_padding_hook",
    "after import",
    50,
    fault="Where ORT's extension torch_interop_utils cannot be built, a padded embedding on CUDA "
    "takes a Python operator, which cannot run.",
    example="tracing/test_compat.py::test_each_check_passes[padding]",
)
def skip_padding_hook() -> bool:
    """Skip ORT's marking of padding on CUDA, which needs torch_interop_utils."""
    if not extensions.reason_interop_is_unbuildable_or_empty():
        return False
    owning_class_or_module(TRANSITION)._add_check_embedding_sparsity_hook = staticmethod(
        lambda *args: []
    )
    return True


@repair(
    "skip_nvtx_without_cuda",
    "after import",
    110,
    fault="On CPU builds of torch every forward pass ends, because NVTX is not installed.",
    example="tracing/test_compat.py::test_each_check_passes[nvtx]",
)
def skip_nvtx_without_cuda() -> bool:
    """Hide `torch.cuda.nvtx` from ORT on CPU-only torch builds where it raises.

    ORT marks ranges in every forward pass.
    """
    import torch

    with contextlib.suppress(RuntimeError):
        torch.cuda.nvtx.range_push("ortmodule")
        torch.cuda.nvtx.range_pop()
        return False
    # ORT checks hasattr(torch.cuda.nvtx, "range_push") first, so it skips an nvtx without names.
    helpers: Any = importlib.import_module("onnxruntime.training.utils.torch_profile_utils")
    helpers.torch = ModuleView(torch, cuda=ModuleView(torch.cuda, nvtx=types.SimpleNamespace()))
    return True
