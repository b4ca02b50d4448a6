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

from ortmodule._internal.base.attached import OptionsRecord
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.graph import replace_and_name_graph_nodes
from ortmodule._internal.base.repair_registry import EVALUATION, TRAINING, repair
from ortmodule._internal.base.settings import Settings
from ortmodule._internal.torch_in_graph import attention, dropout, own_operators, rms_norm_gradient

if TYPE_CHECKING:
    import onnx

    from ortmodule._internal.base.ort_types import AnyFunction, Manager

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


def may_torch_compute_matmuls(module_settings: Settings) -> bool:
    """Return whether torch computes matmuls: unless they are refused, or recomputed.

    Even where ORT's matmul alone is as fast, a graph that mixes both is slower, because the threads
    of each library still wait for work, on the same cores, while the other computes. With memory
    optimization the result is False, because ORT's recomputation knows only its own matmuls.
    """
    has_recomputation = (
        module_settings.memory_optimization or module_settings.memory_optimization_config
    )
    return module_settings.torch_matmul is not False and not has_recomputation


@repair(
    "call_torch_kernels",
    "install",
    160,
    replaces=f"{TRAINING}._build_graph",
    fault="CPU kernels are slow (a loss of 1,024 labels in 32,000 classes takes 407 ms instead "
    "of 126 ms) or wrong: a sigmoid is 0 from -18 downwards, and a label that is no class "
    "gives a loss instead of an error.",
    example="tracing/test_loss.py::test_torchs_kernels_compute_the_loss",
    sources={
        f"{TRAINING}._build_graph": "f83f91604f964faf",
        f"{TRAINING}._create_execution_agent": "d25d6cd3c6333ed3",
    },
)
def _build_training_graph_with_torch_kernels_on_cpu(
    original_build: AnyFunction, manager: Manager, *args: object
) -> None:
    original_build(manager, *args)
    if manager._device.type != "cpu":
        return
    replaces_products = may_torch_compute_matmuls(
        OptionsRecord.attached_to(manager._runtime_options).settings
    )
    # may_torch_compute_matmuls checks only the settings. Gradient checkpointing in the model also enables
    # recomputation.
    if replaces_products and manager._runtime_options.memory_optimizer_is_enabled():
        tally.add_end_note_once(
            "torch_matmul is off: ONNX Runtime's recomputation knows its own matrix products only"
        )
        replaces_products = False
    recomputes = manager._runtime_options.memory_optimizer_is_enabled()
    replace_training_nodes_by_torch_calls(
        manager._onnx_models.optimized_model.graph, replaces_products, recomputes
    )


@repair(
    "call_torch_kernels",
    "install",
    160,
    replaces=f"{EVALUATION}._build_graph",
)
def _build_evaluation_graph_with_checked_kernels(
    original_build: AnyFunction, manager: Manager, *args: object
) -> None:
    original_build(manager, *args)
    if manager._device.type == "cpu":
        _replace_nodes_by_torch_calls(manager._onnx_models.optimized_model.graph, _CHECKED_KERNELS)


