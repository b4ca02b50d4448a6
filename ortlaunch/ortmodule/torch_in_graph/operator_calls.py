"""A call of a torch operator in a traced graph, written as a node of ORT's graph."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ortlaunch.ortmodule.base.torch_calls import create_call_function

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

    from ortlaunch.ortmodule.base.ort_types import AnyFunction

_EXPORTER = "onnxruntime.training.ortmodule._custom_autograd_function_exporter"
# Files in site-packages and in ortlaunch; `Call.source_line` reports lines of other files only.
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


class NotCallable(Exception):
    """The reason why an operator cannot be called from ORT's graph."""


class OperatorCall:
    """A node of the traced graph, with its inputs in the ONNX graph that is being written.

    `schemas` maps the names of outputs to the operators' schemas.
    """

    def __init__(
        self, node: torch.Node, graph_inputs: Sequence[Any], schemas: Mapping[str, Any]
    ) -> None:
        self.name = node.kind()
        self._node = node
        self._graph_inputs = graph_inputs
        self._traced_inputs = list(node.inputs())
        node_outputs = list(node.outputs())
        self._schema_text = schemas.get(node_outputs[0].debugName()) if node_outputs else None
        self._returns_list = (
            len(node_outputs) == 1 and str(node_outputs[0].type()) == "List[Tensor]"
        )
        self._outputs = _unpacked_tensors(node_outputs[0]) if self._returns_list else node_outputs
        self._tensors: list[Any] = []

    def traced_inputs(self) -> Sequence[Any]:
        """Return the node's inputs in the traced graph."""
        return self._traced_inputs

    def source_line(self) -> str:
        """Return ` at FILE:LINE` of the user's code that calls the operator; empty if unknown."""
        locations = re.finditer(r"^(.+?)\((\d+)\): ", str(self._node.sourceRange()), re.MULTILINE)
        user_locations = (
            location for location in locations if not location[1].startswith(_NOT_THE_USERS)
        )
        location = next(user_locations, None)
        return f" at {location[1]}:{location[2]}" if location else ""

    def calling_layer(self, module_paths: Iterable[str]) -> str:
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

    def has_complex_tensor(self) -> bool:
        """Return whether an input or output is a complex tensor.

        In ORT's graph such a tensor is a real one, with pairs in the last dimension.
        """
        return any(
            element_type_name(value) in _REAL_NAME_BY_COMPLEX
            for value in (*self._traced_inputs, *self._outputs, *self._list_elements())
        )

    def _list_elements(self) -> Iterator[Any]:
        for value in self._traced_inputs:
            if value.node().kind() == "prim::ListConstruct":
                yield from value.node().inputs()

    def write(
        self,
        context: GraphContext,
        gradient_paths: Any,
        draws_numbers: bool = False,
        earlier_value: Any = None,
    ) -> Any:
        """Write the call into the graph and return its outputs there.

        Args:
            context: the exporter's context for this node.
            gradient_paths: decides which inputs need a gradient.
            draws_numbers: whether the operator draws random numbers. These have no gradient, and the
                operator may have no tensor inputs.
            earlier_value: a value of the graph that must be computed before the call.

        Raises:
            NotCallable: the operator cannot be called; has the reason.
        """
        if not self._outputs:
            raise NotCallable("it returns a list of tensors that is used as a whole")
        types_and_ranks = [_dtype_and_rank(output) for output in self._outputs]
        result_types = [result_type for result_type, _ in types_and_ranks]
        result_ranks = [result_rank for _, result_rank in types_and_ranks]
        if self.name in _NOT_CALLABLE_REASONS:
            raise NotCallable(_NOT_CALLABLE_REASONS[self.name])
        operation = self._operator_function(gradient_paths, draws_numbers, result_types)
        if self.name == "aten::index_put" and result_ranks[0] != self._tensors[0].type().dim():
            # As for `x[:, 0] = y` in the export. With a rank that is too low, torch's code for
            # shapes writes beyond an array, which ends the process.
            raise NotCallable("its result has the type of the part that is written")
        if draws_numbers or not self._tensors:
            # A PythonOp needs a tensor input. An unused input also fixes the order in which random
            # numbers are drawn.
            self._tensors.append(earlier_value or context.op("Constant", value_t=torch.zeros(1)))
        kept_positions = frozenset(
            i for i, value in enumerate(self._tensors) if value.node().kind() == "prim::Param"
        )
        function = create_call_function(self.name.replace("::", "."), operation, kept_positions)
        values = self._write_python_op(context, function, result_types, result_ranks)
        if self._returns_list:
            return context.op("prim::ListConstruct", *values)
        return values[0] if len(values) == 1 else tuple(values)

    def _write_python_op(
        self,
        context: GraphContext,
        function: Any,
        result_types: list[torch.dtype],
        result_ranks: list[int],
    ) -> list[Any]:
        exporter: Any = importlib.import_module(_EXPORTER)
        type_codes = [
            exporter.pytorch_type_to_onnx_dtype(_NAME_BY_DTYPE[result_type])
            for result_type in result_types
        ]
        name = f"{function.__module__}.{function.__qualname__}"
        # ORT's calling convention has one letter for each argument; "d" is a tensor.
        convention = "d" * len(self._tensors)
        results = exporter._default_export(
            context,
            name,
            function,
            convention,
            len(result_types),
            type_codes,
            result_ranks,
            *self._tensors,
        )
        values = list(results) if isinstance(results, (tuple, list)) else [results]
        tensor_type = torch._C.TensorType.get()
        for value, result_type, result_rank in zip(values, result_types, result_ranks):
            # Unknown sizes, because the exporter would use the first batch's as constants.
            value.setType(tensor_type.with_dtype(result_type).with_sizes([None] * result_rank))
        return values

    def _operator_function(
        self, gradient_paths: Any, draws_numbers: bool, result_types: list[torch.dtype]
    ) -> AnyFunction:
        """Return a function that runs the operator and returns results of these types.

        Args:
            gradient_paths: decides which inputs need a gradient.
            draws_numbers: whether the operator draws random numbers.
            result_types: the types of the results.
        """
        operator = self._called_overload()
        schema = operator._schema.arguments
        if operator._schema.is_mutable:
            raise NotCallable(f"{self.name} changes a tensor in place")
        builders = [
            self._argument_builder(traced, written, arg)
            for traced, written, arg in zip(self._traced_inputs, self._graph_inputs, schema)
        ]
        names = [arg.name if arg.kwarg_only else "" for arg in schema]
        are_pairs = [_is_complex(output) for output in self._outputs]

        need_gradients = [gradient_paths.reaches_trained_input(value) for value in self._tensors]
        source_line = self.source_line()
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
            with torch.no_grad() if draws_numbers else contextlib.nullcontext():
                try:
                    results = operator(*args, **kwargs)
                except (IndexError, NotImplementedError, RuntimeError, ValueError) as error:
                    # Without C++ frames, which torch adds to some.
                    message = str(error).partition("\nException raised from")[0].strip().rstrip(".")
                    raise type(error)(f"{message}{source_line and ','}{source_line}") from None
            results = list(_flatten_results(results))
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
            return [result.to(result_type) for result, result_type in zip(real, result_types)]

        return run_operator

    def _called_overload(self) -> Any:
        """Return the overload that the trace called.

        If the exporter's passes have rebuilt the node, its schema is lost, and the arguments select
        the overload.
        """
        namespace, _, name = self.name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is None:
            raise NotCallable(f"{self.name} is no operator of this torch's")
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
                if self._fits_schema(candidate._schema, accepts_scalars):
                    return candidate
        raise NotCallable(f"no form of {self.name} takes what the model gives it")

    def _fits_schema(self, schema: Any, accepts_scalars: bool) -> bool:
        if any(arg.is_out for arg in schema.arguments) or len(self._traced_inputs) > len(
            schema.arguments
        ):
            return False
        if any(not arg.has_default_value() for arg in schema.arguments[len(self._traced_inputs) :]):
            return False
        return all(
            _fits_type(old, str(arg.type), accepts_scalars)
            for old, arg in zip(self._traced_inputs, schema.arguments)
        )

    def _argument_builder(
        self, traced_value: Any, graph_value: Any, arg: GraphContext
    ) -> ArgumentBuilder:
        type_text = str(arg.type)
        if traced_value.node().kind() == "prim::ListConstruct":
            item_type = type_text.replace("List[", "").replace("[]", "")
            builders = [
                self._value_builder(o, n, item_type)
                for o, n in zip(traced_value.node().inputs(), graph_value.node().inputs())
            ]
            return lambda tensors: [builder(tensors) for builder in builders]
        return self._value_builder(traced_value, graph_value, type_text)

    def _value_builder(
        self, traced_value: Any, graph_value: Any, type_text: str
    ) -> ArgumentBuilder:
        if _is_none(traced_value):
            return _constant_builder(None)
        if traced_value.node().kind() == "prim::dtype":
            return _constant_builder(_dtype_and_rank(traced_value.node().input())[0])
        # Attributes of another tensor, as `x.normal_()` passes them: the default fits, for the graph is
        # on one device.
        if traced_value.node().kind() in _TENSOR_ATTRIBUTES:
            return _constant_builder(None)
        if "Tensor" in type_text:
            return self._tensor_builder(traced_value, graph_value)
        if traced_value.node().kind() == "prim::Constant":
            value = _constant_value(traced_value)
            return _constant_builder(value.item() if isinstance(value, torch.Tensor) and not value.dim() else
                               value.tolist() if isinstance(value, torch.Tensor) else value)  # fmt: skip
        builder = self._tensor_builder(traced_value, graph_value)
        return lambda tensors: builder(tensors).tolist()

    def _tensor_builder(self, traced_value: Any, graph_value: Any) -> ArgumentBuilder:
        if element_type_name(graph_value) is None or graph_value.type().dim() is None:
            result_type, rank = _dtype_and_rank(traced_value)
            graph_value.setType(
                torch._C.TensorType.get().with_dtype(result_type).with_sizes([None] * rank)
            )
        tensor_index = len(self._tensors)
        self._tensors.append(graph_value)
        if _is_complex(traced_value):
            return lambda tensors: torch.view_as_complex(tensors[tensor_index].contiguous())
        dtype = _DTYPE_BY_NAME.get(element_type_name(traced_value) or "")
        # The ONNX form of the operator that made this tensor can return another type.
        if dtype and element_type_name(graph_value) != element_type_name(traced_value):
            return lambda tensors: tensors[tensor_index].to(dtype)
        return lambda tensors: tensors[tensor_index]


