"""Calls of torch's CPU kernels from a training graph, for operators at which ORT is slow or wrong.

ORT computes these slower, mostly on one thread: cross entropy, dropout, GELU, SiLU, LayerNorm,
convolutions, and the gradients of GELU, SiLU, LayerNorm, RMSNorm, gather and of large biases. Large
matmuls, with the addition of their bias, are included unless `torch_matmul` is false. Sigmoid is
included because ORT returns 0 from -18 downwards, so that its logarithm is infinite.

ORT's nodes are replaced by torch's operators (ATen nodes) with the same inputs and outputs. A node
in an unexpected form stays ORT's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.graph import replace_nodes
from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.settings import Settings, settings_of
from ortlaunch.ortmodule.base.source_guard import EVALUATION, TRAINING, owner
from ortlaunch.ortmodule.torch_in_graph import attention, dropout, own_operators, rms_norm_gradient

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Manager

WIDTH = 64
"""The least size of one matrix, in both dimensions, for torch to compute the model's matmuls.

A call of torch costs some microseconds. Measured at widths 64 and 128: no slower than ORT's matmul.
"""
# It replaces a node, and returns whether it did.
_Kernel = Callable[["Rewriting", "onnx.NodeProto"], bool]
# torch's codes of the reductions, and of the type float32.
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_FLOAT = 6
# torch's default ignore_index.
_IGNORED = -100


def call_torch_kernels() -> None:
    """From now on, replace slow CPU kernels in each graph that ORT builds.

    Its cross entropy is replaced too, because it accepts labels outside the classes.
    """
    wrap_method(owner(TRAINING), "_build_graph", _building)
    wrap_method(owner(EVALUATION), "_build_graph", _building_evaluation)


def torch_products(settings: Settings) -> bool:
    """Return whether torch computes matmuls: unless they are refused, or recomputed.

    Even where ORT's matmul alone is as fast, a graph that mixes both is slower, because the threads
    of each library still wait for work, on the same cores, while the other computes. With memory
    optimization the result is False, because ORT's recomputation knows only its own matmuls.
    """
    recomputes = settings.memory_optimization or settings.memory_optimization_config
    return settings.torch_matmul is not False and not recomputes


def _building(original: AnyFunction, manager: Manager, *args: object) -> None:
    original(manager, *args)
    if manager._device.type != "cpu":
        return
    products = torch_products(settings_of(manager))
    # torch_products checks only the settings. Gradient checkpointing in the model also enables
    # recomputation.
    if products and manager._runtime_options.memory_optimizer_is_enabled():
        tally.note(
            "torch_matmul is off: ONNX Runtime's recomputation knows its own matrix products only"
        )
        products = False
    recomputes = manager._runtime_options.memory_optimizer_is_enabled()
    replace(manager._onnx_models.optimized_model.graph, products, recomputes)


def _building_evaluation(original: AnyFunction, manager: Manager, *args: object) -> None:
    original(manager, *args)
    if manager._device.type == "cpu":
        _replace(manager._onnx_models.optimized_model.graph, _CHECKED)


def replace(graph: onnx.GraphProto, products: bool, recomputes: bool = False) -> None:
    """Replace nodes of ORT by torch's operators in an onnx.GraphProto.

    Args:
        graph: a graph with a forward and a backward pass; changed in place.
        products: whether matmuls are replaced.
        recomputes: whether the backward pass recomputes parts of the forward pass. If so, the
            operators that it recomputes are not replaced: ORT merges equal calls of torch, which
            keeps their results in memory.
    """
    wide = _wide(graph)
    recomputable: dict[str, _Kernel] = {
        "Gelu": lambda graph, node: _function(graph, node, "gelu", ""),
        "QuickGelu": _silu,
        "FastGelu": _fast_gelu,
        "LayerNormalization": _norm,
        "Conv": _convolution,
        "Dropout": _dropout,
        "DropoutGrad": _dropout_gradient,
    }
    kernels: dict[str, _Kernel] = {
        **_CHECKED,
        "SoftmaxCrossEntropyLossInternalGrad": _loss_gradient,
        "QuickGeluGrad": _silu,
        "GeluGrad": _gelu_gradient,
        "FastGeluGrad": _fast_gelu,
        "LayerNormalizationGrad": _norm_gradient,
        "SimplifiedLayerNormalizationGrad": _rms_norm_gradient,
        "GatherElementsGrad": _gather_gradient,
        "ConvGrad": _convolution,
        "ATen": attention.share_masks,
        **({} if recomputes else recomputable),
        **({"ReduceSum": _sum_of_gradients} if wide else {}),
        **(
            {**dict.fromkeys(("MatMul", "FusedMatMul", "Gemm"), _product), "Add": _bias}
            if products and wide
            else {}
        ),
    }
    _replace(graph, kernels)


def _replace(graph: onnx.GraphProto, kernels: Mapping[str, _Kernel]) -> None:
    rewriting = Rewriting(graph)
    for node in graph.node:
        kernel = kernels.get(node.op_type)
        if not rewriting.made.intersection(node.output) and not (
            kernel and kernel(rewriting, node)
        ):
            rewriting.nodes.append(node)
    replace_nodes(graph, rewriting.living())
    graph.value_info.extend(rewriting.unknown_values())


class Rewriting:
    """The original graph, and the nodes of the graph that replaces it."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.types = {
            v.name: v.type.tensor_type for v in (*graph.value_info, *graph.input, *graph.output)
        }
        self.outputs = {value.name for value in graph.output}
        self.makers = {name: node for node in graph.node for name in node.output}
        self.users: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self.users.setdefault(name, []).append(node)
        self.nodes: list[onnx.NodeProto] = []
        # The outputs of torch's operators, and the calls by their first output.
        self.made: set[str] = set()
        self.calls: dict[str, onnx.NodeProto] = {}
        # The outputs of type uint8. `unknown_values` gives all others one common type.
        self.masks: set[str] = set()

    def call(self, operator: str, inputs: Sequence[object], outputs: Sequence[str]) -> None:
        """Add a call of torch's `operator`.

        Args:
            operator: the operator's name without `aten::`, or with its own namespace; after a dot,
                the name of its overload.
            inputs: names of tensors, Python numbers, lists of numbers, or "" for a missing input.
            outputs: the names of the outputs.
        """
        from onnx import helper

        operator, _, overload = operator.partition(".")
        name = f"{outputs[0]}_{operator}"
        names = [
            value if isinstance(value, str) else self._constant(f"{name}_{i}", value)
            for i, value in enumerate(inputs)
        ]
        node = helper.make_node(
            "ATen",
            names,
            outputs,
            name,
            None,
            "org.pytorch.aten",
            operator=operator,
            overload_name=overload,
        )
        self.nodes.append(node)
        self.made.update(outputs)
        self.calls[outputs[0]] = node

    def shape(self, tensor: str, name: str) -> str:
        """Add a Shape node for a tensor; return its output's name."""
        from onnx import helper

        self.nodes.append(helper.make_node("Shape", [tensor], [name], name))
        return name

    def _constant(self, name: str, value: Any) -> str:
        from onnx import TensorProto, helper

        values = value if isinstance(value, list) else [value]
        kind = {bool: TensorProto.BOOL, float: TensorProto.FLOAT}.get(
            type(values[0]), TensorProto.INT64
        )
        tensor = helper.make_tensor(
            name, kind, [len(values)] if isinstance(value, list) else [], values
        )
        self.nodes.append(helper.make_node("Constant", [], [name], name, value=tensor))
        return name

    def rank(self, name: str) -> int | None:
        """Return the number of dimensions of a float32 tensor; None if type or rank is unknown."""
        found = self.types.get(name)
        if found is None or found.elem_type != 1 or not found.HasField("shape"):
            return None
        return len(found.shape.dim)

    def size(self, name: str) -> list[int]:
        """Return the size of each dimension of a float32 tensor, 0 where the graph lacks it."""
        return [one.dim_value for one in self.types[name].shape.dim] if self.rank(name) else []

    def living(self) -> list[onnx.NodeProto]:
        """Return the nodes, but leave out each Transpose whose output no node uses."""
        used = {name for node in self.nodes for name in node.input} | self.outputs
        return [
            node for node in self.nodes if node.op_type != "Transpose" or node.output[0] in used
        ]

    def unknown_values(self, kind: int = 1) -> list[onnx.ValueInfoProto]:
        """Return type declarations for outputs of torch's operators whose type the graph lacks.

        Args:
            kind: ONNX's code of the type of all outputs but masks (default: float32).
        """
        from onnx import TensorProto, helper

        unknown = sorted(name for name in self.made - self.types.keys() if name)
        kinds = [TensorProto.UINT8 if name in self.masks else kind for name in unknown]
        return [
            helper.make_tensor_value_info(name, kind, None) for name, kind in zip(unknown, kinds)
        ]


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _input(node: onnx.NodeProto, place: int) -> str:
    return str(node.input[place]) if len(node.input) > place else ""


