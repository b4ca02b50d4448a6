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
from ortlaunch.ortmodule.base.settings import Settings, attached_settings
from ortlaunch.ortmodule.base.source_guard import EVALUATION, TRAINING, function_owner
from ortlaunch.ortmodule.torch_in_graph import attention, dropout, own_operators, rms_norm_gradient

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Manager

LEAST_MATRIX_WIDTH = 64
"""The least size of one matrix, in both dimensions, for torch to compute the model's matmuls.

A call of torch costs some microseconds. Measured at widths 64 and 128: no slower than ORT's matmul.
"""
# It replaces a node, and returns whether it did.
_Kernel = Callable[["Rewriting", "onnx.NodeProto"], bool]
# torch's codes of the reductions, and of the type float32.
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_FLOAT32_CODE = 6
# torch's default ignore_index.
_DEFAULT_IGNORE_INDEX = -100


def call_torch_kernels() -> None:
    """From now on, replace slow CPU kernels in each graph that ORT builds.

    Its cross entropy is replaced too, because it accepts labels outside the classes.
    """
    wrap_method(function_owner(TRAINING), "_build_graph", _build_with_torch_kernels)
    wrap_method(function_owner(EVALUATION), "_build_graph", _build_checked_evaluation)


def torch_computes_products(settings: Settings) -> bool:
    """Return whether torch computes matmuls: unless they are refused, or recomputed.

    Even where ORT's matmul alone is as fast, a graph that mixes both is slower, because the threads
    of each library still wait for work, on the same cores, while the other computes. With memory
    optimization the result is False, because ORT's recomputation knows only its own matmuls.
    """
    has_recomputation = settings.memory_optimization or settings.memory_optimization_config
    return settings.torch_matmul is not False and not has_recomputation


def _build_with_torch_kernels(original: AnyFunction, manager: Manager, *args: object) -> None:
    original(manager, *args)
    if manager._device.type != "cpu":
        return
    replaces_products = torch_computes_products(attached_settings(manager))
    # torch_computes_products checks only the settings. Gradient checkpointing in the model also enables
    # recomputation.
    if replaces_products and manager._runtime_options.memory_optimizer_is_enabled():
        tally.add_note_once(
            "torch_matmul is off: ONNX Runtime's recomputation knows its own matrix products only"
        )
        replaces_products = False
    recomputes = manager._runtime_options.memory_optimizer_is_enabled()
    replace_training_kernels(
        manager._onnx_models.optimized_model.graph, replaces_products, recomputes
    )


def _build_checked_evaluation(original: AnyFunction, manager: Manager, *args: object) -> None:
    original(manager, *args)
    if manager._device.type == "cpu":
        _replace_nodes_by_kernels(manager._onnx_models.optimized_model.graph, _CHECKED_KERNELS)


def replace_training_kernels(
    graph: onnx.GraphProto, replaces_products: bool, recomputes: bool = False
) -> None:
    """Replace nodes of ORT by torch's operators in an onnx.GraphProto.

    Args:
        graph: a graph with a forward and a backward pass; changed in place.
        replaces_products: whether matmuls are replaced.
        recomputes: whether the backward pass recomputes parts of the forward pass. If so, the
            operators that it recomputes are not replaced: ORT merges equal calls of torch, which
            keeps their results in memory.
    """
    has_wide_matrix = _has_wide_matrix(graph)
    recomputable: dict[str, _Kernel] = {
        "Gelu": lambda graph, node: _replace_by_function(graph, node, "gelu", ""),
        "QuickGelu": _replace_silu,
        "FastGelu": _replace_fast_gelu,
        "LayerNormalization": _replace_layer_norm,
        "Conv": _replace_convolution,
        "Dropout": _replace_dropout,
        "DropoutGrad": _replace_dropout_gradient,
    }
    kernels: dict[str, _Kernel] = {
        **_CHECKED_KERNELS,
        "SoftmaxCrossEntropyLossInternalGrad": _replace_loss_gradient,
        "QuickGeluGrad": _replace_silu,
        "GeluGrad": _replace_gelu_gradient,
        "FastGeluGrad": _replace_fast_gelu,
        "LayerNormalizationGrad": _replace_layer_norm_gradient,
        "SimplifiedLayerNormalizationGrad": _replace_rms_norm_gradient,
        "GatherElementsGrad": _replace_gather_gradient,
        "ConvGrad": _replace_convolution,
        "ATen": attention.merge_equal_mask_nodes,
        **({} if recomputes else recomputable),
        **({"ReduceSum": _replace_bias_gradient_sum} if has_wide_matrix else {}),
        **(
            {
                **dict.fromkeys(("MatMul", "FusedMatMul", "Gemm"), _replace_product),
                "Add": _add_bias_to_product,
            }
            if replaces_products and has_wide_matrix
            else {}
        ),
    }
    _replace_nodes_by_kernels(graph, kernels)


