"""The user's function that changes an exported graph (`Settings.postprocess`)."""

from __future__ import annotations

import onnx

from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.base.settings import SettingError, function_name, settings_of


def apply(export: Export, model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph as the user's function changed it; without a function, the same graph.

    Raises:
        SettingError: the function failed, or returned no graph with the same inputs and outputs.
    """
    function = settings_of(export.options).postprocess
    if function is None:
        return model
    # The function may change the graph that it is given.
    before = len(model.graph.node)
    ends = _ends(model)
    kind = type(model)
    name = function_name(function)
    try:
        model = function(model)
    # The user's code may raise anything.
    except Exception as error:
        raise SettingError(
            "postprocess", f"{name} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, kind):
        raise SettingError(
            "postprocess",
            f"{name} returned {type(model).__name__}; it must return an onnx.ModelProto",
        )
    for which, one, other in zip(("inputs", "outputs"), ends, _ends(model)):
        if one != other:
            raise SettingError(
                "postprocess",
                f"{name} changed the graph's {which} from {', '.join(one)} to {', '.join(other)}; "
                "they must stay",
            )
    after = len(model.graph.node)
    tally.note(f"Settings.postprocess: {name} made {after} nodes of an exported graph's {before}")
    # An evaluation's graph must not hide the training's.
    if export.training or tally.postprocess is None:
        tally.postprocess = {"function": name, "nodes_before": before, "nodes_after": after}
    return model


def _ends(model: onnx.ModelProto) -> tuple[list[str], list[str]]:
    return [each.name for each in model.graph.input], [each.name for each in model.graph.output]
