"""A call of a torch operator in a traced graph, written as a node of ORT's graph."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ortmodule._internal.base.torch_calls import create_counted_torch_function_class_for_ort

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

    from ortmodule._internal.base.ort_types import AnyFunction

_EXPORTER = "onnxruntime.training.ortmodule._custom_autograd_function_exporter"
# Files in site-packages and in this package; `TorchOperatorCall.user_source_location_text_or_empty` reports
# lines of other files only.
_NOT_THE_USERS = (str(Path(torch.__file__).parents[1]), str(Path(__file__).parents[1]))
# ONNX has no complex types: ORT's graph holds complex tensors as pairs of real numbers.
_REAL_NAME_BY_COMPLEX = {"ComplexHalf": "Half", "ComplexFloat": "Float", "ComplexDouble": "Double"}
_DTYPE_BY_NAME = {
    "Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64,
    "Half": torch.float16, "Float": torch.float32, "Double": torch.float64, "Bool": torch.bool,
    "BFloat16": torch.bfloat16,
}  # fmt: skip
_NOT_CALLABLE_REASONS = {
    "aten::as_strided": "it reads the first batch's memory, and ONNX Runtime's tensors lie otherwise"
}
_TENSOR_ATTRIBUTES = ("prim::layout", "prim::device", "aten::is_pinned")
ArgumentBuilder = Callable[[Sequence[torch.Tensor]], Any]


class OperatorNotCallable(Exception):
    """The reason why an operator cannot be called from ORT's graph."""