# ------------------------------------------------------------------------------------ cross entropy


def _fits(graph: Rewriting, forward: onnx.NodeProto) -> bool:
    """Return whether the loss has one row of scores for each label."""
    return 2 in (graph.rank(forward.input[0]), graph.rank(forward.output[1]))


def _loss(graph: Rewriting, node: onnx.NodeProto) -> bool:
    if not _fits(graph, node):
        return False
    loss, logs = node.output
    graph.call("_log_softmax", [node.input[0], 1, False], [logs])
    weight = _input(node, 2)
    inputs = [logs, node.input[1], weight, _reduction(node), _input(node, 3) or _IGNORED]
    # The second output, the labels' total weight, is an input of nll_loss_backward.
    graph.call("nll_loss_forward", inputs, [loss, _total(node)])
    return True


def _loss_gradient(graph: Rewriting, node: onnx.NodeProto) -> bool:
    gradient, logs, labels = node.input[:3]
    forward = graph.makers.get(logs)
    if (
        forward is None
        or forward.op_type != "SoftmaxCrossEntropyLossInternal"
        or not _fits(graph, forward)
    ):
        return False
    of_labels = f"{node.output[0]}_of_labels"
    inputs = [
        gradient,
        logs,
        labels,
        _input(forward, 2),
        _reduction(forward),
        _input(node, 4) or _IGNORED,
        _total(forward),
    ]
    graph.call("nll_loss_backward", inputs, [of_labels])
    graph.call("_log_softmax_backward_data", [of_labels, logs, 1, _FLOAT], [node.output[0]])
    return True


