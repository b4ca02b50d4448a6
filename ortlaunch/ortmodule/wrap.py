"""Wraps a module in ORTModule with settings that hold for this one module.

`options` turns settings into ORT's names; what ORTModule does wrong is repairs.py's. Must not know DeepSpeed or the
training loop.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ortlaunch.ortmodule import options
from ortlaunch.ortmodule.buffers import kept_modes
from ortlaunch.ortmodule.compat import import_ortmodule
from ortlaunch.ortmodule.patching import environment, record, wrap_method
from ortlaunch.ortmodule.python_values import ALLOWED
from ortlaunch.ortmodule.repairs import apply_repairs
from ortlaunch.ortmodule.torch_kernels import PRODUCTS, torch_products
from ortlaunch.recipe.engine import Engine

if TYPE_CHECKING:
    from torch import nn

_THREADS, _TF32 = "_ortlaunch_threads", "_ortlaunch_tf32"


def wrap(module: nn.Module, engine: Engine, *, threads: int, ranks_here: int = 1, allow_fallback: bool = False) -> Any:
    """`module` as an ORTModule; the graph is exported and built in its first forward.

    engine: the recipe's settings; what ORT reads at its import must have been given to `options.prepare`.
    threads: CPU threads of each of its two sessions (training, evaluation); 0 lets ORT take every core.
    ranks_here: ranks that share this host's memory.
    allow_fallback: let ORT run what it cannot as plain PyTorch; otherwise that raises in the first forward.
    """
    ortmodule = import_repaired()
    deepcopy = options.settle_deepcopy(module, engine, ranks_here)
    # ORT sets every layer to the mode of the whole, also a frozen BatchNorm's eval.
    with environment(**options.variables(engine, deepcopy, allow_fallback)), kept_modes(module):
        wrapped = ortmodule.ORTModule(module, options.debug_options(engine))
    options.set_attributes(wrapped, engine)
    settle(wrapped, engine, threads)
    # This logger of ORT's is under no option; it says what it guessed about shapes.
    logging.getLogger("onnxruntime.tools.symbolic_shape_infer").setLevel(wrapped._logger.level)
    return wrapped


def settle(wrapped: Any, engine: Engine, threads: int) -> None:
    """Give an ORTModule, for training and for evaluation, the settings that are ours and not ORT's."""
    for training in (True, False):
        manager = wrapped._torch_module._execution_manager(training)
        setattr(manager, _THREADS, threads)
        setattr(manager, _TF32, engine.matmul_precision != "highest")
        setattr(manager, PRODUCTS, torch_products(engine))
        setattr(manager._runtime_options, ALLOWED, engine.allow_traced_values)


def import_repaired() -> Any:
    """The module onnxruntime.training.ortmodule, with every repair."""
    ortmodule = import_ortmodule()
    _set_sessions_and_exports()
    apply_repairs()
    return ortmodule


@functools.cache
def _set_sessions_and_exports() -> None:
    # On the classes, with the settings on the instances: ORT pickles its managers, and a function of one would not be.
    from onnxruntime.training.ortmodule import _graph_execution_manager, _graph_transition_manager

    wrap_method(_graph_execution_manager.GraphExecutionManager, "_get_session_config", _as_set)
    wrap_method(_graph_transition_manager.GraphTransitionManager, "get_post_processed_model", _with_settings)
    record("limit_session_threads")


def _as_set(original: Callable[..., Any], manager: Any) -> Any:
    """ORT's sessions take every physical core, whatever the number of ranks, and on CUDA TF32, whatever torch does."""
    session_options, providers, provider_options = original(manager)
    session_options.intra_op_num_threads = getattr(manager, _THREADS, 0)
    # Waiting threads that spin take the cores from torch's own threads, which run the optimizer and the data.
    session_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if manager._device.type == "cuda":
        provider_options[0]["use_tf32"] = str(int(getattr(manager, _TF32, False)))
    return session_options, providers, provider_options


def _with_settings(original: Callable[..., Any], manager: Any, *args: Any) -> Any:
    """What an export looks up outside its module's own options."""
    with options.during_export(manager._runtime_options):
        return original(manager, *args)