def _unpacked_tensors(tensor_list: Any) -> list[Any]:
    """Return the tensors that the traced graph unpacks from a list of tensors.

    The result is empty if the graph uses the list as a whole.
    """
    users = [use.user for use in tensor_list.uses()]
    return (
        list(users[0].outputs()) if [user.kind() for user in users] == ["prim::ListUnpack"] else []
    )


def _constant_builder(value: Any) -> ArgumentBuilder:
    return lambda tensors: value


def _flatten_results(results: Any) -> Iterator[torch.Tensor]:
    for result in results if isinstance(results, (tuple, list)) else [results]:
        if isinstance(result, (tuple, list)):
            yield from _flatten_results(result)
        else:
            yield result if isinstance(result, torch.Tensor) else torch.tensor(result)


def _fits_type(traced_value: Any, type_text: str, accepts_scalars: bool) -> bool:
    if _is_none(traced_value):
        return "Optional" in type_text or type_text.endswith("?")
    is_list = "List[" in type_text or type_text.endswith("[]")
    if traced_value.node().kind() == "prim::ListConstruct":
        return is_list
    if "Tensor" in type_text:
        return not is_list and (
            accepts_scalars
            or not (
                traced_value.node().kind() == "prim::Constant" and _is_python_number(traced_value)
            )
        )
    if is_list:
        return traced_value.node().kind() != "prim::Constant" or not _is_python_number(traced_value)
    # A number, which a tensor with dimensions is not.
    return element_type_name(traced_value) is None or traced_value.type().dim() in (None, 0)