def _total(forward: onnx.NodeProto) -> str:
    return f"{forward.output[0]}_total_weight"


def _reduction(node: onnx.NodeProto) -> int:
    return _REDUCTIONS[_attributes(node).get("reduction", b"mean").decode()]


# ------------------------------------------------------------------------------------------ dropout


def _dropout(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace a dropout if its mask is used only by its gradient."""
    known = graph.types.get(node.input[0])
    mask = node.output[1] if len(node.output) > 1 else f"{node.output[0]}_mask"
    only_gradient = all(user.op_type == "DropoutGrad" for user in graph.users.get(mask, ()))
    if (
        (known is not None and known.elem_type != 1)
        or mask in graph.outputs
        or not (only_gradient and _input(node, 2))
    ):
        return False
    dropout.define_operators()
    graph.masks.add(_bytes(mask))
    graph.call(
        dropout.FORWARD,
        [node.input[0], _input(node, 1) or 0.5, node.input[2]],
        [node.output[0], _bytes(mask)],
    )
    return True


def _dropout_gradient(graph: Rewriting, node: onnx.NodeProto) -> bool:
    if _bytes(node.input[1]) not in graph.masks:
        return False
    inputs = [node.input[0], _bytes(node.input[1]), _input(node, 2) or 0.5, node.input[3]]
    graph.call(dropout.BACKWARD, inputs, node.output)
    return True


def _bytes(mask: str) -> str:
    return f"{mask}_bytes"


# --------------------------------------------- GELU, LayerNorm, gather, convolutions


def _function(graph: Rewriting, node: onnx.NodeProto, operator: str, *options: str) -> bool:
    # Of a gradient, the last input is that of the forward pass, whose type is known more often.
    known = graph.types.get(node.input[-1])
    # `unknown_values` declares the outputs as float32.
    if known is not None and known.elem_type != 1:
        return False
    graph.call(operator, [*node.input, *options], node.output)
    return True


def _gelu_gradient(graph: Rewriting, node: onnx.NodeProto) -> bool:
    graph.call("gelu_backward", [*node.input, ""], node.output)
    return True


def _fast_gelu(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace a GELU by its tanh form, or its gradient, without the bias that ORT can add."""
    gradient = node.op_type == "FastGeluGrad"
    if len(node.input) != 1 + gradient:
        return False
    own_operators.define_operators()
    operator = own_operators.GELU_BACKWARD if gradient else own_operators.GELU
    return _function(graph, node, operator)


def _silu(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace x * sigmoid(alpha * x) or its gradient, where alpha is 1."""
    operator = "silu" if node.op_type == "QuickGelu" else "silu_backward"
    return _attributes(node).get("alpha") == 1.0 and _function(graph, node, operator)


def _norm(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace a LayerNorm over the last dimension."""
    x, scale = node.input[:2]
    settings = _attributes(node)
    last = settings.get("axis", -1) in (-1, (graph.rank(x) or 0) - 1)
    if not (last and graph.rank(scale) == 1):
        return False
    # The mean and the inverse of the deviation are optional in ONNX only.
    names = [name or f"{node.name}_{place}" for place, name in enumerate([*node.output, "", ""])]
    shape = graph.shape(scale, f"{names[0]}_shape")
    inputs = [x, shape, scale, _input(node, 2), settings.get("epsilon", 1e-5)]
    graph.call("native_layer_norm", inputs, names[:3])
    return True


def _norm_gradient(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace the gradient of a LayerNorm over the last dimension."""
    gradient, x, scale, mean, inverse = node.input
    last = _attributes(node).get("axis", -1) in (-1, (graph.rank(x) or 0) - 1)
    if not (last and graph.rank(scale) == 1 and len(node.output) == 3 and all(node.output)):
        return False
    inputs = [
        gradient,
        x,
        graph.shape(scale, f"{node.output[0]}_shape"),
        mean,
        inverse,
        scale,
        # The bias, of which torch uses only the size.
        scale,
        [True] * 3,
    ]
    graph.call("native_layer_norm_backward", inputs, node.output)
    return True


def _rms_norm_gradient(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace the gradient of an RMSNorm over the last dimension."""
    x, scale = node.input[1:3]
    last = _attributes(node).get("axis", -1) in (-1, (graph.rank(x) or 0) - 1)
    if not (last and graph.rank(scale) == 1 and len(node.output) == 2 and all(node.output)):
        return False
    rms_norm_gradient.define_operators()
    graph.call(rms_norm_gradient.BACKWARD, [*node.input], node.output)
    return True


def _gather(graph: Rewriting, node: onnx.NodeProto) -> bool:
    # `unknown_values` declares an output as float32.
    if graph.rank(node.input[0]) is None and node.output[0] not in graph.types:
        return False
    axis = _attributes(node).get("axis", 0)
    graph.call("gather", [node.input[0], axis, node.input[1], False], node.output)
    return True


def _gather_gradient(graph: Rewriting, node: onnx.NodeProto) -> bool:
    gradient, shape, indices = node.input
    if graph.rank(gradient) is None:
        return False
    own_operators.define_operators()
    axis = _attributes(node).get("axis", 0)
    graph.call(own_operators.GATHER_BACKWARD, [gradient, shape, indices, axis], node.output)
    return True


def _convolution(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace a convolution or its gradient, if it pads both ends alike."""
    settings = _attributes(node)
    size = len(settings.get("kernel_shape", ()))
    pads = settings.get("pads", [0] * 2 * size)
    plain = settings.get("auto_pad", b"NOTSET") == b"NOTSET" and pads[:size] == pads[size:]
    weight = node.input[1 + (node.op_type == "ConvGrad")]
    if not (size and plain and graph.rank(weight) == size + 2):
        return False
    form = [settings.get("strides", [1] * size), pads[:size], settings.get("dilations", [1] * size)]
    groups = settings.get("group", 1)
    if node.op_type == "Conv":
        rest = [*form, False, [0] * size, groups]
        graph.call("convolution", [*node.input[:2], _input(node, 2), *rest], node.output)
        return True
    own_operators.define_operators()
    names = [*node.output, "", ""][:3]
    wanted = sum(1 << place for place, name in enumerate(names) if name)
    outputs = [name or f"{node.name}_{place}" for place, name in enumerate(names)]
    graph.call(own_operators.CONVOLUTION_BACKWARD, [*node.input, *form, groups, wanted], outputs)
    return True


# ------------------------------------------------------------------------------------------ matmuls


def _wide(graph: onnx.GraphProto) -> bool:
    """Return whether a graph input or initializer is a matrix of at least WIDTH x WIDTH."""
    shapes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input]
    shapes += [list(tensor.dims) for tensor in graph.initializer]
    return any(len(shape) == 2 and min(shape) >= WIDTH for shape in shapes)


def _product(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace a matmul op(a) op(b), where op may transpose.

    b must be a matrix. If a is transposed, a must be a matrix too. If a is transposed, and the only
    user of the result is a Transpose, the call includes that Transpose. A Gemm may add a bias of
    one dimension, unless a is transposed.
    """
    a, b = node.input[:2]
    bias = _input(node, 2)
    settings = _attributes(node)
    ranks = (2, 2) if node.op_type == "Gemm" else (graph.rank(a), graph.rank(b))
    plain = (
        settings.get("alpha", 1.0) == 1.0
        and not settings.get("transBatchA")
        and not settings.get("transBatchB")
    )
    if ranks[1] != 2 or not plain or (settings.get("transA") and ranks[0] != 2):
        return False
    b, over_b = _untransposed(graph, b, settings.get("transB", 0))
    a, over_a = _untransposed(graph, a, settings.get("transA", 0)) if ranks[0] == 2 else (a, False)
    if bias and (over_a or settings.get("beta", 1.0) != 1.0 or graph.rank(bias) != 1):
        return False
    if not over_a:
        if over_b:
            graph.call("linear", [a, b, bias], node.output)
        elif bias:
            # As transformers' Conv1D writes it.
            graph.call("addmm", [bias, a, b, "", ""], node.output)
        else:
            graph.call("matmul", [a, b], node.output)
        return True
    # tensordot contracts over either dimension of a matrix, so no matrix is copied for a transpose.
    users = graph.users.get(node.output[0], [])
    if len(users) == 1 and users[0].op_type == "Transpose" and node.output[0] not in graph.outputs:
        graph.call("tensordot", [b, a, [int(over_b)], [0]], users[0].output)
    else:
        graph.call("tensordot", [a, b, [0], [int(over_b)]], node.output)
    return True


def _bias(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Let a matmul by torch add the bias that the node adds to its result."""
    for product, bias in (node.input, reversed(node.input)):
        call = graph.calls.get(product)
        if (
            call is not None
            and call.attribute[0].s == b"linear"
            # A Gemm's bias is there already.
            and not call.input[2]
            and graph.users[product] == [node]
            and product not in graph.outputs
            and graph.rank(bias) == 1
            and graph.size(bias) == graph.size(call.input[1])[:1] != [0]
        ):
            call.input[2] = bias
            call.output[0] = node.output[0]
            graph.made.add(node.output[0])
            return True
    return False


def _sum_of_gradients(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace the sum over samples that is the gradient of a bias."""
    known = graph.types.get(node.output[0])
    if (
        node.output[0] not in graph.outputs
        or known is None
        or known.elem_type != 1
        or not _input(node, 1)
        or _attributes(node).get("keepdims", 1)
    ):
        return False
    # torch's missing last input is the type of the result.
    graph.call("sum.dim_IntList", [*node.input, False, ""], node.output)
    return True


def _untransposed(graph: Rewriting, name: str, transposed: int) -> tuple[str, bool]:
    """Skip Transpose nodes above a matrix.

    Return the original matrix, and whether the product needs its transpose.
    """
    over = bool(transposed)
    while (
        name not in graph.made
        and name in graph.makers
        and graph.makers[name].op_type == "Transpose"
    ):
        name = graph.makers[name].input[0]
        over = not over
    return name, over


# In evaluation graphs, too: torch's checks of labels and indices, and its sigmoid.
_CHECKED: dict[str, _Kernel] = {
    "SoftmaxCrossEntropyLossInternal": _loss,
    "GatherElements": _gather,
    "Sigmoid": lambda graph, node: _function(graph, node, "sigmoid"),
}
