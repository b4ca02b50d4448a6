"""Settings of one ORTModule that ORT's sessions and exports read outside its options.

The classes are patched and the instances hold the settings. ORT pickles its managers, and a function
on an instance could not be pickled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ortmodule._internal import options
from ortmodule._internal.base.attached import OptionsRecord
from ortmodule._internal.base.repair_registry import (
    EVALUATION,
    MANAGER,
    TRAINING,
    TRANSITION,
    repair,
)
from ortmodule._internal.errors import ORTModuleError
from ortmodule._internal.native import cuda_libraries

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction, Manager

_MANAGE_GRADIENTS = "_mem_efficient_grad_mgmt:post_processing_enable_mem_efficient_training"


@repair(
    "limit_session_threads",
    "install",
    10,
    replaces=f"{MANAGER}._get_session_config",
    fault="Each session's threads take every core, whatever the number of ranks, and spin while "
    "they wait; TF32 is on on CUDA; and a CUDA model whose provider does not load runs on the "
    "CPU.",
    example="test_training.py::test_sessions_have_the_threads_asked_for[1]",
)
def _session_config_with_threads_and_tf32(
    original_get_config: AnyFunction, manager: Manager
) -> object:
    """Set a session's threads and TF32.

    By default ORT's sessions use every physical core, whatever the number of ranks, and use TF32 on
    CUDA, whatever torch's setting.
    """
    session_options, providers, provider_options = original_get_config(manager)
    settings = OptionsRecord.attached_to(manager._runtime_options).settings
    session_options.intra_op_num_threads = (
        torch.get_num_threads() if settings.threads is None else settings.threads
    )
    # Threads that spin while they wait take the cores from torch's threads, which run the optimizer
    # and load the data.
    session_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if manager._device.type == "cuda":
        provider_options[0]["use_tf32"] = str(int(settings.tf32))
    return session_options, providers, provider_options


@repair(
    "limit_session_threads",
    "install",
    10,
    replaces=f"{TRAINING}._create_execution_agent",
)
@repair(
    "limit_session_threads",
    "install",
    10,
    replaces=f"{EVALUATION}._create_execution_agent",
)
def _create_agent_and_refuse_cpu_session_of_cuda_model(
    original_create_agent: AnyFunction, manager: Manager
) -> None:
    """Raise an error if the session of a CUDA model runs on the CPU.

    If its CUDA provider does not load, ORT itself only logs a line.
    """
    original_create_agent(manager)
    provider = manager._execution_agent._inference_session.get_providers()[0]
    if manager._device.type == "cuda" and provider != cuda_libraries.PROVIDER:
        reason = cuda_libraries.gpu_failure_reason_or_empty()
        raise ORTModuleError(
            f"the model is on {manager._device}, and ONNX Runtime's session runs on {provider}: "
            f"{reason or 'its CUDA provider was not loaded in this process'}"
        )


@repair(
    "limit_session_threads",
    "install",
    10,
    replaces=f"{TRANSITION}.get_post_processed_model",
)
def _run_export_with_module_settings(
    original_export: AnyFunction, manager: Manager, *export_arguments: object
) -> object:
    """Run an export with the settings that it reads outside its module's own options."""
    with options.apply_autograd_inlining_setting(manager._runtime_options):
        return original_export(manager, *export_arguments)


@repair(
    "create_session_once",
    "install",
    180,
    replaces=f"{TRAINING}._create_execution_agent",
    fault="The first pass creates the training session twice: for BERT-base 2.2 seconds of a "
    "core instead of 0.9.",
    example="test_options.py::test_training_sessions_are_those_that_are_needed[settings0-1]",
    sources={f"{TRAINING}._create_execution_agent": "d25d6cd3c6333ed3"},
)
def _create_agent_without_unneeded_session(
    original_create_agent: AnyFunction, manager: Manager
) -> None:
    """Let ORT list what could be recomputed only where a memory optimization or the log uses it.

    For the list ORT creates a first session, and simplifies a formula for each entry.
    """
    from onnxruntime.training.ortmodule._logger import LogLevel
    from onnxruntime.training.ortmodule.options import _MemoryOptimizationLevel

    level = manager._runtime_options.memory_optimization_level
    manager._runtime_inspector.memory_ob._is_enabled = (
        level != _MemoryOptimizationLevel.USER_SPECIFIED
        or manager._debug_options.logging.log_level < LogLevel.WARNING
    )
    original_create_agent(manager)


@repair(
    "pass_device_to_ort_grad_management",
    "install",
    80,
    replaces=_MANAGE_GRADIENTS,
    fault="`memory_efficient_grad_management` ends in `zeros() ... device=dict`.",
    example="test_options.py::test_the_field_changes_something_or_is_refused[memory_efficient_grad_management]",
    sources={
        _MANAGE_GRADIENTS: "3244fee3a0d1c060",
        f"{TRANSITION}.get_post_processed_model": "a766fd8849dbdd15",
    },
)
def _enable_gradient_management_with_device(
    original_enable: AnyFunction, model: Any, named_parameters: Any, parameters: Any
) -> object:
    # ORT passes the dictionary of parameters in place of a device.
    return original_enable(model, named_parameters, next(iter(parameters.values())).device)