def _replace_nodes_by_kernels(
    graph: onnx.GraphProto, kernel_by_operator: Mapping[str, _Kernel]
) -> None:
    rewriting = Rewriting(graph)
    for node in graph.node:
        kernel = kernel_by_operator.get(node.op_type)
        if not rewriting.torch_outputs.intersection(node.output) and not (
            kernel and kernel(rewriting, node)
        ):
            rewriting.nodes.append(node)
    replace_nodes(graph, rewriting.nodes_in_use())
    graph.value_info.extend(rewriting.untyped_output_infos())


class Rewriting:
    """The original graph, and the nodes of the graph that replaces it."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.type_by_name = {
            v.name: v.type.tensor_type for v in (*graph.value_info, *graph.input, *graph.output)
        }
        self.output_names = {value.name for value in graph.output}
        self.node_by_output = {name: node for node in graph.node for name in node.output}
        self.users_by_name: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self.users_by_name.setdefault(name, []).append(node)
        self.nodes: list[onnx.NodeProto] = []
        # The outputs of torch's operators, and the calls by their first output.
        self.torch_outputs: set[str] = set()
        self.call_by_output: dict[str, onnx.NodeProto] = {}
        # The outputs of type uint8. `untyped_output_infos` gives all others one common type.
        self.uint8_outputs: set[str] = set()

    def add_call(self, operator: str, inputs: Sequence[object], outputs: Sequence[str]) -> None:
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
            value if isinstance(value, str) else self._add_constant(f"{name}_{i}", value)
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
        self.torch_outputs.update(outputs)
        self.call_by_output[outputs[0]] = node

    def add_shape_node(self, tensor: str, name: str) -> str:
        """Add a Shape node for a tensor; return its output's name."""
        from onnx import helper

        self.nodes.append(helper.make_node("Shape", [tensor], [name], name))
        return name

    def _add_constant(self, name: str, value: Any) -> str:
        from onnx import TensorProto, helper

        values = value if isinstance(value, list) else [value]
        type_code = {bool: TensorProto.BOOL, float: TensorProto.FLOAT}.get(
            type(values[0]), TensorProto.INT64
        )
        tensor = helper.make_tensor(
            name, type_code, [len(values)] if isinstance(value, list) else [], values
        )
        self.nodes.append(helper.make_node("Constant", [], [name], name, value=tensor))
        return name

    def float32_rank(self, tensor_name: str) -> int | None:
        """Return the number of dimensions of a float32 tensor; None if type or rank is unknown."""
        tensor_type = self.type_by_name.get(tensor_name)
        if tensor_type is None or tensor_type.elem_type != 1 or not tensor_type.HasField("shape"):
            return None
        return len(tensor_type.shape.dim)

    def float32_sizes(self, tensor_name: str) -> list[int]:
        """Return the size of each dimension of a float32 tensor, 0 where the graph lacks it."""
        return (
            [dim.dim_value for dim in self.type_by_name[tensor_name].shape.dim]
            if self.float32_rank(tensor_name)
            else []
        )

    def nodes_in_use(self) -> list[onnx.NodeProto]:
        """Return the nodes, but leave out each Transpose whose output no node uses."""
        used = {name for node in self.nodes for name in node.input} | self.output_names
        return [
            node for node in self.nodes if node.op_type != "Transpose" or node.output[0] in used
        ]

    def untyped_output_infos(self, type_code: int = 1) -> list[onnx.ValueInfoProto]:
        """Return type declarations for outputs of torch's operators whose type the graph lacks.

        Args:
            type_code: ONNX's code of the type of all outputs but masks (default: float32).
        """
        from onnx import TensorProto, helper

        untyped_names = sorted(
            name for name in self.torch_outputs - self.type_by_name.keys() if name
        )
        type_codes = [
            TensorProto.UINT8 if name in self.uint8_outputs else type_code for name in untyped_names
        ]
        return [
            helper.make_tensor_value_info(name, type_code, None)
            for name, type_code in zip(untyped_names, type_codes)
        ]


