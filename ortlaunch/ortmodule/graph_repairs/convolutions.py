"""Keep ONNX Runtime's gradient of a grouped convolution inside its memory, on the CPU.

For other than two spatial dimensions, ORT's kernel zeroes the input's gradient of all groups once
for each group, starting at that group's offset. It writes past the end, over whatever memory
follows, such as another weight's gradient. In two dimensions it uses other code, so a convolution
of one dimension becomes one of two.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.base.graph import replace_nodes


def rewrite(export: Export, model: onnx.ModelProto) -> None:
    """Rewrite grouped convolutions on the CPU, whose gradient overwrites other tensors.

    ORT's gradient of a grouped Conv1d or Conv3d writes zeros over other tensors: random wrong
    gradients.
    """
    if export.training and export.device.type == "cpu":
        _in_two_dimensions(model.graph)


def _in_two_dimensions(graph: onnx.GraphProto) -> None:
    nodes = []
    for node in graph.node:
        _pad_openly(node)
        given = {
            attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute
        }
        if node.op_type != "Conv" or given.get("group", 1) == 1 or len(given["kernel_shape"]) == 2:
            nodes.append(node)
            continue
        if len(given["kernel_shape"]) > 2:
            raise RuntimeError(
                f"{node.name} is a Conv3d with groups, whose gradient on ONNX Runtime's CPU "
                "overwrites other tensors"
            )
        place, (values, weight, *bias), (output,) = (
            f"{node.output[0]}_ortlaunch",
            node.input,
            node.output,
        )
        # The new first dimension has size 1, a kernel of 1 and no padding.
        begin, end = given.get("pads", [0, 0])
        wide = {
            "kernel_shape": [1, *given["kernel_shape"]],
            "pads": [0, begin, 0, end],
            "group": given["group"],
        }
        wide.update({name: [1, *given[name]] for name in ("strides", "dilations") if name in given})
        nodes += [
            helper.make_node(
                "Constant",
                [],
                [f"{place}_axis"],
                value=helper.make_tensor("", TensorProto.INT64, [1], [2]),
            ),
            helper.make_node("Unsqueeze", [values, f"{place}_axis"], [f"{place}_x"]),
            helper.make_node("Unsqueeze", [weight, f"{place}_axis"], [f"{place}_w"]),
            helper.make_node(
                "Conv", [f"{place}_x", f"{place}_w", *bias], [f"{place}_y"], node.name, **wide
            ),
            helper.make_node("Squeeze", [f"{place}_y", f"{place}_axis"], [output]),
        ]
    if len(nodes) != len(graph.node):
        replace_nodes(graph, nodes)


def _pad_openly(node: onnx.NodeProto) -> None:
    """Replace a Conv's `padding="same"` by explicit amounts.

    ORT's gradient of the weight on the CPU treats it as no padding.
    """
    given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if node.op_type != "Conv" or given.get("auto_pad") != b"SAME_UPPER":
        return
    kernel = given["kernel_shape"]
    # Amounts for a stride of 1, the only one that torch allows with "same".
    total = [
        spread * (size - 1)
        for spread, size in zip(given.get("dilations", [1] * len(kernel)), kernel)
    ]
    kept = [attribute for attribute in node.attribute if attribute.name not in ("auto_pad", "pads")]
    kept.append(
        helper.make_attribute("pads", [n // 2 for n in total] + [n - n // 2 for n in total])
    )
    del node.attribute[:]
    node.attribute.extend(kept)
