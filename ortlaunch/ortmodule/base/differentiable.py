"""Which ONNX operators ONNX Runtime 1.19.2 derives, and whether a gradient goes through what an export has written.

Its registry cannot be asked, so the names are listed here; what the list says too much is found when ORT builds the
gradient (operator_translation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

_NAMES = """
    ATen Abs Add AveragePool BatchNormalization BiasGelu Cast Clip Concat Constant Conv ConvTranspose Cos Div Dropout
    Erf Exp Expand FastGelu Flatten GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool Identity LSTM
    LayerNormalization LeakyRelu Log LogSoftmax MatMul MatMulBnb4 Max MaxPool Min Mul Neg Pad Pow PythonOp QuickGelu
    Reciprocal ReduceL2 ReduceLogSumExp ReduceMean ReduceSum Relu Reshape Resize ScatterElements ScatterND Sigmoid
    SimplifiedLayerNormalization Sin Slice Softmax SoftmaxCrossEntropyLoss SoftmaxCrossEntropyLossInternal Split Sqrt
    Squeeze Sub Tanh Tile TopK Transpose Trilu Unsqueeze Where
"""
_DERIVED = frozenset(_NAMES.split())
_EVERY = range(99)
STOPS: dict[str, Sequence[int]] = {
    "Pow": (1,),
    "Gather": (1,),
    "GatherElements": (1,),
    "GatherND": (1,),
    "Reshape": (1,),
    "Expand": (1,),
    "Dropout": (1, 2),
    "Slice": (1, 2, 3, 4),
    "SoftmaxCrossEntropyLoss": (1, 2),
    "SoftmaxCrossEntropyLossInternal": (1, 2, 3),
    "ScatterElements": (1,),
    "ScatterND": (1,),
    "Where": (0,),
    "BatchNormalization": (3, 4),
    "Clip": (1, 2),
    "Pad": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Resize": (1, 2, 3),
    "Split": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "ReduceSum": (1,),
    "Trilu": (1,),
    **dict.fromkeys(
        (
            "And", "ArgMax", "ArgMin", "ConstantOfShape", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN",
            "Less", "LessOrEqual", "NonZero", "Not", "OneHot", "Or", "RandomNormalLike", "RandomUniformLike", "Range",
            "Shape", "Size", "Xor",
        ),
        _EVERY,
    ),
}  # fmt: skip
# Where ORT stops and torch does not: the exponent, the bounds.
_CUT: dict[str, Sequence[int]] = {"Pow": (1,), "Clip": (1, 2)}
_PARTLY = {*_CUT, "ScatterElements", "ScatterND"}
SILENT = {*_PARTLY, "LeakyRelu"}
"""Through which a gradient may come as another one, without a word of ORT's."""
_FLOATS = ("Float", "Double", "Half", "BFloat16")


class Gradients:
    """Follows, in a graph that is being written, what a gradient of the model's weights and inputs goes through.

    is_trained: whether an input of the graph, by name, gets a gradient.
    device: cpu or cuda; their kernels differ.
    """

    def __init__(self, is_trained: Callable[[str], bool], device: str) -> None:
        self._is_trained = is_trained
        self._device = device
        self._known: dict[int, bool] = {}

    def reach(self, value: torch.Value) -> bool:
        """Whether a value of the graph depends, with a gradient, on something trained."""
        pending = [value]
        while pending:
            found = pending[-1]
            ask = (
                []
                if found.unique() in self._known
                else [i for i in _given(found) if i.unique() not in self._known]
            )
            if ask:
                pending += ask
                continue
            pending.pop()
            if found.unique() not in self._known:
                self._known[found.unique()] = self._one(found)
        return self._known[value.unique()]

    def _one(self, value: torch.Value) -> bool:
        if value.node().kind() == "prim::Param":
            return self._is_trained(value.debugName())
        return any(self._known[given.unique()] for given in _given(value))

    def lost(self, written: Sequence[torch.Node], outputs: Iterable[torch.Value | None]) -> str:
        """The first ONNX operator among nodes just written through which ORT's gradient would not come; or empty."""
        if all(_is_derived(node, self._device) and _name(node) not in _PARTLY for node in written):
            return ""
        own = {value.unique() for node in written for value in node.outputs()}
        pending = [value for value in outputs if value is not None and _is_float(value)]
        seen: set[int] = set()
        while pending:
            value = pending.pop()
            if value.unique() in seen or value.unique() not in own:
                continue
            seen.add(value.unique())
            given = list(_given(value))
            lost = self._cut(value.node()) if _is_derived(value.node(), self._device) else given
            if any(map(self.reach, lost)):
                return _name(value.node())
            pending += given
        return ""

    def _cut(self, node: torch.Node) -> list[torch.Value]:
        """Inputs of an operator that ORT derives, whose gradient it leaves out or takes for another."""
        name = _name(node)
        inputs = list(node.inputs())
        if name == "Pow" and not _is_scalar(
            inputs[1]
        ):  # that of a power that is broadcast is not summed up
            return inputs
        if name in ("ScatterElements", "ScatterND") and "reduction" in node.attributeNames():
            return {"none": [], "add": inputs[:1]}.get(_text(node, "reduction", "none"), inputs)
        return [inputs[place] for place in _CUT.get(name, ()) if place < len(inputs)]


