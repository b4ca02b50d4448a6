"""Wraps a module in ORTModule with settings that hold for this one module.

Owns the repairs of ORTModule's behaviour that a wrapped module relies on; `options` turns settings into ORT's names.
Must not know DeepSpeed or the training loop.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ortlaunch.recipe.models import Engine
from ortlaunch.worker.ort import options
from ortlaunch.worker.ort.compat import environment, import_ortmodule, record, wrap_method
from ortlaunch.worker.ort.setting_repairs import repair_settings

if TYPE_CHECKING:
    from torch import nn

_THREADS = "_ortlaunch_threads"


def wrap(module: nn.Module, engine: Engine, *, threads: int, ranks_here: int = 1, allow_fallback: bool = False) -> Any:
    """`module` as an ORTModule; the graph is exported and built in its first forward.

    engine: the recipe's settings; what ORT reads at its import must have been given to `options.prepare`.
    threads: CPU threads of each of its two sessions (training, evaluation); 0 lets ORT take every core.
    ranks_here: ranks that share this host's memory.
    allow_fallback: let ORT run what it cannot as plain PyTorch; otherwise that raises in the first forward.
    """
    ortmodule = import_ortmodule()
    _repair_classes()
    repair_settings()
    deepcopy = options.settle_deepcopy(module, engine, ranks_here)
    with environment(**options.variables(engine, deepcopy, allow_fallback)):
        wrapped = ortmodule.ORTModule(module, options.debug_options(engine))
    options.set_attributes(wrapped, engine)
    for training in (True, False):
        setattr(wrapped._torch_module._execution_manager(training), _THREADS, threads)
    # This logger of ORT's is under no option; it says what it guessed about shapes.
    logging.getLogger("onnxruntime.tools.symbolic_shape_infer").setLevel(wrapped._logger.level)
    return wrapped


@functools.cache
def _repair_classes() -> None:
    # On the classes, with the settings on the instances: ORT pickles its managers, and a function of one would not be.
    from onnxruntime.training.ortmodule import _graph_execution_manager, _graph_transition_manager, _training_manager

    transition = _graph_transition_manager.GraphTransitionManager
    wrap_method(_graph_execution_manager.GraphExecutionManager, "_get_session_config", _with_threads)
    wrap_method(transition, "get_post_processed_model", _with_memory_level)
    record("limit_session_threads", "keep_memory_level_for_export")
    if _NAMES_EVERY_PARAMETER in inspect.getsource(_graph_transition_manager):
        transition._export_model = staticmethod(_without_frozen(transition._export_model))
        wrap_method(_training_manager.TrainingManager, "forward", _rebuilding_when_unfrozen)
        record("skip_frozen_gradients")


def _with_threads(original: Callable[..., Any], manager: Any) -> Any:
    """ORT's sessions take every physical core, whatever the number of ranks on the machine."""
    session_options, providers, provider_options = original(manager)
    session_options.intra_op_num_threads = getattr(manager, _THREADS, 0)
    # Waiting threads that spin take the cores from torch's own threads, which run the optimizer and the data.
    session_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return session_options, providers, provider_options


def _with_memory_level(original: Callable[..., Any], manager: Any, *args: Any) -> Any:
    """ORT's stand-in for torch.utils.checkpoint reads the level from the environment again, during the export."""
    with options.during_export(manager._runtime_options):
        return original(manager, *args)


# The line of _export_model that asks for a gradient of every parameter, frozen or not.
_NAMES_EVERY_PARAMETER = "if input.name in parameter_names or input.name in model_info_for_export"


def _without_frozen(export_model: Callable[..., Any]) -> Callable[..., Any]:
    """ORT 1.19.2 computes a gradient for every frozen parameter in every step, and throws it away."""

    @functools.wraps(export_model)
    def export(*, flattened_module: nn.Module, **kwargs: Any) -> Any:
        model, schema, names, differentiable = export_model(flattened_module=flattened_module, **kwargs)
        frozen = {name for name, parameter in flattened_module.named_parameters() if not parameter.requires_grad}
        return model, schema, names, [name for name in differentiable if name not in frozen]

    return export


def _rebuilding_when_unfrozen(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """A parameter unfrozen later has no gradient in a graph built while it was frozen: build another."""
    frozen = getattr(manager, "_ortlaunch_frozen", None)
    if frozen is None or any(parameter.requires_grad for parameter in frozen):
        manager._graph_transition_manager._exported_model_info = None
        manager._execution_agent = None
        parameters = manager._flattened_module.parameters()
        manager._ortlaunch_frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    return original(manager, *args, **kwargs)