def _attribute_values(node: onnx.NodeProto) -> dict[str, Any]:
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _input_or_empty(node: onnx.NodeProto, position: int) -> str:
    return str(node.input[position]) if len(node.input) > position else ""


# ------------------------------------------------------------------------------------ cross entropy


def _has_row_per_label(graph: Rewriting, forward_node: onnx.NodeProto) -> bool:
    """Return whether the loss has one row of scores for each label."""
    return 2 in (
        graph.float32_rank(forward_node.input[0]),
        graph.float32_rank(forward_node.output[1]),
    )


def _replace_loss(graph: Rewriting, node: onnx.NodeProto) -> bool:
    if not _has_row_per_label(graph, node):
        return False
    loss_name, log_scores = node.output
    graph.add_call("_log_softmax", [node.input[0], 1, False], [log_scores])
    weight = _input_or_empty(node, 2)
    inputs = [
        log_scores,
        node.input[1],
        weight,
        _reduction_code(node),
        _input_or_empty(node, 3) or _DEFAULT_IGNORE_INDEX,
    ]
    # The second output, the labels' total weight, is an input of nll_loss_backward.
    graph.add_call("nll_loss_forward", inputs, [loss_name, _total_weight_name(node)])
    return True


def _replace_loss_gradient(graph: Rewriting, node: onnx.NodeProto) -> bool:
    gradient, log_scores, labels = node.input[:3]
    forward_node = graph.node_by_output.get(log_scores)
    if (
        forward_node is None
        or forward_node.op_type != "SoftmaxCrossEntropyLossInternal"
        or not _has_row_per_label(graph, forward_node)
    ):
        return False
    label_gradient = f"{node.output[0]}_of_labels"
    inputs = [
        gradient,
        log_scores,
        labels,
        _input_or_empty(forward_node, 2),
        _reduction_code(forward_node),
        _input_or_empty(node, 4) or _DEFAULT_IGNORE_INDEX,
        _total_weight_name(forward_node),
    ]
    graph.add_call("nll_loss_backward", inputs, [label_gradient])
    graph.add_call(
        "_log_softmax_backward_data",
        [label_gradient, log_scores, 1, _FLOAT32_CODE],
        [node.output[0]],
    )
    return True


def _total_weight_name(forward_node: onnx.NodeProto) -> str:
    return f"{forward_node.output[0]}_total_weight"


def _reduction_code(node: onnx.NodeProto) -> int:
    return _REDUCTIONS[_attribute_values(node).get("reduction", b"mean").decode()]


# ------------------------------------------------------------------------------------------ dropout


