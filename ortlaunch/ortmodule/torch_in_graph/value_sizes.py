"""Sizes in a traced graph that follow from values, such as those of `h[mask]`, and may be 0.

ONNX Runtime's kernels for CPUs divide by such a size, read beyond the tensor, or refuse it, mostly
in the backward pass. Torch computes the operators behind it (operator_translation.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ortlaunch.ortmodule.torch_in_graph.operator_calls import element_type
from ortlaunch.ortmodule.tracing import cross_entropy

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


class ValueSizes:
    """The values of one traced graph that have a size that follows from other values.

    empty: inputs of the graph that have no elements; graphs.py gives them a graph of their own.
    """

    def __init__(self, empty: Iterable[torch.Value]) -> None:
        self._known = {value.unique(): True for value in empty}

    def reach(self, node: torch.Node) -> bool:
        """Return whether a node computes with a tensor that may be empty."""
        return _name(node) not in _MOVING and any(map(self._follows, _sources(node)))

    def _follows(self, value: torch.Value) -> bool:
        """Return whether a size of a tensor, or a number, follows from values."""
        pending = [value]
        while pending:
            found = pending[-1]
            sources = [] if found.unique() in self._known else _sources_of(found)
            unknown = [source for source in sources if source.unique() not in self._known]
            if unknown:
                pending += unknown
                continue
            pending.pop()
            if found.unique() not in self._known:
                self._known[found.unique()] = _selects(found) or any(
                    self._known[source.unique()] for source in sources
                )
        return self._known[value.unique()]


def _selects(value: torch.Value) -> bool:
    """Return whether a tensor's size, or a number, is computed of values."""
    node = value.node()
    name = _name(node)
    inputs = list(node.inputs())
    if _is_number(value):
        return name not in _NUMBERS
    if name == "index":
        return any(element_type(index) in ("Bool", "Byte") for index in inputs[1].node().inputs())
    if name == "where":
        return len(inputs) == 1
    if name == "repeat_interleave":
        return len(inputs) < 2 or bool(element_type(inputs[1]) and not _is_number(inputs[1]))
    # Of the labels that are not ignored, cross_entropy.py always keeps one.
    return name in _SELECTING and cross_entropy.__file__ not in str(node.sourceRange())


def _sources_of(value: torch.Value) -> list[torch.Value]:
    """Return the values from which the size of a tensor follows, or a number."""
    node = value.node()
    if _name(node) in _KEEPING:
        return list(node.inputs())[:1]
    return list(node.inputs() if _is_number(value) else _sources(node))


def _sources(node: torch.Node) -> Iterator[torch.Value]:
    """Yield the tensors that a node computes with, and the numbers that set the size of its result."""
    for value in node.inputs():
        inner = value.node()
        for one in inner.inputs() if inner.kind() == "prim::ListConstruct" else [value]:
            if _name(node) in _SIZED_BY_NUMBERS or not _is_number(one):
                yield one


def _is_number(value: torch.Value) -> bool:
    """Return whether a value has no size: a tensor without dimensions, or no tensor."""
    kind = value.type()
    if isinstance(kind, torch._C.TensorType):
        return bool(kind.dim() == 0)
    return not isinstance(kind, torch._C.ListType)


def _name(node: torch.Node) -> str:
    return str(node.kind()).rpartition("::")[2].rstrip("_")