def replace_training_nodes_by_torch_calls(
    training_graph: onnx.GraphProto,
    replaces_matmuls: bool,
    backward_recomputes_forward: bool = False,
) -> None:
    """Replace nodes of ORT by torch's operators in an onnx.GraphProto.

    Args:
        training_graph: a graph with a forward and a backward pass; changed in place.
        replaces_matmuls: whether matmuls are replaced.
        backward_recomputes_forward: whether the backward pass recomputes parts of the forward pass. If so, the
            operators that it recomputes are not replaced: ORT merges equal calls of torch, which
            keeps their results in memory.
    """
    has_wide_matrix = _has_wide_input_or_weight_matrix(training_graph)
    recomputable: dict[str, _Kernel] = {
        "Gelu": lambda training_graph, node: _add_torch_call_if_float32_or_unknown(
            training_graph, node, "gelu", ""
        ),
        "QuickGelu": _add_torch_silu_or_gradient_if_alpha_is_1,
        "FastGelu": _add_torch_tanh_gelu_or_gradient_unless_biased,
        "LayerNormalization": _add_torch_layer_norm_if_last_axis,
        "Conv": _add_torch_conv_or_gradient_if_evenly_padded,
        "Dropout": _add_torch_dropout_if_mask_is_internal,
        "DropoutGrad": _add_torch_dropout_gradient_if_forward_is,
    }
    kernels: dict[str, _Kernel] = {
        **_CHECKED_KERNELS,
        "SoftmaxCrossEntropyLossInternalGrad": _add_torch_calls_beside_loss_gradient_if_rowwise,
        "QuickGeluGrad": _add_torch_silu_or_gradient_if_alpha_is_1,
        "GeluGrad": _add_torch_gelu_gradient,
        "FastGeluGrad": _add_torch_tanh_gelu_or_gradient_unless_biased,
        "LayerNormalizationGrad": _add_torch_layer_norm_gradient_if_last_axis,
        "SimplifiedLayerNormalizationGrad": _add_torch_rms_norm_gradient_if_last_axis,
        "GatherElementsGrad": _add_torch_gather_gradient_if_float32,
        "ConvGrad": _add_torch_conv_or_gradient_if_evenly_padded,
        "ATen": attention.merge_later_mask_examination_into_first,
        **({} if backward_recomputes_forward else recomputable),
        **({"ReduceSum": _add_torch_sum_if_bias_gradient} if has_wide_matrix else {}),
        **(
            {
                **dict.fromkeys(("MatMul", "FusedMatMul", "Gemm"), _add_torch_matmul_if_by_matrix),
                "Add": _merge_bias_addition_into_torch_linear,
            }
            if replaces_matmuls and has_wide_matrix
            else {}
        ),
    }
    _replace_nodes_by_torch_calls(training_graph, kernels)


def _replace_nodes_by_torch_calls(
    onnx_graph: onnx.GraphProto, replace_node_by_operator: Mapping[str, _Kernel]
) -> None:
    rewriting = Rewriting(onnx_graph)
    for node in onnx_graph.node:
        kernel = replace_node_by_operator.get(node.op_type)
        if not rewriting.torch_outputs.intersection(node.output) and not (
            kernel and kernel(rewriting, node)
        ):
            rewriting.nodes.append(node)
    replace_and_name_graph_nodes(onnx_graph, rewriting.nodes_without_unused_transposes())
    onnx_graph.value_info.extend(rewriting.type_infos_of_untyped_torch_outputs())