def is_valid(node: torch.Node) -> bool:
    """Whether ONNX has what the exporter wrote: it writes a LayerNorm without weights, and negative dimensions."""
    if _name(node) == "Transpose" and "perm" in node.attributeNames():
        return min(getattr(node, "is")("perm"), default=0) >= 0
    return _name(node) != "LayerNormalization" or not any(
        given.node().mustBeNone() for given in node.inputs()
    )


def _is_derived(node: torch.Node, device: str) -> bool:
    """Also by what ORT's builders and kernels of gradients do not know of their operator."""
    name = _name(node)
    if (
        name == "LeakyRelu" and "alpha" in node.attributeNames()
    ):  # it looks at the sign of what came out
        return bool(node.f("alpha") >= 0)
    if name in ("GRU", "LSTM"):
        return _text(node, "direction", "forward") == "forward"
    if name == "LayerNormalization":  # without a bias the gradient has two outputs of one name
        return len(list(node.inputs())) > 2 and is_valid(node)
    if name in ("ReduceL2", "ReduceLogSumExp"):  # their gradient is an Unsqueeze of an older opset
        return "keepdims" not in node.attributeNames() or bool(node.i("keepdims"))
    if name == "Pad":
        return _text(node, "mode", "constant") == "constant"
    if name in (
        "AveragePool",
        "MaxPool",
    ):  # of other ranks, or with places, a wrong shape or the end of the process
        return _rank(node) == 4 and node.outputsSize() == 1
    if name == "ConvTranspose":
        return device != "cpu"
    if name == "Conv" and "group" in node.attributeNames() and int(node.i("group")) > 1:
        return device != "cpu" or _rank(node) != 5  # which overwrites other tensors
    return name in _DERIVED


def _text(node: torch.Node, attribute: str, default: str) -> str:
    return str(node.s(attribute)) if attribute in node.attributeNames() else default


def _rank(node: torch.Node) -> int | None:
    kind = next(node.inputs()).type()
    rank: int | None = kind.dim() if isinstance(kind, torch._C.TensorType) else None
    return rank


def _given(value: torch.Value) -> list[torch.Value]:
    """What a value is computed of, as far as a gradient goes that way."""
    node = value.node()
    if any(True for _ in node.blocks()):  # an If, whose branches take what they want from around it
        return [
            given for block in node.blocks() for inner in block.nodes() for given in inner.inputs()
        ]
    stops = _EVERY if _is_cast_to_number(node) or _is_detached(node) else STOPS.get(_name(node), ())
    return [given for place, given in enumerate(node.inputs()) if place not in stops]


def _is_scalar(value: torch.Value) -> bool:
    """Whether a value is one number that is known and not 0."""
    node = value.node()
    while node.kind() == "onnx::Cast":
        node = node.input().node()
    number = (
        node.t("value")
        if node.kind() == "onnx::Constant" and "value" in node.attributeNames()
        else torch.zeros(0)
    )
    return bool(number.numel() == 1 and number.item() != 0)


def _is_cast_to_number(node: torch.Node) -> bool:
    return bool(node.kind() == "onnx::Cast" and node.i("to") not in (1, 10, 11, 16))


def _is_detached(node: torch.Node) -> bool:
    """Whether it is what exact_forms.detach writes."""
    return _name(node) == "ATen" and _text(node, "operator", "") == "clone"


def _is_float(value: torch.Value) -> bool:
    kind = value.type().scalarType() if isinstance(value.type(), torch._C.TensorType) else None
    return kind is None or kind in _FLOATS


def _name(node: torch.Node) -> str:
    return str(node.kind()).rpartition("::")[2]