class TorchOperatorCall:
    """A node of the traced graph, with its inputs in the ONNX graph that is being written.

    `schemas` maps the names of outputs to the operators' schemas.
    """

    def __init__(
        self,
        traced_node: torch.Node,
        graph_inputs: Sequence[Any],
        schema_by_output_name: Mapping[str, Any],
    ) -> None:
        self.name = traced_node.kind()
        self._node = traced_node
        self._graph_inputs = graph_inputs
        self._traced_inputs = list(traced_node.inputs())
        node_outputs = list(traced_node.outputs())
        self._schema_text = (
            schema_by_output_name.get(node_outputs[0].debugName()) if node_outputs else None
        )
        self._returns_list = (
            len(node_outputs) == 1 and str(node_outputs[0].type()) == "List[Tensor]"
        )
        self._outputs = (
            _unpacked_tensors_or_empty(node_outputs[0]) if self._returns_list else node_outputs
        )
        self._tensors: list[Any] = []

    def traced_input_values(self) -> Sequence[Any]:
        """Return the node's inputs in the traced graph."""
        return self._traced_inputs

    def user_source_location_text_or_empty(self) -> str:
        """Return ` at FILE:LINE` of the user's code that calls the operator; empty if unknown."""
        locations = re.finditer(r"^(.+?)\((\d+)\): ", str(self._node.sourceRange()), re.MULTILINE)
        user_locations = (
            location for location in locations if not location[1].startswith(_NOT_THE_USERS)
        )
        location = next(user_locations, None)
        return f" at {location[1]}:{location[2]}" if location else ""

    def calling_layer_pattern_or_empty(self, module_paths: Iterable[str]) -> str:
        """Return the path of the layer that calls the operator; empty if unknown.

        Equal layers are one pattern, with `*` in place of their numbers.

        Args:
            module_paths: of all modules of the exported one, of which the user's model is the only child.
        """
        # torch records the end of the path: its last name, and the numbers after it.
        path_end = self._node.scopeName().rpartition("::")[2]
        matching_paths = {path for path in module_paths if f".{path}".endswith(f".{path_end}")}
        layers = {path.partition(".")[2] for path in matching_paths}
        patterns = {re.sub(r"(?<=\.)\d+(?=\.)", "*", layer) for layer in layers}
        return patterns.pop() if len(patterns) == 1 else ""

    def has_complex_input_or_output(self) -> bool:
        """Return whether an input or output is a complex tensor.

        In ORT's graph such a tensor is a real one, with pairs in the last dimension.
        """
        return any(
            element_type_name_or_none(value) in _REAL_NAME_BY_COMPLEX
            for value in (*self._traced_inputs, *self._outputs, *self._elements_of_list_inputs())
        )

    def _elements_of_list_inputs(self) -> Iterator[Any]:
        for value in self._traced_inputs:
            if value.node().kind() == "prim::ListConstruct":
                yield from value.node().inputs()

    def write(
        self,
        graph_context: GraphContext,
        gradient_paths: Any,
        draws_random_numbers: bool = False,
        earlier_graph_value: Any = None,
    ) -> Any:
        """Write the call into the graph and return its outputs there.

        Args:
            graph_context: the exporter's context for this node.
            gradient_paths: decides which inputs need a gradient.
            draws_random_numbers: whether the operator draws random numbers. These have no gradient, and the
                operator may have no tensor inputs.
            earlier_graph_value: a value of the graph that must be computed before the call.

        Raises:
            NotCallable: the operator cannot be called; has the reason.
        """
        if not self._outputs:
            raise OperatorNotCallable("it returns a list of tensors that is used as a whole")
        types_and_ranks = [
            _dtype_and_rank_as_real_pairs_or_refuse(output) for output in self._outputs
        ]
        result_types = [result_type for result_type, _ in types_and_ranks]
        result_ranks = [result_rank for _, result_rank in types_and_ranks]
        if self.name in _NOT_CALLABLE_REASONS:
            raise OperatorNotCallable(_NOT_CALLABLE_REASONS[self.name])
        operation = self._create_function_that_runs_operator(
            gradient_paths, draws_random_numbers, result_types
        )
        if self.name == "aten::index_put" and result_ranks[0] != self._tensors[0].type().dim():
            # As for `x[:, 0] = y` in the export. With a rank that is too low, torch's code for
            # shapes writes beyond an array, which ends the process.
            raise OperatorNotCallable("its result has the type of the part that is written")
        if draws_random_numbers or not self._tensors:
            # A PythonOp needs a tensor input. An unused input also fixes the order in which random
            # numbers are drawn.
            self._tensors.append(
                earlier_graph_value or graph_context.op("Constant", value_t=torch.zeros(1))
            )
        kept_positions = frozenset(
            i for i, value in enumerate(self._tensors) if value.node().kind() == "prim::Param"
        )
        function = create_counted_torch_function_class_for_ort(
            self.name.replace("::", "."), operation, kept_positions
        )
        values = self._write_python_op_of_function(
            graph_context, function, result_types, result_ranks
        )
        if self._returns_list:
            return graph_context.op("prim::ListConstruct", *values)
        return values[0] if len(values) == 1 else tuple(values)

    def _write_python_op_of_function(
        self,
        graph_context: GraphContext,
        autograd_function_class: Any,
        result_dtypes: list[torch.dtype],
        result_ranks: list[int],
    ) -> list[Any]:
        exporter: Any = importlib.import_module(_EXPORTER)
        type_codes = [
            exporter.pytorch_type_to_onnx_dtype(_NAME_BY_DTYPE[result_type])
            for result_type in result_dtypes
        ]
        name = f"{autograd_function_class.__module__}.{autograd_function_class.__qualname__}"
        # ORT's calling convention has one letter for each argument; "d" is a tensor.
        convention = "d" * len(self._tensors)
        results = exporter._default_export(
            graph_context,
            name,
            autograd_function_class,
            convention,
            len(result_dtypes),
            type_codes,
            result_ranks,
            *self._tensors,
        )
        values = list(results) if isinstance(results, (tuple, list)) else [results]
        tensor_type = torch._C.TensorType.get()
        for value, result_type, result_rank in zip(values, result_dtypes, result_ranks):
            # Unknown sizes, because the exporter would use the first batch's as constants.
            value.setType(tensor_type.with_dtype(result_type).with_sizes([None] * result_rank))
        return values

    def _create_function_that_runs_operator(
        self, gradient_paths: Any, draws_random_numbers: bool, result_dtypes: list[torch.dtype]
    ) -> AnyFunction:
        """Return a function that runs the operator and returns results of these types.

        Args:
            gradient_paths: decides which inputs need a gradient.
            draws_random_numbers: whether the operator draws random numbers.
            result_dtypes: the types of the results.
        """
        operator = self._find_called_overload_or_refuse()
        schema = operator._schema.arguments
        if operator._schema.is_mutable:
            raise OperatorNotCallable(f"{self.name} changes a tensor in place")
        builders = [
            self._create_argument_builder_and_add_tensors(traced, written, arg)
            for traced, written, arg in zip(self._traced_inputs, self._graph_inputs, schema)
        ]
        names = [arg.name if arg.kwarg_only else "" for arg in schema]
        are_pairs = [_is_complex_tensor(output) for output in self._outputs]

        need_gradients = [gradient_paths.depends_on_trained_input(value) for value in self._tensors]
        source_line = self.user_source_location_text_or_empty()
        call_location = f"{self.name}{source_line}"

        def run_operator(*inputs: torch.Tensor) -> list[torch.Tensor]:
            # torch refuses some inputs with a gradient, such as the scale of fake_quantize.
            tensors = [
                tensor if needs_gradient else tensor.detach()
                for tensor, needs_gradient in zip(inputs, need_gradients)
            ]
            arguments = [builder(tensors) for builder in builders]
            args = [value for value, name in zip(arguments, names) if not name]
            kwargs = {name: value for value, name in zip(arguments, names) if name}
            with torch.no_grad() if draws_random_numbers else contextlib.nullcontext():
                try:
                    results = operator(*args, **kwargs)
                except (IndexError, NotImplementedError, RuntimeError, ValueError) as error:
                    # Without C++ frames, which torch adds to some.
                    message = str(error).partition("\nException raised from")[0].strip().rstrip(".")
                    raise type(error)(f"{message}{source_line and ','}{source_line}") from None
            results = list(_flatten_results_to_tensors(results))
            if len(results) != len(are_pairs):
                raise RuntimeError(
                    f"{call_location} returns {len(results)} tensors, and {len(are_pairs)} in the first batch: "
                    "ONNX Runtime's graph has that many"
                )
            real = [
                torch.view_as_real(r.resolve_conj()) if is_pair else r
                for r, is_pair in zip(results, are_pairs)
            ]
            # The trace holds Python numbers as float64 tensors without dimensions. Beside one,
            # another tensor without dimensions would be promoted to float64.
            return [result.to(result_type) for result, result_type in zip(real, result_dtypes)]

        return run_operator

    def _find_called_overload_or_refuse(self) -> Any:
        """Return the overload that the trace called.

        If the exporter's passes have rebuilt the node, its schema is lost, and the arguments select
        the overload.
        """
        namespace, _, name = self.name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is None:
            raise OperatorNotCallable(f"{self.name} is no operator of this torch's")
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        if self._schema_text:
            traced_schema = torch._C.parse_schema(self._schema_text)
            overloads = [
                candidate
                for candidate in overloads
                if candidate._schema.overload_name == traced_schema.overload_name
            ]
        # Overloads for numbers come before those for tensors without dimensions.
        for accepts_scalars in (False, True):
            for candidate in overloads:
                if self._inputs_fit_overload_schema(candidate._schema, accepts_scalars):
                    return candidate
        raise OperatorNotCallable(f"no form of {self.name} takes what the model gives it")

    def _inputs_fit_overload_schema(
        self, overload_schema: Any, accepts_number_for_tensor: bool
    ) -> bool:
        if any(arg.is_out for arg in overload_schema.arguments) or len(self._traced_inputs) > len(
            overload_schema.arguments
        ):
            return False
        if any(
            not arg.has_default_value()
            for arg in overload_schema.arguments[len(self._traced_inputs) :]
        ):
            return False
        return all(
            _fits_schema_type(old, str(arg.type), accepts_number_for_tensor)
            for old, arg in zip(self._traced_inputs, overload_schema.arguments)
        )

    def _create_argument_builder_and_add_tensors(
        self, traced_value: Any, graph_value: Any, schema_argument: GraphContext
    ) -> ArgumentBuilder:
        type_text = str(schema_argument.type)
        if traced_value.node().kind() == "prim::ListConstruct":
            item_type = type_text.replace("List[", "").replace("[]", "")
            builders = [
                self._create_value_builder_and_add_tensor_if_any(o, n, item_type)
                for o, n in zip(traced_value.node().inputs(), graph_value.node().inputs())
            ]
            return lambda tensors: [builder(tensors) for builder in builders]
        return self._create_value_builder_and_add_tensor_if_any(
            traced_value, graph_value, type_text
        )

    def _create_value_builder_and_add_tensor_if_any(
        self, traced_value: Any, graph_value: Any, argument_type_text: str
    ) -> ArgumentBuilder:
        if _is_none_value(traced_value):
            return _create_constant_builder(None)
        if traced_value.node().kind() == "prim::dtype":
            return _create_constant_builder(
                _dtype_and_rank_as_real_pairs_or_refuse(traced_value.node().input())[0]
            )
        # Attributes of another tensor, as `x.normal_()` passes them: the default fits, for the graph is
        # on one device.
        if traced_value.node().kind() in _TENSOR_ATTRIBUTES:
            return _create_constant_builder(None)
        if "Tensor" in argument_type_text:
            return self._type_and_add_tensor_and_create_converting_builder(
                traced_value, graph_value
            )
        if traced_value.node().kind() == "prim::Constant":
            value = _constant_value(traced_value)
            return _create_constant_builder(value.item() if isinstance(value, torch.Tensor) and not value.dim() else
                               value.tolist() if isinstance(value, torch.Tensor) else value)  # fmt: skip
        builder = self._type_and_add_tensor_and_create_converting_builder(traced_value, graph_value)
        return lambda tensors: builder(tensors).tolist()

    def _type_and_add_tensor_and_create_converting_builder(
        self, traced_value: Any, graph_value: Any
    ) -> ArgumentBuilder:
        if element_type_name_or_none(graph_value) is None or graph_value.type().dim() is None:
            result_type, rank = _dtype_and_rank_as_real_pairs_or_refuse(traced_value)
            graph_value.setType(
                torch._C.TensorType.get().with_dtype(result_type).with_sizes([None] * rank)
            )
        tensor_index = len(self._tensors)
        self._tensors.append(graph_value)
        if _is_complex_tensor(traced_value):
            return lambda tensors: torch.view_as_complex(tensors[tensor_index].contiguous())
        dtype = _DTYPE_BY_NAME.get(element_type_name_or_none(traced_value) or "")
        # The ONNX form of the operator that made this tensor can return another type.
        if dtype and element_type_name_or_none(graph_value) != element_type_name_or_none(
            traced_value
        ):
            return lambda tensors: tensors[tensor_index].to(dtype)
        return lambda tensors: tensors[tensor_index]