class Rewriting:
    """The original graph, and the nodes of the graph that replaces it."""

    def __init__(self, original_graph: onnx.GraphProto) -> None:
        self.type_by_name = {
            v.name: v.type.tensor_type
            for v in (*original_graph.value_info, *original_graph.input, *original_graph.output)
        }
        self.output_names = {value.name for value in original_graph.output}
        self.node_by_output = {name: node for node in original_graph.node for name in node.output}
        self.users_by_name: dict[str, list[onnx.NodeProto]] = {}
        for node in original_graph.node:
            for name in node.input:
                self.users_by_name.setdefault(name, []).append(node)
        self.nodes: list[onnx.NodeProto] = []
        # The outputs of torch's operators, and the calls by their first output.
        self.torch_outputs: set[str] = set()
        self.call_by_output: dict[str, onnx.NodeProto] = {}
        # The outputs of type uint8. `type_infos_of_untyped_torch_outputs` gives all others one common type.
        self.uint8_outputs: set[str] = set()

    def add_torch_call(
        self,
        operator_and_overload: str,
        tensor_names_and_constants: Sequence[object],
        output_names: Sequence[str],
    ) -> None:
        """Add a call of torch's `operator_and_overload`.

        Args:
            operator_and_overload: the operator's name without `aten::`, or with its own namespace; after a dot,
                the name of its overload.
            tensor_names_and_constants: names of tensors, Python numbers, lists of numbers, or "" for a missing input.
            output_names: the names of the outputs.
        """
        from onnx import helper

        operator_and_overload, _, overload = operator_and_overload.partition(".")
        name = f"{output_names[0]}_{operator_and_overload}"
        names = [
            value
            if isinstance(value, str)
            else self._add_constant_node_and_get_name(f"{name}_{i}", value)
            for i, value in enumerate(tensor_names_and_constants)
        ]
        node = helper.make_node(
            "ATen",
            names,
            output_names,
            name,
            None,
            "org.pytorch.aten",
            operator=operator_and_overload,
            overload_name=overload,
        )
        self.nodes.append(node)
        self.torch_outputs.update(output_names)
        self.call_by_output[output_names[0]] = node

    def add_shape_node_and_get_name(self, tensor_name: str, output_name: str) -> str:
        """Add a Shape node for a tensor; return its output's name."""
        from onnx import helper

        self.nodes.append(helper.make_node("Shape", [tensor_name], [output_name], output_name))
        return output_name

    def _add_constant_node_and_get_name(self, output_name: str, number_or_numbers: Any) -> str:
        from onnx import TensorProto, helper

        values = number_or_numbers if isinstance(number_or_numbers, list) else [number_or_numbers]
        type_code = {bool: TensorProto.BOOL, float: TensorProto.FLOAT}.get(
            type(values[0]), TensorProto.INT64
        )
        tensor = helper.make_tensor(
            output_name,
            type_code,
            [len(values)] if isinstance(number_or_numbers, list) else [],
            values,
        )
        self.nodes.append(
            helper.make_node("Constant", [], [output_name], output_name, value=tensor)
        )
        return output_name

    def float32_rank_or_none(self, tensor_name: str) -> int | None:
        """Return the number of dimensions of a float32 tensor; None if type or rank is unknown."""
        tensor_type = self.type_by_name.get(tensor_name)
        if tensor_type is None or tensor_type.elem_type != 1 or not tensor_type.HasField("shape"):
            return None
        return len(tensor_type.shape.dim)

    def float32_sizes_or_empty(self, tensor_name: str) -> list[int]:
        """Return the size of each dimension of a float32 tensor, 0 where the graph lacks it."""
        return (
            [dim.dim_value for dim in self.type_by_name[tensor_name].shape.dim]
            if self.float32_rank_or_none(tensor_name)
            else []
        )

    def nodes_without_unused_transposes(self) -> list[onnx.NodeProto]:
        """Return the nodes, but leave out each Transpose whose output no node uses."""
        used = {name for node in self.nodes for name in node.input} | self.output_names
        return [
            node for node in self.nodes if node.op_type != "Transpose" or node.output[0] in used
        ]

    def type_infos_of_untyped_torch_outputs(
        self, common_type_code: int = 1
    ) -> list[onnx.ValueInfoProto]:
        """Return type declarations for outputs of torch's operators whose type the graph lacks.

        Args:
            common_type_code: ONNX's code of the type of all outputs but masks (default: float32).
        """
        from onnx import TensorProto, helper

        untyped_names = sorted(
            name for name in self.torch_outputs - self.type_by_name.keys() if name
        )
        type_codes = [
            TensorProto.UINT8 if name in self.uint8_outputs else common_type_code
            for name in untyped_names
        ]
        return [
            helper.make_tensor_value_info(name, common_type_code, None)
            for name, common_type_code in zip(untyped_names, type_codes)
        ]


def _attribute_value_by_name(onnx_node: onnx.NodeProto) -> dict[str, Any]:
    from onnx import helper

    return {
        attribute.name: helper.get_attribute_value(attribute) for attribute in onnx_node.attribute
    }


def _input_name_or_empty(onnx_node: onnx.NodeProto, input_position: int) -> str:
    return str(onnx_node.input[input_position]) if len(onnx_node.input) > input_position else ""