def _is_python_number(value: Any) -> bool:
    """Return whether a constant stands for a Python number or string.

    In a trace a Python number is a tensor without dimensions. A bool tensor without dimensions is a
    real tensor.
    """
    constant = _constant_value(value)
    is_scalar_tensor = (
        isinstance(constant, torch.Tensor) and not constant.dim() and constant.dtype != torch.bool
    )
    return is_scalar_tensor or isinstance(constant, (int, float, str))


def _constant_value(constant: Any) -> Any:
    return constant.toIValue()


def _is_none(value: Any) -> bool:
    return value.node().mustBeNone() or str(value.type()) == "NoneType"


def element_type_name(value: Any) -> str | None:
    scalar_type: str | None = (
        value.type().scalarType() if isinstance(value.type(), torch._C.TensorType) else None
    )
    return scalar_type


def is_complex_constant(node: Any) -> bool:
    """Return whether a node is a constant of complex numbers, which ONNX has none of."""
    # A tensor of the model that is no weight and no buffer is one.
    return (
        node.kind() == "prim::Constant"
        and node.hasAttribute("value")
        and _is_complex(node.output())
    )


def _is_complex(value: Any) -> bool:
    return element_type_name(value) in _REAL_NAME_BY_COMPLEX


def _dtype_and_rank(value: Any) -> tuple[torch.dtype, int]:
    """Return the type and the number of dimensions; for complex numbers, those of pairs."""
    scalar_type = element_type_name(value)
    rank = value.type().dim() if scalar_type else None
    if scalar_type is None or (rank is None and scalar_type not in _DTYPE_BY_NAME):
        raise NotCallable(f"the type of one of its tensors is not known ({value.type()})")
    return _DTYPE_BY_NAME[_REAL_NAME_BY_COMPLEX.get(scalar_type, scalar_type)], (rank or 0) + (
        scalar_type in _REAL_NAME_BY_COMPLEX
    )


_NAME_BY_DTYPE = {dtype: name for name, dtype in _DTYPE_BY_NAME.items()}