def _unpacked_tensors_or_empty(traced_tensor_list: Any) -> list[Any]:
    """Return the tensors that the traced graph unpacks from a list of tensors.

    The result is empty if the graph uses the list as a whole.
    """
    users = [use.user for use in traced_tensor_list.uses()]
    return (
        list(users[0].outputs()) if [user.kind() for user in users] == ["prim::ListUnpack"] else []
    )


def _create_constant_builder(constant: Any) -> ArgumentBuilder:
    return lambda tensors: constant


def _flatten_results_to_tensors(results: Any) -> Iterator[torch.Tensor]:
    for result in results if isinstance(results, (tuple, list)) else [results]:
        if isinstance(result, (tuple, list)):
            yield from _flatten_results_to_tensors(result)
        else:
            yield result if isinstance(result, torch.Tensor) else torch.tensor(result)


def _fits_schema_type(
    traced_value: Any, argument_type_text: str, accepts_number_for_tensor: bool
) -> bool:
    if _is_none_value(traced_value):
        return "Optional" in argument_type_text or argument_type_text.endswith("?")
    is_list = "List[" in argument_type_text or argument_type_text.endswith("[]")
    if traced_value.node().kind() == "prim::ListConstruct":
        return is_list
    if "Tensor" in argument_type_text:
        return not is_list and (
            accepts_number_for_tensor
            or not (
                traced_value.node().kind() == "prim::Constant"
                and _is_python_number_or_string(traced_value)
            )
        )
    if is_list:
        return traced_value.node().kind() != "prim::Constant" or not _is_python_number_or_string(
            traced_value
        )
    # A number, which a tensor with dimensions is not.
    return element_type_name_or_none(traced_value) is None or traced_value.type().dim() in (None, 0)