# ------------------------------------------------------------------------------------ cross entropy


def _has_score_row_per_label(graph_rewriting: Rewriting, loss_node: onnx.NodeProto) -> bool:
    return 2 in (
        graph_rewriting.float32_rank_or_none(loss_node.input[0]),
        graph_rewriting.float32_rank_or_none(loss_node.output[1]),
    )


def _add_torch_cross_entropy_if_rowwise(
    graph_rewriting: Rewriting, loss_node: onnx.NodeProto
) -> bool:
    if not _has_score_row_per_label(graph_rewriting, loss_node):
        return False
    loss_name, log_scores = loss_node.output
    graph_rewriting.add_torch_call("_log_softmax", [loss_node.input[0], 1, False], [log_scores])
    weight = _input_name_or_empty(loss_node, 2)
    inputs = [
        log_scores,
        loss_node.input[1],
        weight,
        _torch_reduction_code(loss_node),
        _input_name_or_empty(loss_node, 3) or _DEFAULT_IGNORE_INDEX,
    ]
    # The second output, the labels' total weight, is an input of nll_loss_backward.
    graph_rewriting.add_torch_call(
        "nll_loss_forward", inputs, [loss_name, _total_weight_name(loss_node)]
    )
    return True


def _add_torch_calls_beside_loss_gradient_if_rowwise(
    graph_rewriting: Rewriting, loss_gradient_node: onnx.NodeProto
) -> bool:
    gradient, log_scores, labels = loss_gradient_node.input[:3]
    forward_node = graph_rewriting.node_by_output.get(log_scores)
    if (
        forward_node is None
        or forward_node.op_type != "SoftmaxCrossEntropyLossInternal"
        or not _has_score_row_per_label(graph_rewriting, forward_node)
    ):
        return False
    label_gradient = f"{loss_gradient_node.output[0]}_of_labels"
    inputs = [
        gradient,
        log_scores,
        labels,
        _input_name_or_empty(forward_node, 2),
        _torch_reduction_code(forward_node),
        _input_name_or_empty(loss_gradient_node, 4) or _DEFAULT_IGNORE_INDEX,
        _total_weight_name(forward_node),
    ]
    graph_rewriting.add_torch_call("nll_loss_backward", inputs, [label_gradient])
    graph_rewriting.add_torch_call(
        "_log_softmax_backward_data",
        [label_gradient, log_scores, 1, _FLOAT32_CODE],
        [loss_gradient_node.output[0]],
    )
    return True


def _total_weight_name(loss_node: onnx.NodeProto) -> str:
    return f"{loss_node.output[0]}_total_weight"


def _torch_reduction_code(loss_node: onnx.NodeProto) -> int:
    return _REDUCTIONS[_attribute_value_by_name(loss_node).get("reduction", b"mean").decode()]


# ------------------------------------------------------------------------------------------ dropout


def _add_torch_dropout_if_mask_is_internal(
    graph_rewriting: Rewriting, dropout_node: onnx.NodeProto
) -> bool:
    """Replace a dropout if its mask is used only by its gradient."""
    input_type = graph_rewriting.type_by_name.get(dropout_node.input[0])
    mask_name = (
        dropout_node.output[1] if len(dropout_node.output) > 1 else f"{dropout_node.output[0]}_mask"
    )
    only_gradient = all(
        user.op_type == "DropoutGrad" for user in graph_rewriting.users_by_name.get(mask_name, ())
    )
    if (
        (input_type is not None and input_type.elem_type != 1)
        or mask_name in graph_rewriting.output_names
        or not (only_gradient and _input_name_or_empty(dropout_node, 2))
    ):
        return False
    dropout.define_cpu_dropout_operators_once()
    graph_rewriting.uint8_outputs.add(_byte_mask_name(mask_name))
    graph_rewriting.add_torch_call(
        dropout.FORWARD,
        [
            dropout_node.input[0],
            _input_name_or_empty(dropout_node, 1) or 0.5,
            dropout_node.input[2],
        ],
        [dropout_node.output[0], _byte_mask_name(mask_name)],
    )
    return True


