"""The user's function that changes an exported graph (`Settings.postprocess`)."""

from __future__ import annotations

import onnx

from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.settings import SettingError, module_and_qualified_name_text


def apply_check_and_record_user_postprocess_if_set(
    export_context: ExportContext, exported_model: onnx.ModelProto
) -> onnx.ModelProto:
    """Return the graph as the user's function changed it; without a function, the same graph.

    Raises:
        SettingError: the function failed, or returned no graph with the same inputs and outputs.
    """
    function = export_context.settings.postprocess
    if function is None:
        return exported_model
    # The function may change the graph that it is given.
    nodes_before = len(exported_model.graph.node)
    original_names = _value_names_by_side(exported_model)
    model_class = type(exported_model)
    name = module_and_qualified_name_text(function)
    try:
        exported_model = function(exported_model)
    # The user's code may raise anything.
    except Exception as error:
        raise SettingError(
            "postprocess", f"{name} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(exported_model, model_class):
        raise SettingError(
            "postprocess",
            f"{name} returned {type(exported_model).__name__}; it must return an onnx.ModelProto",
        )
    for side, names_after in _value_names_by_side(exported_model).items():
        names_before = original_names[side]
        if names_before != names_after:
            raise SettingError(
                "postprocess",
                f"{name} changed the graph's {side} from {', '.join(names_before)} to {', '.join(names_after)}; "
                "they must stay",
            )
    nodes_after = len(exported_model.graph.node)
    tally.add_end_note_once(
        f"setting postprocess: {name} made {nodes_after} nodes of an exported graph's {nodes_before}"
    )
    # An evaluation's graph must not hide the training's.
    if export_context.training or tally.postprocess is None:
        tally.postprocess = {
            "function": name,
            "nodes_before": nodes_before,
            "nodes_after": nodes_after,
        }
    return exported_model


def _value_names_by_side(model: onnx.ModelProto) -> dict[str, list[str]]:
    sides = {"inputs": model.graph.input, "outputs": model.graph.output}
    return {side: [value.name for value in values] for side, values in sides.items()}