def _is_python_number_or_string(constant_graph_value: Any) -> bool:
    """Return whether a constant stands for a Python number or string.

    In a trace a Python number is a tensor without dimensions. A bool tensor without dimensions is a
    real tensor.
    """
    constant = _constant_value(constant_graph_value)
    is_scalar_tensor = (
        isinstance(constant, torch.Tensor) and not constant.dim() and constant.dtype != torch.bool
    )
    return is_scalar_tensor or isinstance(constant, (int, float, str))


def _constant_value(constant: Any) -> Any:
    return constant.toIValue()


def _is_none_value(traced_value: Any) -> bool:
    return traced_value.node().mustBeNone() or str(traced_value.type()) == "NoneType"


def element_type_name_or_none(traced_value: Any) -> str | None:
    scalar_type: str | None = (
        traced_value.type().scalarType()
        if isinstance(traced_value.type(), torch._C.TensorType)
        else None
    )
    return scalar_type


def is_complex_constant_node(traced_node: Any) -> bool:
    """Return whether a node is a constant of complex numbers, which ONNX has none of."""
    # A tensor of the model that is no weight and no buffer is one.
    return (
        traced_node.kind() == "prim::Constant"
        and traced_node.hasAttribute("value")
        and _is_complex_tensor(traced_node.output())
    )


def _is_complex_tensor(traced_value: Any) -> bool:
    return element_type_name_or_none(traced_value) in _REAL_NAME_BY_COMPLEX


def _dtype_and_rank_as_real_pairs_or_refuse(traced_value: Any) -> tuple[torch.dtype, int]:
    """Return the type and the number of dimensions; for complex numbers, those of pairs."""
    scalar_type = element_type_name_or_none(traced_value)
    rank = traced_value.type().dim() if scalar_type else None
    if scalar_type is None or (rank is None and scalar_type not in _DTYPE_BY_NAME):
        raise OperatorNotCallable(
            f"the type of one of its tensors is not known ({traced_value.type()})"
        )
    return _DTYPE_BY_NAME[_REAL_NAME_BY_COMPLEX.get(scalar_type, scalar_type)], (rank or 0) + (
        scalar_type in _REAL_NAME_BY_COMPLEX
    )


_NAME_BY_DTYPE = {dtype: name for name, dtype in _DTYPE_BY_NAME.items()}