def _add_torch_dropout_gradient_if_forward_is(
    graph_rewriting: Rewriting, dropout_gradient_node: onnx.NodeProto
) -> bool:
    if _byte_mask_name(dropout_gradient_node.input[1]) not in graph_rewriting.uint8_outputs:
        return False
    inputs = [
        dropout_gradient_node.input[0],
        _byte_mask_name(dropout_gradient_node.input[1]),
        _input_name_or_empty(dropout_gradient_node, 2) or 0.5,
        dropout_gradient_node.input[3],
    ]
    graph_rewriting.add_torch_call(dropout.BACKWARD, inputs, dropout_gradient_node.output)
    return True


def _byte_mask_name(mask_name: str) -> str:
    return f"{mask_name}_bytes"


# --------------------------------------------- GELU, LayerNorm, gather, convolutions


def _add_torch_call_if_float32_or_unknown(
    graph_rewriting: Rewriting,
    replaced_node: onnx.NodeProto,
    torch_operator: str,
    *extra_arguments: str,
) -> bool:
    # Of a gradient, the last input is that of the forward pass, whose type is known more often.
    input_type = graph_rewriting.type_by_name.get(replaced_node.input[-1])
    # `type_infos_of_untyped_torch_outputs` declares the outputs as float32.
    if input_type is not None and input_type.elem_type != 1:
        return False
    graph_rewriting.add_torch_call(
        torch_operator, [*replaced_node.input, *extra_arguments], replaced_node.output
    )
    return True


def _add_torch_gelu_gradient(
    graph_rewriting: Rewriting, gelu_gradient_node: onnx.NodeProto
) -> bool:
    graph_rewriting.add_torch_call(
        "gelu_backward", [*gelu_gradient_node.input, ""], gelu_gradient_node.output
    )
    return True


def _add_torch_tanh_gelu_or_gradient_unless_biased(
    graph_rewriting: Rewriting, gelu_node: onnx.NodeProto
) -> bool:
    """Replace a GELU by its tanh form, or its gradient, without the bias that ORT can add."""
    is_gradient = gelu_node.op_type == "FastGeluGrad"
    if len(gelu_node.input) != 1 + is_gradient:
        return False
    own_operators.define_gelu_gather_conv_norm_operators_once()
    operator = own_operators.GELU_BACKWARD if is_gradient else own_operators.GELU
    return _add_torch_call_if_float32_or_unknown(graph_rewriting, gelu_node, operator)


def _add_torch_silu_or_gradient_if_alpha_is_1(
    graph_rewriting: Rewriting, quick_gelu_node: onnx.NodeProto
) -> bool:
    """Replace x * sigmoid(alpha * x) or its gradient, where alpha is 1."""
    operator = "silu" if quick_gelu_node.op_type == "QuickGelu" else "silu_backward"
    return _attribute_value_by_name(quick_gelu_node).get(
        "alpha"
    ) == 1.0 and _add_torch_call_if_float32_or_unknown(graph_rewriting, quick_gelu_node, operator)


def _add_torch_layer_norm_if_last_axis(
    graph_rewriting: Rewriting, layer_norm_node: onnx.NodeProto
) -> bool:
    """Replace a LayerNorm over the last dimension."""
    x, scale = layer_norm_node.input[:2]
    settings = _attribute_value_by_name(layer_norm_node)
    is_last_axis = settings.get("axis", -1) in (
        -1,
        (graph_rewriting.float32_rank_or_none(x) or 0) - 1,
    )
    if not (is_last_axis and graph_rewriting.float32_rank_or_none(scale) == 1):
        return False
    # The mean and the inverse of the deviation are optional in ONNX only.
    names = [
        name or f"{layer_norm_node.name}_{output_index}"
        for output_index, name in enumerate([*layer_norm_node.output, "", ""])
    ]
    shape = graph_rewriting.add_shape_node_and_get_name(scale, f"{names[0]}_shape")
    inputs = [
        x,
        shape,
        scale,
        _input_name_or_empty(layer_norm_node, 2),
        settings.get("epsilon", 1e-5),
    ]
    graph_rewriting.add_torch_call("native_layer_norm", inputs, names[:3])
    return True


