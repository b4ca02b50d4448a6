"""A call of a torch operator in a traced graph, written as a node of ORT's graph."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ortlaunch.ortmodule.base.torch_calls import as_function

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

    from ortlaunch.ortmodule.base.ort_types import AnyFunction

_EXPORTER = "onnxruntime.training.ortmodule._custom_autograd_function_exporter"
# Files in site-packages and in ortlaunch; `Call.line` reports lines of other files only.
_NOT_THE_USERS = (str(Path(torch.__file__).parents[1]), str(Path(__file__).parents[1]))
# ONNX has no complex types: ORT's graph holds complex tensors as pairs of real numbers.
_COMPLEX = {"ComplexHalf": "Half", "ComplexFloat": "Float", "ComplexDouble": "Double"}
_KINDS = {
    "Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64,
    "Half": torch.float16, "Float": torch.float32, "Double": torch.float64, "Bool": torch.bool,
    "BFloat16": torch.bfloat16,
}  # fmt: skip
_NOT_CALLABLE = {
    "aten::as_strided": "it reads the first batch's memory, and ONNX Runtime's tensors lie otherwise"
}
_OF_TENSORS = ("prim::layout", "prim::device", "aten::is_pinned")
Build = Callable[[Sequence[torch.Tensor]], Any]


class NotCallable(Exception):
    """The reason why an operator cannot be called from ORT's graph."""