def _replace_dropout(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace a dropout if its mask is used only by its gradient."""
    input_type = graph.type_by_name.get(node.input[0])
    mask_name = node.output[1] if len(node.output) > 1 else f"{node.output[0]}_mask"
    only_gradient = all(
        user.op_type == "DropoutGrad" for user in graph.users_by_name.get(mask_name, ())
    )
    if (
        (input_type is not None and input_type.elem_type != 1)
        or mask_name in graph.output_names
        or not (only_gradient and _input_or_empty(node, 2))
    ):
        return False
    dropout.define_operators()
    graph.uint8_outputs.add(_byte_mask_name(mask_name))
    graph.add_call(
        dropout.FORWARD,
        [node.input[0], _input_or_empty(node, 1) or 0.5, node.input[2]],
        [node.output[0], _byte_mask_name(mask_name)],
    )
    return True


def _replace_dropout_gradient(graph: Rewriting, node: onnx.NodeProto) -> bool:
    if _byte_mask_name(node.input[1]) not in graph.uint8_outputs:
        return False
    inputs = [
        node.input[0],
        _byte_mask_name(node.input[1]),
        _input_or_empty(node, 2) or 0.5,
        node.input[3],
    ]
    graph.add_call(dropout.BACKWARD, inputs, node.output)
    return True


def _byte_mask_name(mask_name: str) -> str:
    return f"{mask_name}_bytes"


# --------------------------------------------- GELU, LayerNorm, gather, convolutions


def _replace_by_function(
    graph: Rewriting, node: onnx.NodeProto, operator: str, *extra_arguments: str
) -> bool:
    # Of a gradient, the last input is that of the forward pass, whose type is known more often.
    input_type = graph.type_by_name.get(node.input[-1])
    # `untyped_output_infos` declares the outputs as float32.
    if input_type is not None and input_type.elem_type != 1:
        return False
    graph.add_call(operator, [*node.input, *extra_arguments], node.output)
    return True


def _replace_gelu_gradient(graph: Rewriting, node: onnx.NodeProto) -> bool:
    graph.add_call("gelu_backward", [*node.input, ""], node.output)
    return True


def _replace_fast_gelu(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace a GELU by its tanh form, or its gradient, without the bias that ORT can add."""
    is_gradient = node.op_type == "FastGeluGrad"
    if len(node.input) != 1 + is_gradient:
        return False
    own_operators.define_operators()
    operator = own_operators.GELU_BACKWARD if is_gradient else own_operators.GELU
    return _replace_by_function(graph, node, operator)


def _replace_silu(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace x * sigmoid(alpha * x) or its gradient, where alpha is 1."""
    operator = "silu" if node.op_type == "QuickGelu" else "silu_backward"
    return _attribute_values(node).get("alpha") == 1.0 and _replace_by_function(
        graph, node, operator
    )


def _replace_layer_norm(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace a LayerNorm over the last dimension."""
    x, scale = node.input[:2]
    settings = _attribute_values(node)
    is_last_axis = settings.get("axis", -1) in (-1, (graph.float32_rank(x) or 0) - 1)
    if not (is_last_axis and graph.float32_rank(scale) == 1):
        return False
    # The mean and the inverse of the deviation are optional in ONNX only.
    names = [
        name or f"{node.name}_{output_index}"
        for output_index, name in enumerate([*node.output, "", ""])
    ]
    shape = graph.add_shape_node(scale, f"{names[0]}_shape")
    inputs = [x, shape, scale, _input_or_empty(node, 2), settings.get("epsilon", 1e-5)]
    graph.add_call("native_layer_norm", inputs, names[:3])
    return True


def _replace_layer_norm_gradient(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace the gradient of a LayerNorm over the last dimension."""
    gradient, x, scale, mean, inverse = node.input
    is_last_axis = _attribute_values(node).get("axis", -1) in (-1, (graph.float32_rank(x) or 0) - 1)
    if not (
        is_last_axis
        and graph.float32_rank(scale) == 1
        and len(node.output) == 3
        and all(node.output)
    ):
        return False
    inputs = [
        gradient,
        x,
        graph.add_shape_node(scale, f"{node.output[0]}_shape"),
        mean,
        inverse,
        scale,
        # The bias, of which torch uses only the size.
        scale,
        [True] * 3,
    ]
    graph.add_call("native_layer_norm_backward", inputs, node.output)
    return True


def _replace_rms_norm_gradient(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace the gradient of an RMSNorm over the last dimension."""
    x, scale = node.input[1:3]
    is_last_axis = _attribute_values(node).get("axis", -1) in (-1, (graph.float32_rank(x) or 0) - 1)
    if not (
        is_last_axis
        and graph.float32_rank(scale) == 1
        and len(node.output) == 2
        and all(node.output)
    ):
        return False
    rms_norm_gradient.define_operators()
    graph.add_call(rms_norm_gradient.BACKWARD, [*node.input], node.output)
    return True


def _replace_gather(graph: Rewriting, node: onnx.NodeProto) -> bool:
    # `untyped_output_infos` declares an output as float32.
    if graph.float32_rank(node.input[0]) is None and node.output[0] not in graph.type_by_name:
        return False
    axis = _attribute_values(node).get("axis", 0)
    graph.add_call("gather", [node.input[0], axis, node.input[1], False], node.output)
    return True


def _replace_gather_gradient(graph: Rewriting, node: onnx.NodeProto) -> bool:
    gradient, shape, indices = node.input
    if graph.float32_rank(gradient) is None:
        return False
    own_operators.define_operators()
    axis = _attribute_values(node).get("axis", 0)
    graph.add_call(own_operators.GATHER_BACKWARD, [gradient, shape, indices, axis], node.output)
    return True


def _replace_convolution(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace a convolution or its gradient, if it pads both ends alike."""
    settings = _attribute_values(node)
    spatial_rank = len(settings.get("kernel_shape", ()))
    pads = settings.get("pads", [0] * 2 * spatial_rank)
    is_symmetric = (
        settings.get("auto_pad", b"NOTSET") == b"NOTSET"
        and pads[:spatial_rank] == pads[spatial_rank:]
    )
    weight = node.input[1 + (node.op_type == "ConvGrad")]
    if not (spatial_rank and is_symmetric and graph.float32_rank(weight) == spatial_rank + 2):
        return False
    conv_settings = [
        settings.get("strides", [1] * spatial_rank),
        pads[:spatial_rank],
        settings.get("dilations", [1] * spatial_rank),
    ]
    groups = settings.get("group", 1)
    if node.op_type == "Conv":
        conv_arguments = [*conv_settings, False, [0] * spatial_rank, groups]
        graph.add_call(
            "convolution", [*node.input[:2], _input_or_empty(node, 2), *conv_arguments], node.output
        )
        return True
    own_operators.define_operators()
    names = [*node.output, "", ""][:3]
    wanted_bits = sum(1 << output_index for output_index, name in enumerate(names) if name)
    outputs = [name or f"{node.name}_{output_index}" for output_index, name in enumerate(names)]
    graph.add_call(
        own_operators.CONVOLUTION_BACKWARD,
        [*node.input, *conv_settings, groups, wanted_bits],
        outputs,
    )
    return True


# ------------------------------------------------------------------------------------------ matmuls


def _has_wide_matrix(graph: onnx.GraphProto) -> bool:
    """Return whether a graph input or initializer is a matrix of at least WIDTH x WIDTH."""
    shapes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input]
    shapes += [list(tensor.dims) for tensor in graph.initializer]
    return any(len(shape) == 2 and min(shape) >= LEAST_MATRIX_WIDTH for shape in shapes)


def _replace_product(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace a matmul op(a) op(b), where op may transpose.

    b must be a matrix. If a is transposed, a must be a matrix too. If a is transposed, and the only
    user of the result is a Transpose, the call includes that Transpose. A Gemm may add a bias of
    one dimension, unless a is transposed.
    """
    a, b = node.input[:2]
    bias = _input_or_empty(node, 2)
    settings = _attribute_values(node)
    ranks = (2, 2) if node.op_type == "Gemm" else (graph.float32_rank(a), graph.float32_rank(b))
    is_plain = (
        settings.get("alpha", 1.0) == 1.0
        and not settings.get("transBatchA")
        and not settings.get("transBatchB")
    )
    if ranks[1] != 2 or not is_plain or (settings.get("transA") and ranks[0] != 2):
        return False
    b, is_b_transposed = _skip_transposes(graph, b, settings.get("transB", 0))
    a, is_a_transposed = (
        _skip_transposes(graph, a, settings.get("transA", 0)) if ranks[0] == 2 else (a, False)
    )
    if bias and (
        is_a_transposed or settings.get("beta", 1.0) != 1.0 or graph.float32_rank(bias) != 1
    ):
        return False
    if not is_a_transposed:
        if is_b_transposed:
            graph.add_call("linear", [a, b, bias], node.output)
        elif bias:
            # As transformers' Conv1D writes it.
            graph.add_call("addmm", [bias, a, b, "", ""], node.output)
        else:
            graph.add_call("matmul", [a, b], node.output)
        return True
    # tensordot contracts over either dimension of a matrix, so no matrix is copied for a transpose.
    users = graph.users_by_name.get(node.output[0], [])
    if (
        len(users) == 1
        and users[0].op_type == "Transpose"
        and node.output[0] not in graph.output_names
    ):
        graph.add_call("tensordot", [b, a, [int(is_b_transposed)], [0]], users[0].output)
    else:
        graph.add_call("tensordot", [a, b, [0], [int(is_b_transposed)]], node.output)
    return True


def _add_bias_to_product(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Let a matmul by torch add the bias that the node adds to its result."""
    for product, bias in (node.input, reversed(node.input)):
        call = graph.call_by_output.get(product)
        if (
            call is not None
            and call.attribute[0].s == b"linear"
            # A Gemm's bias is there already.
            and not call.input[2]
            and graph.users_by_name[product] == [node]
            and product not in graph.output_names
            and graph.float32_rank(bias) == 1
            and graph.float32_sizes(bias) == graph.float32_sizes(call.input[1])[:1] != [0]
        ):
            call.input[2] = bias
            call.output[0] = node.output[0]
            graph.torch_outputs.add(node.output[0])
            return True
    return False


def _replace_bias_gradient_sum(graph: Rewriting, node: onnx.NodeProto) -> bool:
    """Replace the sum over samples that is the gradient of a bias."""
    output_type = graph.type_by_name.get(node.output[0])
    if (
        node.output[0] not in graph.output_names
        or output_type is None
        or output_type.elem_type != 1
        or not _input_or_empty(node, 1)
        or _attribute_values(node).get("keepdims", 1)
    ):
        return False
    # torch's missing last input is the type of the result.
    graph.add_call("sum.dim_IntList", [*node.input, False, ""], node.output)
    return True


def _skip_transposes(graph: Rewriting, matrix_name: str, transpose_flag: int) -> tuple[str, bool]:
    """Skip Transpose nodes above a matrix.

    Return the original matrix, and whether the product needs its transpose.
    """
    needs_transpose = bool(transpose_flag)
    while (
        matrix_name not in graph.torch_outputs
        and matrix_name in graph.node_by_output
        and graph.node_by_output[matrix_name].op_type == "Transpose"
    ):
        matrix_name = graph.node_by_output[matrix_name].input[0]
        needs_transpose = not needs_transpose
    return matrix_name, needs_transpose


# In evaluation graphs, too: torch's checks of labels and indices, and its sigmoid.
_CHECKED_KERNELS: dict[str, _Kernel] = {
    "SoftmaxCrossEntropyLossInternal": _replace_loss,
    "GatherElements": _replace_gather,
    "Sigmoid": lambda graph, node: _replace_by_function(graph, node, "sigmoid"),
}