def _add_torch_layer_norm_gradient_if_last_axis(
    graph_rewriting: Rewriting, gradient_node: onnx.NodeProto
) -> bool:
    """Replace the gradient of a LayerNorm over the last dimension."""
    gradient, x, scale, mean, inverse = gradient_node.input
    is_last_axis = _attribute_value_by_name(gradient_node).get("axis", -1) in (
        -1,
        (graph_rewriting.float32_rank_or_none(x) or 0) - 1,
    )
    if not (
        is_last_axis
        and graph_rewriting.float32_rank_or_none(scale) == 1
        and len(gradient_node.output) == 3
        and all(gradient_node.output)
    ):
        return False
    inputs = [
        gradient,
        x,
        graph_rewriting.add_shape_node_and_get_name(scale, f"{gradient_node.output[0]}_shape"),
        mean,
        inverse,
        scale,
        # The bias, of which torch uses only the size.
        scale,
        [True] * 3,
    ]
    graph_rewriting.add_torch_call("native_layer_norm_backward", inputs, gradient_node.output)
    return True


def _add_torch_rms_norm_gradient_if_last_axis(
    graph_rewriting: Rewriting, gradient_node: onnx.NodeProto
) -> bool:
    """Replace the gradient of an RMSNorm over the last dimension."""
    x, scale = gradient_node.input[1:3]
    is_last_axis = _attribute_value_by_name(gradient_node).get("axis", -1) in (
        -1,
        (graph_rewriting.float32_rank_or_none(x) or 0) - 1,
    )
    if not (
        is_last_axis
        and graph_rewriting.float32_rank_or_none(scale) == 1
        and len(gradient_node.output) == 2
        and all(gradient_node.output)
    ):
        return False
    rms_norm_gradient.define_rms_norm_backward_on_cpu_once()
    graph_rewriting.add_torch_call(
        rms_norm_gradient.BACKWARD, [*gradient_node.input], gradient_node.output
    )
    return True


def _add_torch_gather_if_type_is_known(
    graph_rewriting: Rewriting, gather_node: onnx.NodeProto
) -> bool:
    # `type_infos_of_untyped_torch_outputs` declares an output as float32.
    if (
        graph_rewriting.float32_rank_or_none(gather_node.input[0]) is None
        and gather_node.output[0] not in graph_rewriting.type_by_name
    ):
        return False
    axis = _attribute_value_by_name(gather_node).get("axis", 0)
    graph_rewriting.add_torch_call(
        "gather", [gather_node.input[0], axis, gather_node.input[1], False], gather_node.output
    )
    return True


def _add_torch_gather_gradient_if_float32(
    graph_rewriting: Rewriting, gradient_node: onnx.NodeProto
) -> bool:
    gradient, shape, indices = gradient_node.input
    if graph_rewriting.float32_rank_or_none(gradient) is None:
        return False
    own_operators.define_gelu_gather_conv_norm_operators_once()
    axis = _attribute_value_by_name(gradient_node).get("axis", 0)
    graph_rewriting.add_torch_call(
        own_operators.GATHER_BACKWARD, [gradient, shape, indices, axis], gradient_node.output
    )
    return True


