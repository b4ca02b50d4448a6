"""Helpers to write ONNX forms of torch operators: types, constants, and a graph being written.

The table of the forms is torch_in_graph/operator_table.py.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ortmodule._internal.base.ort_types import AnyFunction

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

ExportFunction = AnyFunction
OperatorForm = AnyFunction
"""A function `form(g, *inputs)` that writes an operator's nodes into the graph `g`.

It returns the value or values that replace the operator's outputs.
"""


class GraphWriter:
    """A graph being written, in which functions replace some ONNX operators."""

    def __init__(self, written_graph: Any, writer_by_operator: Mapping[str, AnyFunction]) -> None:
        self._graph = written_graph
        self._replaced_operators = writer_by_operator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def op(self, operator_type: str, *inputs: Any, **attributes: Any) -> Any:
        if operator_type in self._replaced_operators:
            return self._replaced_operators[operator_type](*inputs, **attributes)
        return self._graph.op(operator_type, *inputs, **attributes)


def wrap_export_with_operator_forms(
    torch_export: ExportFunction, load_form_by_operator: Callable[[], Mapping[str, OperatorForm]]
) -> ExportFunction:
    """Wrap an export so that it uses these forms instead of the exporter's during each call.

    Args:
        torch_export: the export.
        load_form_by_operator: returns the forms by full operator name.
    """

    @functools.wraps(torch_export)
    def export_with_forms(*args: object, **kwargs: Any) -> Any:
        opset = kwargs["opset_version"]
        active_forms = load_form_by_operator()
        for name, form in active_forms.items():
            torch.onnx.register_custom_op_symbolic(name, form, opset)
        try:
            return torch_export(*args, **kwargs)
        finally:
            # The exporter's registry is global; other exports need the exporter's own forms.
            for name in active_forms:
                torch.onnx.unregister_custom_op_symbolic(name, opset)

    return export_with_forms


def ort_form_by_operator() -> dict[str, OperatorForm]:
    """Return ONNX Runtime's own forms by full operator name."""
    module = importlib.import_module("onnxruntime.training.ortmodule._custom_op_symbolic_registry")
    ort_symbolics: dict[str, OperatorForm] = module.CustomOpSymbolicRegistry._SYMBOLICS
    return {
        f"aten{name}" if name.startswith("::") else name: form
        for name, form in ort_symbolics.items()
    }


def dtype_of_graph_value(graph_value: Any) -> torch.dtype:
    """Return the type of a tensor in the graph."""
    from torch.onnx._type_utils import JitScalarType

    dtype: torch.dtype = JitScalarType.from_value(graph_value).dtype()
    return dtype


def is_boolean_graph_value(graph_value: Any) -> bool:
    """Return whether the value is a boolean tensor; False for None."""
    from torch.onnx import symbolic_helper

    return bool(not symbolic_helper._is_none(graph_value) and symbolic_helper._is_bool(graph_value))


def write_int64_constant(g: GraphContext, integer_or_integers: int | list[int]) -> Any:
    """Write an int64 constant."""
    return g.op("Constant", value_t=torch.tensor(integer_or_integers))


def write_scalar_constant_in_type_of(
    g: GraphContext, constant_number: float, typed_value: Any
) -> Any:
    """Write a constant without dimensions, of the type of `typed_value`."""
    return g.op(
        "Constant", value_t=torch.tensor(constant_number, dtype=dtype_of_graph_value(typed_value))
    )


def known_numbers_of_constant_or_list(graph_value: Any) -> list[float]:
    """Return the numbers of a constant or of a list of constants in a traced graph.

    Computed values are left out.
    """
    parts = (
        list(graph_value.node().inputs())
        if graph_value.node().kind() == "prim::ListConstruct"
        else [graph_value]
    )
    part_values = [
        part.toIValue() if part.node().kind() == "prim::Constant" else None for part in parts
    ]
    part_values = [
        part_value.tolist() if isinstance(part_value, torch.Tensor) else part_value
        for part_value in part_values
    ]
    elements = [
        element
        for part_value in part_values
        for element in (part_value if isinstance(part_value, (list, tuple)) else [part_value])
    ]
    return [float(element) for element in elements if isinstance(element, (int, float))]


def torch_exporter_form(operator_name: str, opset: int) -> OperatorForm:
    """Return torch's own form of an operator, of an opset."""
    form: OperatorForm = getattr(
        importlib.import_module(f"torch.onnx.symbolic_opset{opset}"), operator_name
    )
    return form