class Call:
    """A node of the traced graph, with its inputs in the ONNX graph that is being written.

    `schemas` maps the names of outputs to the operators' schemas.
    """

    def __init__(self, node: torch.Node, inputs: Sequence[Any], schemas: Mapping[str, Any]) -> None:
        self.name = node.kind()
        self._node = node
        self._inputs = inputs
        self._old = list(node.inputs())
        made = list(node.outputs())
        self._schema_text = schemas.get(made[0].debugName()) if made else None
        self._lists = len(made) == 1 and str(made[0].type()) == "List[Tensor]"
        self._outputs = _unpacked(made[0]) if self._lists else made
        self._tensors: list[Any] = []

    def given(self) -> Sequence[Any]:
        """Return the node's inputs in the traced graph."""
        return self._old

    def line(self) -> str:
        """Return ` at FILE:LINE` of the user's code that calls the operator; empty if unknown."""
        places = re.finditer(r"^(.+?)\((\d+)\): ", str(self._node.sourceRange()), re.MULTILINE)
        users = (place for place in places if not place[1].startswith(_NOT_THE_USERS))
        place = next(users, None)
        return f" at {place[1]}:{place[2]}" if place else ""

    def layer(self, paths: Iterable[str]) -> str:
        """Return the path of the layer that calls the operator; empty if unknown.

        Equal layers are one pattern, with `*` in place of their numbers.

        Args:
            paths: of all modules of the exported one, of which the user's model is the only child.
        """
        # torch records the end of the path: its last name, and the numbers after it.
        end = self._node.scopeName().rpartition("::")[2]
        found = {path for path in paths if f".{path}".endswith(f".{end}")}
        layers = {path.partition(".")[2] for path in found}
        patterns = {re.sub(r"(?<=\.)\d+(?=\.)", "*", layer) for layer in layers}
        return patterns.pop() if len(patterns) == 1 else ""

    def is_complex(self) -> bool:
        """Return whether an input or output is a complex tensor.

        In ORT's graph such a tensor is a real one, with pairs in the last dimension.
        """
        return any(
            element_type(value) in _COMPLEX
            for value in (*self._old, *self._outputs, *self._listed())
        )

    def _listed(self) -> Iterator[Any]:
        for value in self._old:
            if value.node().kind() == "prim::ListConstruct":
                yield from value.node().inputs()

    def write(
        self, context: GraphContext, gradients: Any, draws: bool = False, before: Any = None
    ) -> Any:
        """Write the call into the graph and return its outputs there.

        Args:
            context: the exporter's context for this node.
            gradients: decides which inputs need a gradient.
            draws: whether the operator draws random numbers. These have no gradient, and the
                operator may have no tensor inputs.
            before: a value of the graph that must be computed before the call.

        Raises:
            NotCallable: the operator cannot be called; has the reason.
        """
        if not self._outputs:
            raise NotCallable("it returns a list of tensors that is used as a whole")
        described = [_described(output) for output in self._outputs]
        kinds = [kind for kind, _ in described]
        ranks = [rank for _, rank in described]
        if self.name in _NOT_CALLABLE:
            raise NotCallable(_NOT_CALLABLE[self.name])
        run = self._function(gradients, draws, kinds)
        if self.name == "aten::index_put" and ranks[0] != self._tensors[0].type().dim():
            # As for `x[:, 0] = y` in the export. With a rank that is too low, torch's code for
            # shapes writes beyond an array, which ends the process.
            raise NotCallable("its result has the type of the part that is written")
        if draws or not self._tensors:
            # A PythonOp needs a tensor input. An unused input also fixes the order in which random
            # numbers are drawn.
            self._tensors.append(before or context.op("Constant", value_t=torch.zeros(1)))
        kept = frozenset(
            i for i, value in enumerate(self._tensors) if value.node().kind() == "prim::Param"
        )
        function = as_function(self.name.replace("::", "."), run, kept)
        values = self._emit(context, function, kinds, ranks)
        if self._lists:
            return context.op("prim::ListConstruct", *values)
        return values[0] if len(values) == 1 else tuple(values)

    def _emit(
        self, context: GraphContext, function: Any, kinds: list[torch.dtype], ranks: list[int]
    ) -> list[Any]:
        exporter: Any = importlib.import_module(_EXPORTER)
        codes = [exporter.pytorch_type_to_onnx_dtype(_NAMES[kind]) for kind in kinds]
        name = f"{function.__module__}.{function.__qualname__}"
        # ORT's calling convention has one letter for each argument; "d" is a tensor.
        convention = "d" * len(self._tensors)
        written = exporter._default_export(
            context, name, function, convention, len(kinds), codes, ranks, *self._tensors
        )
        values = list(written) if isinstance(written, (tuple, list)) else [written]
        like = torch._C.TensorType.get()
        for value, kind, rank in zip(values, kinds, ranks):
            # Unknown sizes, because the exporter would use the first batch's as constants.
            value.setType(like.with_dtype(kind).with_sizes([None] * rank))
        return values

    def _function(self, gradients: Any, draws: bool, kinds: list[torch.dtype]) -> AnyFunction:
        """Return a function that runs the operator and returns results of these types.

        Args:
            gradients: decides which inputs need a gradient.
            draws: whether the operator draws random numbers.
            kinds: the types of the results.
        """
        operator = self._operator()
        schema = operator._schema.arguments
        if operator._schema.is_mutable:
            raise NotCallable(f"{self.name} changes a tensor in place")
        builds = [
            self._argument(old, new, arg) for old, new, arg in zip(self._old, self._inputs, schema)
        ]
        names = [arg.name if arg.kwarg_only else "" for arg in schema]
        pairs = [_is_complex(output) for output in self._outputs]

        derived = [gradients.reach(value) for value in self._tensors]
        line = self.line()
        place = f"{self.name}{line}"

        def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
            # torch refuses some inputs with a gradient, such as the scale of fake_quantize.
            tensors = [
                tensor if derives else tensor.detach() for tensor, derives in zip(inputs, derived)
            ]
            given = [build(tensors) for build in builds]
            args = [value for value, name in zip(given, names) if not name]
            kwargs = {name: value for value, name in zip(given, names) if name}
            with torch.no_grad() if draws else contextlib.nullcontext():
                try:
                    results = operator(*args, **kwargs)
                except (IndexError, NotImplementedError, RuntimeError, ValueError) as error:
                    # Without C++ frames, which torch adds to some.
                    text = str(error).partition("\nException raised from")[0].strip().rstrip(".")
                    raise type(error)(f"{text}{line and ','}{line}") from None
            results = list(_flat(results))
            if len(results) != len(pairs):
                raise RuntimeError(
                    f"{place} returns {len(results)} tensors, and {len(pairs)} in the first batch: "
                    "ONNX Runtime's graph has that many"
                )
            real = [
                torch.view_as_real(r.resolve_conj()) if pair else r
                for r, pair in zip(results, pairs)
            ]
            # The trace holds Python numbers as float64 tensors without dimensions. Beside one,
            # another tensor without dimensions would be promoted to float64.
            return [result.to(kind) for result, kind in zip(real, kinds)]

        return run

    def _operator(self) -> Any:
        """Return the overload that the trace called.

        If the exporter's passes have rebuilt the node, its schema is lost, and the arguments select
        the overload.
        """
        space, _, name = self.name.partition("::")
        packet = getattr(getattr(torch.ops, space), name, None)
        if packet is None:
            raise NotCallable(f"{self.name} is no operator of this torch's")
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        if self._schema_text:
            wanted = torch._C.parse_schema(self._schema_text)
            overloads = [
                one for one in overloads if one._schema.overload_name == wanted.overload_name
            ]
        # Overloads for numbers come before those for tensors without dimensions.
        for scalars in (False, True):
            for one in overloads:
                if self._fits(one._schema, scalars):
                    return one
        raise NotCallable(f"no form of {self.name} takes what the model gives it")

    def _fits(self, schema: Any, scalars: bool) -> bool:
        if any(arg.is_out for arg in schema.arguments) or len(self._old) > len(schema.arguments):
            return False
        if any(not arg.has_default_value() for arg in schema.arguments[len(self._old) :]):
            return False
        return all(
            _fits(old, str(arg.type), scalars) for old, arg in zip(self._old, schema.arguments)
        )

    def _argument(self, old: Any, new: Any, arg: GraphContext) -> Build:
        kind = str(arg.type)
        if old.node().kind() == "prim::ListConstruct":
            of_item = kind.replace("List[", "").replace("[]", "")
            inner = [
                self._one(o, n, of_item) for o, n in zip(old.node().inputs(), new.node().inputs())
            ]
            return lambda tensors: [build(tensors) for build in inner]
        return self._one(old, new, kind)

    def _one(self, old: Any, new: Any, kind: str) -> Build:
        if _is_none(old):
            return _constantly(None)
        if old.node().kind() == "prim::dtype":
            return _constantly(_described(old.node().input())[0])
        # Attributes of another tensor, as `x.normal_()` passes them: the default fits, for the graph is
        # on one device.
        if old.node().kind() in _OF_TENSORS:
            return _constantly(None)
        if "Tensor" in kind:
            return self._tensor(old, new)
        if old.node().kind() == "prim::Constant":
            value = _value(old)
            return _constantly(value.item() if isinstance(value, torch.Tensor) and not value.dim() else
                               value.tolist() if isinstance(value, torch.Tensor) else value)  # fmt: skip
        build = self._tensor(old, new)
        return lambda tensors: build(tensors).tolist()

    def _tensor(self, old: Any, new: Any) -> Build:
        if element_type(new) is None or new.type().dim() is None:
            kind, rank = _described(old)
            new.setType(torch._C.TensorType.get().with_dtype(kind).with_sizes([None] * rank))
        place = len(self._tensors)
        self._tensors.append(new)
        if _is_complex(old):
            return lambda tensors: torch.view_as_complex(tensors[place].contiguous())
        dtype = _KINDS.get(element_type(old) or "")
        # The ONNX form of the operator that made this tensor can return another type.
        if dtype and element_type(new) != element_type(old):
            return lambda tensors: tensors[place].to(dtype)
        return lambda tensors: tensors[place]


