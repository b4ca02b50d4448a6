"""Keep ONNX Runtime's gradient of a grouped convolution inside its memory, on the CPU.

For other than two spatial dimensions, ORT's kernel zeroes the input's gradient of all groups once
for each group, starting at that group's offset. It writes past the end, over whatever memory
follows, such as another weight's gradient. In two dimensions it uses other code, so a convolution
of one dimension becomes one of two.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.graph import replace_and_name_graph_nodes
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, repair


@repair(
    "export_grouped_conv1d_as_conv2d",
    "graph pass",
    30,
    fault="On a CPU gradients of a grouped `nn.Conv1d` are partly zero at random, and the "
    'weight\'s gradient of a convolution with `padding="same"` is about half.',
    example="graph_repairs/test_convolutions.py::test_onnx_runtimes_own_gradient",
    sources=EXPORT_SOURCES,
)
def rewrite_or_refuse_grouped_convs_for_cpu_training(
    export_context: ExportContext, exported_model: onnx.ModelProto
) -> None:
    """Rewrite grouped convolutions on the CPU, whose gradient overwrites other tensors.

    ORT's gradient of a grouped Conv1d or Conv3d writes zeros over other tensors: random wrong
    gradients.
    """
    if export_context.training and export_context.device.type == "cpu":
        _convert_grouped_conv1d_and_refuse_conv3d(exported_model.graph)


def _convert_grouped_conv1d_and_refuse_conv3d(onnx_graph: onnx.GraphProto) -> None:
    nodes = []
    for node in onnx_graph.node:
        _make_same_padding_of_conv_explicit(node)
        attributes = {
            attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute
        }
        if (
            node.op_type != "Conv"
            or attributes.get("group", 1) == 1
            or len(attributes["kernel_shape"]) == 2
        ):
            nodes.append(node)
            continue
        if len(attributes["kernel_shape"]) > 2:
            raise RuntimeError(
                f"{node.name} is a Conv3d with groups, whose gradient on ONNX Runtime's CPU "
                "overwrites other tensors"
            )
        name_prefix, (input_name, weight, *bias), (output,) = (
            f"{node.output[0]}_ortmodule",
            node.input,
            node.output,
        )
        # The new first dimension has size 1, a kernel of 1 and no padding.
        begin, end = attributes.get("pads", [0, 0])
        conv_attributes = {
            "kernel_shape": [1, *attributes["kernel_shape"]],
            "pads": [0, begin, 0, end],
            "group": attributes["group"],
        }
        conv_attributes.update(
            {
                name: [1, *attributes[name]]
                for name in ("strides", "dilations")
                if name in attributes
            }
        )
        nodes += [
            helper.make_node(
                "Constant",
                [],
                [f"{name_prefix}_axis"],
                value=helper.make_tensor("", TensorProto.INT64, [1], [2]),
            ),
            helper.make_node(
                "Unsqueeze", [input_name, f"{name_prefix}_axis"], [f"{name_prefix}_x"]
            ),
            helper.make_node("Unsqueeze", [weight, f"{name_prefix}_axis"], [f"{name_prefix}_w"]),
            helper.make_node(
                "Conv",
                [f"{name_prefix}_x", f"{name_prefix}_w", *bias],
                [f"{name_prefix}_y"],
                node.name,
                **conv_attributes,
            ),
            helper.make_node("Squeeze", [f"{name_prefix}_y", f"{name_prefix}_axis"], [output]),
        ]
    if len(nodes) != len(onnx_graph.node):
        replace_and_name_graph_nodes(onnx_graph, nodes)


def _make_same_padding_of_conv_explicit(onnx_node: onnx.NodeProto) -> None:
    """Replace a Conv's `padding="same"` by explicit amounts.

    ORT's gradient of the weight on the CPU treats it as no padding.
    """
    attributes = {
        attribute.name: helper.get_attribute_value(attribute) for attribute in onnx_node.attribute
    }
    if onnx_node.op_type != "Conv" or attributes.get("auto_pad") != b"SAME_UPPER":
        return
    kernel_shape = attributes["kernel_shape"]
    # Amounts for a stride of 1, the only one that torch allows with "same".
    total_padding = [
        dilation * (size - 1)
        for dilation, size in zip(
            attributes.get("dilations", [1] * len(kernel_shape)), kernel_shape
        )
    ]
    kept_attributes = [
        attribute for attribute in onnx_node.attribute if attribute.name not in ("auto_pad", "pads")
    ]
    kept_attributes.append(
        helper.make_attribute(
            "pads", [n // 2 for n in total_padding] + [n - n // 2 for n in total_padding]
        )
    )
    del onnx_node.attribute[:]
    onnx_node.attribute.extend(kept_attributes)