def _add_torch_conv_or_gradient_if_evenly_padded(
    graph_rewriting: Rewriting, conv_or_gradient_node: onnx.NodeProto
) -> bool:
    """Replace a convolution or its gradient, if it pads both ends alike."""
    settings = _attribute_value_by_name(conv_or_gradient_node)
    spatial_rank = len(settings.get("kernel_shape", ()))
    pads = settings.get("pads", [0] * 2 * spatial_rank)
    is_symmetric = (
        settings.get("auto_pad", b"NOTSET") == b"NOTSET"
        and pads[:spatial_rank] == pads[spatial_rank:]
    )
    weight = conv_or_gradient_node.input[1 + (conv_or_gradient_node.op_type == "ConvGrad")]
    if not (
        spatial_rank
        and is_symmetric
        and graph_rewriting.float32_rank_or_none(weight) == spatial_rank + 2
    ):
        return False
    conv_settings = [
        settings.get("strides", [1] * spatial_rank),
        pads[:spatial_rank],
        settings.get("dilations", [1] * spatial_rank),
    ]
    groups = settings.get("group", 1)
    if conv_or_gradient_node.op_type == "Conv":
        conv_arguments = [*conv_settings, False, [0] * spatial_rank, groups]
        graph_rewriting.add_torch_call(
            "convolution",
            [
                *conv_or_gradient_node.input[:2],
                _input_name_or_empty(conv_or_gradient_node, 2),
                *conv_arguments,
            ],
            conv_or_gradient_node.output,
        )
        return True
    own_operators.define_gelu_gather_conv_norm_operators_once()
    names = [*conv_or_gradient_node.output, "", ""][:3]
    wanted_bits = sum(1 << output_index for output_index, name in enumerate(names) if name)
    outputs = [
        name or f"{conv_or_gradient_node.name}_{output_index}"
        for output_index, name in enumerate(names)
    ]
    graph_rewriting.add_torch_call(
        own_operators.CONVOLUTION_BACKWARD,
        [*conv_or_gradient_node.input, *conv_settings, groups, wanted_bits],
        outputs,
    )
    return True


# ------------------------------------------------------------------------------------------ matmuls


def _has_wide_input_or_weight_matrix(onnx_graph: onnx.GraphProto) -> bool:
    """Return whether a graph input or initializer is a matrix of at least WIDTH x WIDTH."""
    shapes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in onnx_graph.input]
    shapes += [list(tensor.dims) for tensor in onnx_graph.initializer]
    return any(len(shape) == 2 and min(shape) >= LEAST_MATRIX_WIDTH for shape in shapes)


def _add_torch_matmul_if_by_matrix(
    graph_rewriting: Rewriting, matmul_or_gemm_node: onnx.NodeProto
) -> bool:
    """Replace a matmul op(a) op(b), where op may transpose.

    b must be a matrix. If a is transposed, a must be a matrix too. If a is transposed, and the only
    user of the result is a Transpose, the call includes that Transpose. A Gemm may add a bias of
    one dimension, unless a is transposed.
    """
    a, b = matmul_or_gemm_node.input[:2]
    bias = _input_name_or_empty(matmul_or_gemm_node, 2)
    settings = _attribute_value_by_name(matmul_or_gemm_node)
    ranks = (
        (2, 2)
        if matmul_or_gemm_node.op_type == "Gemm"
        else (graph_rewriting.float32_rank_or_none(a), graph_rewriting.float32_rank_or_none(b))
    )
    is_plain = (
        settings.get("alpha", 1.0) == 1.0
        and not settings.get("transBatchA")
        and not settings.get("transBatchB")
    )
    if ranks[1] != 2 or not is_plain or (settings.get("transA") and ranks[0] != 2):
        return False
    b, is_b_transposed = _original_matrix_and_needs_transpose(
        graph_rewriting, b, settings.get("transB", 0)
    )
    a, is_a_transposed = (
        _original_matrix_and_needs_transpose(graph_rewriting, a, settings.get("transA", 0))
        if ranks[0] == 2
        else (a, False)
    )
    if bias and (
        is_a_transposed
        or settings.get("beta", 1.0) != 1.0
        or graph_rewriting.float32_rank_or_none(bias) != 1
    ):
        return False
    if not is_a_transposed:
        if is_b_transposed:
            graph_rewriting.add_torch_call("linear", [a, b, bias], matmul_or_gemm_node.output)
        elif bias:
            # As transformers' Conv1D writes it.
            graph_rewriting.add_torch_call(
                "addmm", [bias, a, b, "", ""], matmul_or_gemm_node.output
            )
        else:
            graph_rewriting.add_torch_call("matmul", [a, b], matmul_or_gemm_node.output)
        return True
    # tensordot contracts over either dimension of a matrix, so no matrix is copied for a transpose.
    users = graph_rewriting.users_by_name.get(matmul_or_gemm_node.output[0], [])
    if (
        len(users) == 1
        and users[0].op_type == "Transpose"
        and matmul_or_gemm_node.output[0] not in graph_rewriting.output_names
    ):
        graph_rewriting.add_torch_call(
            "tensordot", [b, a, [int(is_b_transposed)], [0]], users[0].output
        )
    else:
        graph_rewriting.add_torch_call(
            "tensordot", [a, b, [0], [int(is_b_transposed)]], matmul_or_gemm_node.output
        )
    return True