def _unpacked(tensors: Any) -> list[Any]:
    """Return the tensors that the traced graph unpacks from a list of tensors.

    The result is empty if the graph uses the list as a whole.
    """
    users = [use.user for use in tensors.uses()]
    return (
        list(users[0].outputs()) if [user.kind() for user in users] == ["prim::ListUnpack"] else []
    )


def _constantly(value: Any) -> Build:
    return lambda tensors: value


def _flat(results: Any) -> Iterator[torch.Tensor]:
    for result in results if isinstance(results, (tuple, list)) else [results]:
        if isinstance(result, (tuple, list)):
            yield from _flat(result)
        else:
            yield result if isinstance(result, torch.Tensor) else torch.tensor(result)


def _fits(old: Any, kind: str, scalars: bool) -> bool:
    if _is_none(old):
        return "Optional" in kind or kind.endswith("?")
    listed = "List[" in kind or kind.endswith("[]")
    if old.node().kind() == "prim::ListConstruct":
        return listed
    if "Tensor" in kind:
        return not listed and (
            scalars or not (old.node().kind() == "prim::Constant" and _is_number(old))
        )
    if listed:
        return old.node().kind() != "prim::Constant" or not _is_number(old)
    # A number, which a tensor with dimensions is not.
    return element_type(old) is None or old.type().dim() in (None, 0)


def _is_number(value: Any) -> bool:
    """Return whether a constant stands for a Python number or string.

    In a trace a Python number is a tensor without dimensions. A bool tensor without dimensions is a
    real tensor.
    """
    found = _value(value)
    of_tensor = isinstance(found, torch.Tensor) and not found.dim() and found.dtype != torch.bool
    return of_tensor or isinstance(found, (int, float, str))


def _value(constant: Any) -> Any:
    return constant.toIValue()


def _is_none(value: Any) -> bool:
    return value.node().mustBeNone() or str(value.type()) == "NoneType"


def element_type(value: Any) -> str | None:
    found: str | None = (
        value.type().scalarType() if isinstance(value.type(), torch._C.TensorType) else None
    )
    return found


def is_complex_constant(node: Any) -> bool:
    """Return whether a node is a constant of complex numbers, which ONNX has none of."""
    # A tensor of the model that is no weight and no buffer is one.
    return (
        node.kind() == "prim::Constant"
        and node.hasAttribute("value")
        and _is_complex(node.output())
    )


def _is_complex(value: Any) -> bool:
    return element_type(value) in _COMPLEX


def _described(value: Any) -> tuple[torch.dtype, int]:
    """Return the type and the number of dimensions; for complex numbers, those of pairs."""
    kind = element_type(value)
    rank = value.type().dim() if kind else None
    if kind is None or (rank is None and kind not in _KINDS):
        raise NotCallable(f"the type of one of its tensors is not known ({value.type()})")
    return _KINDS[_COMPLEX.get(kind, kind)], (rank or 0) + (kind in _COMPLEX)


_NAMES = {kind: name for name, kind in _KINDS.items()}
