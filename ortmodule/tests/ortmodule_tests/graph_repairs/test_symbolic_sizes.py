"""ORT's shape inference on a graph of which it cannot infer everything."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from ortmodule._internal.base.graph import ShapeInferenceError
from ortmodule._internal.module import import_ortmodule_with_all_repairs
from ortmodule_tests.ort import needs_ort


@needs_ort
def test_an_unknown_size_is_an_error_and_leaves_no_file(
    built: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error contains the operator. ORT itself writes the graph into the current folder."""
    # A rank's current folder is that of the user, on all hosts the same.
    import_ortmodule_with_all_repairs()
    helper = importlib.import_module("onnx.helper")
    given, made = (helper.make_tensor_value_info(name, 1, ["n"]) for name in "xy")
    made.type.Clear()
    unknown = helper.make_node("Unknown", ["x"], ["y"], domain="mine")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    model = helper.make_model(
        helper.make_graph([unknown], "", [given], [made]), opset_imports=opsets
    )
    inference = importlib.import_module("onnxruntime.tools.symbolic_shape_infer")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ShapeInferenceError, match="the shape of Unknown's result"):
        inference.SymbolicShapeInference.infer_shapes(model, auto_merge=True)
    assert not [*tmp_path.iterdir()]
