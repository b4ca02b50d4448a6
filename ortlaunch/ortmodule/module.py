"""A model as an ORTModule, with settings that hold for this one model.

`options` turns settings into ORT's names; what ORTModule does wrong is repairs.py's. Must not know DeepSpeed or a
training loop.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ortlaunch.errors import EngineError
from ortlaunch.ortmodule import options
from ortlaunch.ortmodule.base import registry
from ortlaunch.ortmodule.base.patching import environment, wrap_method
from ortlaunch.ortmodule.base.registry import Repair
from ortlaunch.ortmodule.base.settings import Settings, settings_of
from ortlaunch.ortmodule.build import cuda_libraries
from ortlaunch.ortmodule.repaired import import_ortmodule
from ortlaunch.ortmodule.repairs import apply_repairs
from ortlaunch.ortmodule.state.buffers import kept_modes
from ortlaunch.ortmodule.state.unsupported import without_compile
from ortlaunch.ortmodule.wrapper import Wrapper, loaded

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Manager, OrtModule


class ORTModule(Wrapper):
    """`model` as an `onnxruntime.training.ortmodule.ORTModule`, whose graph is made in its first forward pass.

    Raises:
        MissingDependency: ONNX Runtime Training or its extensions are not here; it says what to type.
        SettingError: this stack has not what a setting needs.
    """

    def __init__(self, model: nn.Module, settings: Settings | None = None) -> None:
        settings = settings or Settings()
        model = without_compile(model)
        options.prepare(settings)
        import_repaired()
        deepcopy = options.settle_deepcopy(model, settings)
        # ORT sets every layer to the mode of the whole, also a frozen BatchNorm's eval.
        with environment(**options.variables(settings, deepcopy)), kept_modes(model):
            super().__init__(model, options.debug_options(settings))
        options.set_attributes(self, settings)
        settle(self, settings)
        # This logger of ORT's is under no option; it says what it guessed about shapes.
        logging.getLogger("onnxruntime.tools.symbolic_shape_infer").setLevel(self._logger.level)

    def __reduce_ex__(self, protocol: Any) -> Any:
        settings = settings_of(self._torch_module._execution_manager(True))
        return _reconstruct, (type(self)._ortlaunch_kind, settings), self.__getstate__()


def _reconstruct(kind: Any, settings: Settings) -> Any:
    """An instance without state, for pickle, whose process may not have imported ONNX Runtime yet."""
    options.prepare(settings)
    import_repaired()
    return object.__new__(loaded(kind))


def settle(wrapped: OrtModule, settings: Settings) -> None:
    """Give an ORTModule, for training and for evaluation, the settings that are ours and not ORT's."""
    for training in (True, False):
        manager = wrapped._torch_module._execution_manager(training)
        # Read in every session and pass; on the options too, which is all that an export gets.
        manager._ortlaunch_settings = manager._runtime_options._ortlaunch_settings = settings


def import_repaired() -> object:
    """The module onnxruntime.training.ortmodule, with every repair."""
    ortmodule = import_ortmodule()
    registry.apply([Repair("limit_session_threads", install=_set_sessions_and_exports)])
    apply_repairs()
    return ortmodule


def _set_sessions_and_exports() -> None:
    # On the classes, with the settings on the instances: ORT pickles its managers, and a function of one would not be.
    from onnxruntime.training.ortmodule import (
        _graph_execution_manager,
        _graph_transition_manager,
        _inference_manager,
        _training_manager,
    )

    wrap_method(_graph_execution_manager.GraphExecutionManager, "_get_session_config", _as_set)
    wrap_method(
        _graph_transition_manager.GraphTransitionManager, "get_post_processed_model", _with_settings
    )
    for manager in (_training_manager.TrainingManager, _inference_manager.InferenceManager):
        wrap_method(manager, "_create_execution_agent", _on_its_device)


def _as_set(original: AnyFunction, manager: Manager) -> object:
    """ORT's sessions take every physical core, whatever the number of ranks, and on CUDA TF32, whatever torch does."""
    session_options, providers, provider_options = original(manager)
    settings = settings_of(manager)
    session_options.intra_op_num_threads = (
        torch.get_num_threads() if settings.threads is None else settings.threads
    )
    # Waiting threads that spin take the cores from torch's own threads, which run the optimizer and the data.
    session_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if manager._device.type == "cuda":
        provider_options[0]["use_tf32"] = str(int(settings.tf32))
    return session_options, providers, provider_options


def _on_its_device(original: AnyFunction, manager: Manager) -> None:
    """ORT computes on the CPU, with a line in its log, where its CUDA provider does not load."""
    original(manager)
    provider = manager._execution_agent._inference_session.get_providers()[0]
    if manager._device.type == "cuda" and provider != cuda_libraries.PROVIDER:
        raise EngineError(
            f"the model is on {manager._device}, and ONNX Runtime's session runs on {provider}: "
            f"{cuda_libraries.check() or 'its CUDA provider was not loaded in this process'}"
        )


def _with_settings(original: AnyFunction, manager: Manager, *args: object) -> object:
    """What an export looks up outside its module's own options."""
    with options.during_export(manager._runtime_options):
        return original(manager, *args)
