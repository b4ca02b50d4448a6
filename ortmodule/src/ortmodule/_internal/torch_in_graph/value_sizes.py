"""Sizes in a traced graph that follow from values, such as those of `h[mask]`, and may be 0.

ONNX Runtime's kernels for CPUs divide by such a size, read beyond the tensor, or refuse it, mostly
in the backward pass. Torch computes the operators behind it (operator_translation.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ortmodule._internal.torch_in_graph.operator_calls import element_type_name_or_none
from ortmodule._internal.tracing import cross_entropy

# The size of a result follows from values of the first input.
_SELECTING = {
    "argwhere", "bincount", "masked_select", "nonzero", "nonzero_numpy", "_unique", "_unique2", "unique_consecutive",
    "unique_dim",
}  # fmt: skip
# The result has the size of the first input, whatever the others have.
_KEEPING = {
    "index_add", "index_copy", "index_fill", "index_put", "index_reduce", "masked_fill", "masked_scatter",
    "scatter", "scatter_add", "scatter_reduce",
}  # fmt: skip
# Operators whose size is set by numbers that they are given.
_SIZED_BY_NUMBERS = {
    "arange", "as_strided", "empty", "expand", "full", "narrow", "new_empty", "new_full", "new_ones", "new_zeros",
    "ones", "rand", "randn", "repeat", "reshape", "slice", "tile", "unfold", "view", "zeros",
}  # fmt: skip
# Numbers that are computed of numbers alone. Other numbers are computed of a tensor's values, such as
# `mask.sum()` in `h[: mask.sum()]`.
_NUMBERS = {
    "add", "ceil", "Constant", "device", "div", "dtype", "floor", "floor_divide", "Int", "IntImplicit", "is_pinned",
    "layout", "mul", "neg", "numel", "NumToTensor", "Param", "remainder", "rsub", "ScalarImplicit", "size", "sub", "to",
}  # fmt: skip
# ONNX Runtime moves nothing, too, where nothing is computed.
_MOVING = {"clone", "contiguous", "detach", "permute", "t", "to", "transpose", "unsqueeze"}


class ValueDependentSizes:
    """The values of one traced graph that have a size that follows from other values.

    empty: inputs of the graph that have no elements; graphs.py gives them a graph of their own.
    """

    def __init__(self, empty_inputs: Iterable[torch.Value]) -> None:
        self._follows_by_id = {value.unique(): True for value in empty_inputs}

    def node_reads_possibly_empty_tensor(self, traced_node: torch.Node) -> bool:
        """Return whether a node computes with a tensor that may be empty."""
        return _operator_name_without_underscore(traced_node) not in _MOVING and any(
            map(self._size_follows_from_values, _tensor_inputs_and_size_numbers(traced_node))
        )

    def _size_follows_from_values(self, traced_value: torch.Value) -> bool:
        """Return whether a size of a tensor, or a number, follows from values."""
        pending = [traced_value]
        while pending:
            current_value = pending[-1]
            sources = (
                []
                if current_value.unique() in self._follows_by_id
                else _values_that_set_size(current_value)
            )
            unknown_sources = [
                source for source in sources if source.unique() not in self._follows_by_id
            ]
            if unknown_sources:
                pending += unknown_sources
                continue
            pending.pop()
            if current_value.unique() not in self._follows_by_id:
                self._follows_by_id[current_value.unique()] = _is_size_computed_from_values(
                    current_value
                ) or any(self._follows_by_id[source.unique()] for source in sources)
        return self._follows_by_id[traced_value.unique()]


def _is_size_computed_from_values(traced_value: torch.Value) -> bool:
    """Return whether a tensor's size, or a number, is computed of values."""
    node = traced_value.node()
    name = _operator_name_without_underscore(node)
    inputs = list(node.inputs())
    if _is_number_or_scalar_tensor(traced_value):
        return name not in _NUMBERS
    if name == "index":
        return any(
            element_type_name_or_none(index) in ("Bool", "Byte")
            for index in inputs[1].node().inputs()
        )
    if name == "where":
        return len(inputs) == 1
    if name == "repeat_interleave":
        return len(inputs) < 2 or bool(
            element_type_name_or_none(inputs[1]) and not _is_number_or_scalar_tensor(inputs[1])
        )
    # Of the labels that are not ignored, cross_entropy.py always keeps one.
    return name in _SELECTING and cross_entropy.__file__ not in str(node.sourceRange())


def _values_that_set_size(traced_value: torch.Value) -> list[torch.Value]:
    """Return the values from which the size of a tensor follows, or a number."""
    node = traced_value.node()
    if _operator_name_without_underscore(node) in _KEEPING:
        return list(node.inputs())[:1]
    return list(
        node.inputs()
        if _is_number_or_scalar_tensor(traced_value)
        else _tensor_inputs_and_size_numbers(node)
    )


def _tensor_inputs_and_size_numbers(traced_node: torch.Node) -> Iterator[torch.Value]:
    """Yield the tensors that a node computes with, and the numbers that set the size of its result."""
    for value in traced_node.inputs():
        input_node = value.node()
        for element in (
            input_node.inputs() if input_node.kind() == "prim::ListConstruct" else [value]
        ):
            if _operator_name_without_underscore(
                traced_node
            ) in _SIZED_BY_NUMBERS or not _is_number_or_scalar_tensor(element):
                yield element


def _is_number_or_scalar_tensor(traced_value: torch.Value) -> bool:
    """Return whether a value has no size: a tensor without dimensions, or no tensor."""
    value_type = traced_value.type()
    if isinstance(value_type, torch._C.TensorType):
        return bool(value_type.dim() == 0)
    return not isinstance(value_type, torch._C.ListType)


def _operator_name_without_underscore(traced_node: torch.Node) -> str:
    return str(traced_node.kind()).rpartition("::")[2].rstrip("_")
