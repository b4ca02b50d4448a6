"""Repairs of settings that crash in ORTModule 1.19.2, each one guarded by the source line that is at fault.

Importing ORTModule comes first (`compat.import_ortmodule`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ortlaunch.worker.ort.patching import record


@functools.cache
def repair_settings() -> None:
    """Apply every repair whose fault is in the installed source, once."""
    for repair in (switch_off_sparsity, manage_gradients_on_device):
        if repair():
            record(repair.__name__)


# The line of _add_check_label_sparsity_hook whose answer _export_model then walks through.
_NO_LIST = "if not enable_label_sparse_optimizer:\n            return None"


def switch_off_sparsity() -> bool:
    """compute_optimizer: false and sparsity_optimizer: false ended in `'NoneType' object is not iterable`."""
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager as Transition

    if _NO_LIST not in inspect.getsource(Transition._add_check_label_sparsity_hook):
        return False
    Transition._add_check_label_sparsity_hook = staticmethod(_always_a_list(Transition._add_check_label_sparsity_hook))
    return True


def _always_a_list(hooks: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hooks)
    def listed(*args: Any) -> Any:
        return hooks(*args) or []

    return listed


# The argument that should be a device.
_NO_DEVICE = "post_processed_model, flatten_module.named_parameters(), parameter_not_as_graph_input_names"


def manage_gradients_on_device() -> bool:
    """memory_efficient_grad_management ended in `zeros() ... device=dict`: it was given parameters for a device."""
    from onnxruntime.training.ortmodule import _graph_transition_manager, _mem_efficient_grad_mgmt

    if _NO_DEVICE not in inspect.getsource(_graph_transition_manager):
        return False
    enable = _mem_efficient_grad_mgmt.post_processing_enable_mem_efficient_training

    @functools.wraps(enable)
    def enable_on_device(model: Any, named_parameters: Any, parameters: Any) -> Any:
        return enable(model, named_parameters, next(iter(parameters.values())).device)

    _mem_efficient_grad_mgmt.post_processing_enable_mem_efficient_training = enable_on_device
    return True
