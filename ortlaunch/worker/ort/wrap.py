"""Wraps a module in ORTModule with settings that hold for this one module.

Owns the settings' way into ORT; what ORTModule does wrong is repairs.py's. Must not know recipes, DeepSpeed or the
training loop.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ortlaunch.worker.ort.buffers import kept_modes
from ortlaunch.worker.ort.compat import environment, import_ortmodule, record, wrap_method
from ortlaunch.worker.ort.export_cache import ENABLED
from ortlaunch.worker.ort.repairs import apply_repairs

if TYPE_CHECKING:
    from torch import nn

_THREADS = "_ortlaunch_threads"


def wrap(
    module: nn.Module,
    *,
    threads: int,
    opset: int | None,
    memory_optimization: int,
    log_level: str = "ERROR",
    allow_fallback: bool = False,
    export_cache: bool = True,
) -> Any:
    """`module` as an ORTModule; the graph is exported and built in its first forward.

    threads: CPU threads of each of its two sessions (training, evaluation); 0 lets ORT take every core.
    opset: ONNX opset to export to; None is ORT's own, 17.
    memory_optimization: 0 keeps activations, 1 recomputes them layer by layer, 2 also where only a part is saved.
    log_level: VERBOSE, DEVINFO, INFO, WARNING, ERROR or FATAL; WARNING prints ORT's table of features.
    allow_fallback: let ORT run what it cannot as plain PyTorch; otherwise that raises in the first forward.
    export_cache: read the exported graph from ortlaunch's cache where it is the same, and keep it there.
    """
    ortmodule = import_ortmodule()
    _limit_session_threads()
    apply_repairs()
    options = ortmodule.DebugOptions(log_level=ortmodule.LogLevel[log_level])
    # ORT sets every layer to the mode of the whole, also a frozen BatchNorm's eval.
    with environment(**_settings(opset, memory_optimization, allow_fallback)), kept_modes(module):
        wrapped = ortmodule.ORTModule(module, options)
    for training in (True, False):
        manager = wrapped._torch_module._execution_manager(training)
        setattr(manager, _THREADS, threads)
        setattr(manager._graph_transition_manager, ENABLED, export_cache)
    # This logger of ORT's is under no option; it says what it guessed about shapes.
    logging.getLogger("onnxruntime.tools.symbolic_shape_infer").setLevel(wrapped._logger.level)
    return wrapped


def _settings(opset: int | None, memory_optimization: int, allow_fallback: bool) -> dict[str, str]:
    """ORT reads these while it is constructed, and has no other way in."""
    values = {"ORTMODULE_MEMORY_OPT_LEVEL": str(memory_optimization)}
    if opset is not None:
        values["ORTMODULE_ONNX_OPSET_VERSION"] = str(opset)
    if not allow_fallback:
        values["ORTMODULE_FALLBACK_POLICY"] = "FALLBACK_DISABLE"
    return values


@functools.cache
def _limit_session_threads() -> None:
    # On the class, with the number on the instances: ORT pickles its managers, and a function of one would not be.
    from onnxruntime.training.ortmodule import _graph_execution_manager

    wrap_method(_graph_execution_manager.GraphExecutionManager, "_get_session_config", _with_threads)
    record("limit_session_threads")


def _with_threads(original: Callable[..., Any], manager: Any) -> Any:
    """ORT's sessions take every physical core, whatever the number of ranks on the machine."""
    session_options, providers, provider_options = original(manager)
    session_options.intra_op_num_threads = getattr(manager, _THREADS, 0)
    # Waiting threads that spin take the cores from torch's own threads, which run the optimizer and the data.
    session_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return session_options, providers, provider_options
