"""A model as an ORTModule, with settings for this one model.

options.py translates the settings for ORT. This module must not depend on DeepSpeed or a training loop.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from ortmodule._internal import options, pass_counters
from ortmodule._internal.base.attached import OptionsRecord
from ortmodule._internal.base.json_types import Json
from ortmodule._internal.base.patching import (
    set_environment_variables_temporarily,
)
from ortmodule._internal.base.repair_registry import apply_repairs
from ortmodule._internal.base.settings import (
    Settings,
    module_and_qualified_name_text,
)
from ortmodule._internal.graph_cache import TorchModuleRecord
from ortmodule._internal.import_ortmodule import import_ortmodule_with_repairs_and_export_steps
from ortmodule._internal.report import report
from ortmodule._internal.state.buffers import restore_layer_modes_after_block
from ortmodule._internal.state.unsupported_models import model_inside_torch_compile_or_itself
from ortmodule._internal.wrapper import TransparentOrtWrapper, create_class_with_ort_base

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import OrtModule


class ORTModule(TransparentOrtWrapper):
    """An `onnxruntime.training.ortmodule.ORTModule` of `model`; its first pass makes the graph.

    Raises:
        MissingDependency: ONNX Runtime Training or its extensions are not installed. The message
            has the command to type.
        SettingError: the installed versions do not support a setting.
    """

    def __init__(self, model: nn.Module, settings: Settings | None = None) -> None:
        settings = settings or Settings()
        model = model_inside_torch_compile_or_itself(model)
        options.load(settings)
        # Before the repairs, whose wrappers are then the outer ones.
        pass_counters.get_or_start_pass_counters()
        import_ortmodule_with_all_repairs()
        copies_model = options.is_model_copied_before_export(model, settings)
        # ORT sets every layer to the mode of the whole model, also a frozen BatchNorm in eval mode.
        with (
            set_environment_variables_temporarily(
                **options.write_config_file_and_get_constructor_variables(settings, copies_model)
            ),
            restore_layer_modes_after_block(model),
        ):
            super().__init__(
                model, options.create_folder_and_debug_options_saving_on_rank_0(settings)
            )
        options.set_custom_autograd_option_in_both_managers(self, settings)
        store_settings_in_both_managers(self, settings)
        # ORT has no option for this logger, which reports guesses about shapes.
        logging.getLogger("onnxruntime.tools.symbolic_shape_infer").setLevel(self._logger.level)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (
            _reconstruct,
            (type(self)._ortmodule_kind, self._settings_of_this_module()),
            self.__getstate__(),
        )

    def report(self) -> Json:
        """Return what ONNX Runtime really ran, as values for a JSON file.

        Returns:
            `settings`: this module's settings that are not defaults; `provider`: the execution
            provider of the newest graph, empty before the first pass. All other entries are for all
            ORTModules of this process: `repairs` and `repairs_not_applied`; `exports`,
            `re_exports`, `export_seconds`, `graphs_built`; `forward_passes`, `backward_passes`,
            `evaluation_passes`, `nodes_run`; `fallbacks` and `fallback_reasons`: passes that plain
            PyTorch ran; `training_graph` and `evaluation_graph`: the nodes of the newest ones;
            `torch_calls`: operators and layers that torch ran inside the graphs; `notes`.
        """
        active_witness = pass_counters.get_or_start_pass_counters()
        settings = self._settings_of_this_module()
        settings_record = dataclasses.asdict(settings)
        if settings.postprocess:
            settings_record["postprocess"] = module_and_qualified_name_text(settings.postprocess)
        defaults = dataclasses.asdict(Settings())
        return {
            "provider": active_witness.graphs[-1].provider if active_witness.graphs else "",
            "settings": {
                name: value for name, value in settings_record.items() if value != defaults[name]
            },
            **report(active_witness),
        }

    def reason_for_another_export(self, *args: object, **kwargs: object) -> str:
        """Return which difference would make a call with these arguments export another graph.

        Nothing is run. A small batch can thus make the graph of a large one.

        Returns:
            A noun, such as `a size or buffer`; empty if one of the graphs is valid for the call.
        """
        return TorchModuleRecord.attached_to(
            self._torch_module
        ).graphs.reason_for_another_export_or_empty(self._torch_module, args, kwargs)

    def _settings_of_this_module(self) -> Settings:
        manager = self._torch_module._execution_manager(True)
        return OptionsRecord.attached_to(manager._runtime_options).settings


def _reconstruct(wrapper_class: Any, settings: Settings) -> Any:
    """Return an instance without state, for pickle.

    The unpickling process may not have imported ONNX Runtime yet.
    """
    options.load(settings)
    import_ortmodule_with_all_repairs()
    return object.__new__(create_class_with_ort_base(wrapper_class))


def store_settings_in_both_managers(ort_module: OrtModule, settings: Settings) -> None:
    """Store this package's settings, which ORT does not have, in an ORTModule's two managers."""
    for is_training in (True, False):
        manager = ort_module._torch_module._execution_manager(is_training)
        OptionsRecord.attached_to(manager._runtime_options).settings = settings


def import_ortmodule_with_all_repairs() -> object:
    """Return the module onnxruntime.training.ortmodule, with every repair."""
    ortmodule = import_ortmodule_with_repairs_and_export_steps()
    apply_repairs("install")
    return ortmodule