def _merge_bias_addition_into_torch_linear(
    graph_rewriting: Rewriting, addition_node: onnx.NodeProto
) -> bool:
    """Let a matmul by torch add the bias that the node adds to its result."""
    for product, bias in (addition_node.input, reversed(addition_node.input)):
        call = graph_rewriting.call_by_output.get(product)
        if (
            call is not None
            and call.attribute[0].s == b"linear"
            # A Gemm's bias is there already.
            and not call.input[2]
            and graph_rewriting.users_by_name[product] == [addition_node]
            and product not in graph_rewriting.output_names
            and graph_rewriting.float32_rank_or_none(bias) == 1
            and graph_rewriting.float32_sizes_or_empty(bias)
            == graph_rewriting.float32_sizes_or_empty(call.input[1])[:1]
            != [0]
        ):
            call.input[2] = bias
            call.output[0] = addition_node.output[0]
            graph_rewriting.torch_outputs.add(addition_node.output[0])
            return True
    return False


def _add_torch_sum_if_bias_gradient(graph_rewriting: Rewriting, sum_node: onnx.NodeProto) -> bool:
    """Replace the sum over samples that is the gradient of a bias."""
    output_type = graph_rewriting.type_by_name.get(sum_node.output[0])
    if (
        sum_node.output[0] not in graph_rewriting.output_names
        or output_type is None
        or output_type.elem_type != 1
        or not _input_name_or_empty(sum_node, 1)
        or _attribute_value_by_name(sum_node).get("keepdims", 1)
    ):
        return False
    # torch's missing last input is the type of the result.
    graph_rewriting.add_torch_call("sum.dim_IntList", [*sum_node.input, False, ""], sum_node.output)
    return True


def _original_matrix_and_needs_transpose(
    graph_rewriting: Rewriting, matrix_name: str, is_transposed_by_node: int
) -> tuple[str, bool]:
    """Skip Transpose nodes above a matrix.

    Return the original matrix, and whether the product needs its transpose.
    """
    needs_transpose = bool(is_transposed_by_node)
    while (
        matrix_name not in graph_rewriting.torch_outputs
        and matrix_name in graph_rewriting.node_by_output
        and graph_rewriting.node_by_output[matrix_name].op_type == "Transpose"
    ):
        matrix_name = graph_rewriting.node_by_output[matrix_name].input[0]
        needs_transpose = not needs_transpose
    return matrix_name, needs_transpose


# In evaluation graphs, too: torch's checks of labels and indices, and its sigmoid.
_CHECKED_KERNELS: dict[str, _Kernel] = {
    "SoftmaxCrossEntropyLossInternal": _add_torch_cross_entropy_if_rowwise,
    "GatherElements": _add_torch_gather_if_type_is_known,
    "Sigmoid": lambda graph, node: _add_torch_call_if_float32_or_unknown(graph, node, "sigmoid"),
}
