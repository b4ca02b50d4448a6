"""Translate Settings into the variables and options of ORTModule 1.19.2.

ORTModule reads them at its construction and its build. Only this module has their names. Every
setting is passed, also at its default, so that an outside environment variable has no effect.
Variables without a setting are ORT's own matter. The module must not depend on a training loop.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ortmodule._internal.base.attached import OptionsRecord
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.custom_functions import set_custom_function_inlining_temporarily
from ortmodule._internal.base.patching import set_environment_variables_temporarily
from ortmodule._internal.base.settings import Settings
from ortmodule._internal.errors import SettingError
from ortmodule._internal.import_ortmodule import import_ortmodule_with_repairs_and_export_steps
from ortmodule._internal.native import extensions

if TYPE_CHECKING:
    from torch import nn

    from ortmodule._internal.base.ort_types import OrtModule, RuntimeOptions

# Settings that need torch_interop_utils.
_NEEDS_INTEROP = (
    "sparsity_optimizer",
    "print_input_density",
    "memory_efficient_grad_management",
    "torch_modules",
)


def load(settings: Settings | None = None) -> None:
    """Import ORTModule with its repairs, and check that the installed versions support the settings.

    Call it before transformers is imported (import_ortmodule.py has the reason). If nobody has called it, the
    first ORTModule does.

    Raises:
        SettingError: the installed versions do not support a setting.
        MissingDependency: ORTModule cannot be imported.
    """
    # It is on for any text, also "0", and off if empty. It stays off, because attention.py decides
    # which attention stays torch's.
    with set_environment_variables_temporarily(ORTMODULE_ATEN_SDPA_FALLBACK=""):
        import_ortmodule_with_repairs_and_export_steps()
    _refuse_settings_unsupported_here(settings or Settings())


def _refuse_settings_unsupported_here(settings: Settings) -> None:
    """Refuse settings that ORT would ignore with the installed versions."""
    if refusal := extensions.reason_interop_is_unbuildable_or_empty():
        extra_names = ["torch_operators"] if not isinstance(settings.torch_operators, str) else []
        for setting_name in (
            *_NEEDS_INTEROP,
            *extra_names,
            *(["custom_autograd"] if settings.custom_autograd == "python" else []),
        ):
            if getattr(settings, setting_name):
                problem = (
                    f"needs ONNX Runtime's extension {extensions.INTEROP}, which is not there, "
                    f"because {refusal}"
                )
                raise SettingError(setting_name, f"{problem}; leave it out")


def write_config_file_and_get_constructor_variables(
    settings: Settings, copies_model_before_export: bool
) -> dict[str, str]:
    """Return environment variables for ORTModule's constructor, which has no such parameters."""
    variable_values = {
        "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT": _flag_text(copies_model_before_export),
        "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": _flag_text(settings.compute_optimizer),
        "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER": _flag_text(
            settings.sparsity_optimizer is not False
        ),
        "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT": _flag_text(
            settings.memory_efficient_grad_management
        ),
        "ORTMODULE_LOG_LEVEL": settings.log_level.upper(),
        "ORTMODULE_MEMORY_OPT_CONFIG": _write_temporary_json_and_get_path_or_empty(
            list(settings.memory_optimization_config)
        ),
        "ORTMODULE_MEMORY_OPT_LEVEL": str(settings.memory_optimization),
        "ORTMODULE_ONNX_OPSET_VERSION": str(settings.opset or _default_onnx_opset_of_ort()),
        "ORTMODULE_PRINT_INPUT_DENSITY": _flag_text(settings.print_input_density),
        "ORTMODULE_SAVE_ONNX_PATH": settings.save_onnx or "",
    }
    return (
        variable_values
        if settings.allow_fallback
        else {**variable_values, "ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE"}
    )


def create_folder_and_debug_options_saving_on_rank_0(settings: Settings) -> object:
    """Return ORT's DebugOptions; only rank 0 saves graphs, because all ranks have the same."""
    from onnxruntime.training.ortmodule import DebugOptions, LogLevel
    from onnxruntime.training.ortmodule._utils import get_rank

    level = LogLevel[settings.log_level.upper()]
    if settings.save_onnx is None or get_rank() != 0:
        return DebugOptions(log_level=level)
    folder = Path(settings.save_onnx)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return DebugOptions(
            log_level=level, save_onnx=True, onnx_prefix="rank_00000", save_path=str(folder)
        )
    except OSError as error:
        raise SettingError("save_onnx", f"cannot write to {folder}: {error}") from None


def set_custom_autograd_option_in_both_managers(ort_module: OrtModule, settings: Settings) -> None:
    """Set the option of a wrapped module's two managers for which ORT has no variable."""
    if settings.custom_autograd != "inline":
        return
    for is_training in (True, False):
        options = ort_module._torch_module._execution_manager(is_training)._runtime_options
        options.enable_custom_autograd_function = False
        OptionsRecord.attached_to(options).inlines_custom_functions = True


@contextlib.contextmanager
def apply_autograd_inlining_setting(runtime_options: RuntimeOptions) -> Iterator[None]:
    """Apply the settings that an export reads outside its module's own options."""
    with set_custom_function_inlining_temporarily(
        OptionsRecord.attached_to(runtime_options).inlines_custom_functions
    ):
        yield


def is_model_copied_before_export(model: nn.Module, settings: Settings) -> bool:
    """Return whether the export works on a copy of the model; a copy that does not fit is noted."""
    if settings.deepcopy_before_export is not None:
        return settings.deepcopy_before_export
    parameter_bytes = sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters()
    )
    free_bytes = _free_device_bytes(model, settings)
    # The copy takes as many bytes during the export; as many must stay free.
    is_copied = 2 * parameter_bytes <= free_bytes
    if not is_copied:
        tally.add_end_note_once(
            f"deepcopy_before_export: off, for twice the parameters ({parameter_bytes:,} bytes) "
            f"would not fit into {free_bytes:,} free bytes"
        )
    return is_copied


def _free_device_bytes(model: nn.Module, settings: Settings) -> int:
    import torch

    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if settings.free_memory_bytes is not None:
        return settings.free_memory_bytes
    match = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return int(match[1]) * 1024 if match else 0


def _write_temporary_json_and_get_path_or_empty(json_value: object) -> str:
    """Write a value to a file for ORT to read; return its path, or "" for an empty value.

    The file is deleted at the end of the process.
    """
    if not json_value:
        return ""
    with tempfile.NamedTemporaryFile(
        "w", prefix="ortmodule-", suffix=".json", delete=False
    ) as file:
        json.dump(json_value, file)
    atexit.register(Path(file.name).unlink, missing_ok=True)
    return file.name


def _default_onnx_opset_of_ort() -> int:
    from onnxruntime.training import ortmodule

    return int(ortmodule.ONNX_OPSET_VERSION)


def _flag_text(value: bool) -> str:
    return "1" if value else "0"
