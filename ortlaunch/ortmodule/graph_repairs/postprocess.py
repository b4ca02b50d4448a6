"""The user's function that changes an exported graph (`Settings.postprocess`)."""

from __future__ import annotations

import onnx

from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.base.settings import (
    SettingError,
    attached_settings,
    qualified_function_name,
)


def apply_user_function(export: Export, model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph as the user's function changed it; without a function, the same graph.

    Raises:
        SettingError: the function failed, or returned no graph with the same inputs and outputs.
    """
    function = attached_settings(export.options).postprocess
    if function is None:
        return model
    # The function may change the graph that it is given.
    nodes_before = len(model.graph.node)
    original_names = _input_and_output_names(model)
    model_class = type(model)
    name = qualified_function_name(function)
    try:
        model = function(model)
    # The user's code may raise anything.
    except Exception as error:
        raise SettingError(
            "postprocess", f"{name} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, model_class):
        raise SettingError(
            "postprocess",
            f"{name} returned {type(model).__name__}; it must return an onnx.ModelProto",
        )
    for side, names_before, names_after in zip(
        ("inputs", "outputs"), original_names, _input_and_output_names(model)
    ):
        if names_before != names_after:
            raise SettingError(
                "postprocess",
                f"{name} changed the graph's {side} from {', '.join(names_before)} to {', '.join(names_after)}; "
                "they must stay",
            )
    nodes_after = len(model.graph.node)
    tally.add_note_once(
        f"Settings.postprocess: {name} made {nodes_after} nodes of an exported graph's {nodes_before}"
    )
    # An evaluation's graph must not hide the training's.
    if export.training or tally.postprocess is None:
        tally.postprocess = {
            "function": name,
            "nodes_before": nodes_before,
            "nodes_after": nodes_after,
        }
    return model


def _input_and_output_names(model: onnx.ModelProto) -> tuple[list[str], list[str]]:
    return [value.name for value in model.graph.input], [value.name for value in model.graph.output]
