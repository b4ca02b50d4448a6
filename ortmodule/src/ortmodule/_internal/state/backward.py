"""Autograd's rules for ONNX Runtime's backward pass.

The rules concern unused outputs, outputs without a gradient, changed tensors and second
derivatives. ORT gives every weight a gradient of zeros where its output was not used, takes a
gradient of all but one of the outputs that have none, computes with tensors that were changed after
the forward pass, and has no derivative of its gradients. Here weights of unused outputs and outputs
without a gradient get none, as in PyTorch. Changed tensors raise an error as in PyTorch, and so do
second derivatives, which PyTorch would compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ortmodule._internal.base.attached import GradientReach, ManagerRecord
from ortmodule._internal.base.repair_registry import TRAINING, repair
from ortmodule._internal.base.trained_names import value_names_reached_by_gradient_of_outputs

if TYPE_CHECKING:
    import onnx

    from ortmodule._internal.base.ort_types import AnyFunction, GraphInfo, Manager

# Operators that change the shape or type of a tensor, not its values.
_SAME_VALUES = {
    "Cast",
    "Expand",
    "Identity",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
}
# These read no values of their input.
_SIZE_OPERATORS = {"Shape", "Size"}
_SECOND_DERIVATIVE_MESSAGE = (
    "ONNX Runtime's graph has no derivative of its gradients, and this loss was computed of them "
    "(create_graph=True): use the model without ORTModule for gradient penalties, forces "
    "and other second derivatives"
)


OptionalGradients = Sequence["torch.Tensor | None"]


class _SavedTensor(NamedTuple):
    name: str
    tensor: torch.Tensor
    version: int
    address: int


@repair(
    "follow_autograd_rules",
    "install",
    30,
    replaces=f"{TRAINING}._create_autofunction_class",
    fault="Outputs break autograd's rules: `requires_grad` is True where nothing trains, a head "
    "that the loss does not use gets a gradient of zeros and decays, a weight that changes "
    "before the backward pass gives other gradients, and a loss of gradients trains nothing, "
    "without a message.",
    example="state/test_backward.py::test_what_only_an_unused_output_reaches_has_no_gradient[first]",
    sources={
        f"{TRAINING}._create_autofunction_class": "0028d11175495ec4",
        f"{TRAINING}.forward": "e4a9f9b107877f89",
    },
)
def _subclass_ort_function_to_follow_autograd_rules(
    original_create_class: AnyFunction, manager: Manager
) -> object:
    ort_function = original_create_class(manager)

    class _ORTModuleFunction(ort_function):  # type: ignore[misc,valid-type]
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> object:
            # Hooks of a checkpoint around the module would run it again for what a torch operator
            # inside the graph saves, while ONNX Runtime holds its lock.
            with _checkpoint_hidden():
                outputs = ort_function.forward(ctx, *inputs)
            # ORT marks one after the other, and of several calls autograd keeps the last alone.
            constant_positions = manager._graph_info.output_grad_indices_non_differentiable
            ctx.mark_non_differentiable(*(outputs[position] for position in constant_positions))
            names = list(_post_export_graph_info(manager).onnx_graph_input_names)
            ctx.ortmodule_saved = list(
                _saved_tensors_at_positions_besides_inference(
                    names,
                    inputs,
                    _compute_and_cache_gradient_reach_of_graph(manager).needed_positions,
                )
            )
            return outputs

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> object:
            _require_unchanged_since_forward(ctx.ortmodule_saved)
            # The gradient of a sum over nothing has strides that ORT refuses.
            gradients = tuple(
                g if g is None or g.numel() else g.new_empty(g.shape) for g in gradients
            )
            # With create_graph=True, autograd would record the operations of ORT's own backward.
            with torch.no_grad():
                input_gradients = ort_function.backward(ctx, *gradients)
            # Frees the tensors, which nothing needs after the check.
            ctx.ortmodule_saved = []
            input_gradients = _gradients_with_none_for_unused_inputs(
                manager, gradients, input_gradients
            )
            return (
                _gradients_whose_own_derivative_is_refused(input_gradients)
                if torch.is_grad_enabled()
                else input_gradients
            )

    return _ORTModuleFunction


def _checkpoint_hidden() -> contextlib.AbstractContextManager[object]:
    """Return a context without the hooks of a checkpoint; without any hook where there is none."""
    # A transform of torch.func, in a layer that runs as torch, allows no hooks.
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_return_unchanged, _return_unchanged)


def _return_unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _post_export_graph_info(manager: Manager) -> GraphInfo:
    return manager._graph_transition_manager._post_export_processed_model_info


def _compute_and_cache_gradient_reach_of_graph(manager: Manager) -> GradientReach:
    """Return the reach of the current graph's gradients, computed once for each graph."""
    info = _post_export_graph_info(manager)
    graph = manager._onnx_models.optimized_model.graph
    record = ManagerRecord.attached_to(manager)
    if record.gradient_reach is None or record.gradient_reach.training_graph is not graph:
        needed_names = set(_input_names_whose_values_backward_reads(graph))
        positions = [
            position
            for position, name in enumerate(info.onnx_graph_input_names)
            if name in needed_names
        ]
        exported_graph = info._post_export_processed_model.graph
        # Of the exported graph, because optimizations may rename or merge values.
        reached_by_output = [
            value_names_reached_by_gradient_of_outputs(exported_graph, [output.name])
            for output in exported_graph.output
        ]
        record.gradient_reach = GradientReach(graph, positions, reached_by_output)
    return record.gradient_reach


# ------------------------------------------------------------------------------------------------ unused outputs


def _gradients_with_none_for_unused_inputs(
    manager: Manager, output_gradients: OptionalGradients, input_gradients: OptionalGradients
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients, with None where only outputs without a gradient depend on the input."""
    if all(gradient is not None for gradient in output_gradients):
        return tuple(input_gradients)
    reached_by_output = _compute_and_cache_gradient_reach_of_graph(manager).reached_by_output
    used_names = set[str]().union(
        *(
            names
            for names, gradient in zip(reached_by_output, output_gradients)
            if gradient is not None
        )
    )
    names = _post_export_graph_info(manager).onnx_graph_input_names
    return tuple(
        gradient if name in used_names else None for name, gradient in zip(names, input_gradients)
    )


# ----------------------------------------------------------------------------------------------- changed tensors


def _saved_tensors_at_positions_besides_inference(
    input_names: Sequence[str], input_tensors: Sequence[torch.Tensor], positions: Sequence[int]
) -> Iterator[_SavedTensor]:
    """Yield the tensors at these positions with their current version and address."""
    for position in positions:
        tensor = input_tensors[position]
        # Inference tensors have no version counter.
        if not tensor.is_inference():
            yield _SavedTensor(input_names[position], tensor, tensor._version, tensor.data_ptr())


def _require_unchanged_since_forward(saved_tensors: Sequence[_SavedTensor]) -> None:
    """Raise RuntimeError if a tensor was changed or replaced since the forward pass."""
    for name, tensor, version, address in saved_tensors:
        if (tensor._version, tensor.data_ptr()) != (version, address):
            tensor_text = f"{tensor.type()} {list(tensor.shape)}"
            change_text = f"is at version {tensor._version}; expected version {version} instead"
            if tensor._version == version:
                change_text = "has another memory than in the forward pass (`.data = ...`)"
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{tensor_text}], which is "
                f"{name.replace('_original_module.', '', 1)}, {change_text}. Change it after the backward "
                "pass, or call the module again before the backward pass"
            )


def _input_names_whose_values_backward_reads(training_graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of the inputs whose values the backward pass reads, in any shape."""
    nodes = list(training_graph.node)
    # ORT's YieldOp separates the forward from the backward pass.
    yield_index = next(
        node_index for node_index, node in enumerate(nodes) if node.op_type == "YieldOp"
    )
    node_by_output = {name: node for node in nodes for name in node.output}
    forward_node_ids = _ids_of_nodes_needed_by(nodes[yield_index], node_by_output)
    for node in nodes:
        if (
            id(node) not in forward_node_ids
            and node is not nodes[yield_index]
            and node.op_type not in _SIZE_OPERATORS
        ):
            yield from (_name_of_value_before_reshapes(name, node_by_output) for name in node.input)


def _name_of_value_before_reshapes(
    value_name: str, node_by_output: dict[str, onnx.NodeProto]
) -> str:
    """Return the name of the value that a value copies, apart from shape and type."""
    while value_name in node_by_output and node_by_output[value_name].op_type in _SAME_VALUES:
        value_name = node_by_output[value_name].input[0]
    return value_name


def _ids_of_nodes_needed_by(
    end_node: onnx.NodeProto, node_by_output: dict[str, onnx.NodeProto]
) -> set[int]:
    node_ids: set[int] = set()
    pending = [end_node]
    while pending:
        node = pending.pop()
        new_nodes = [
            node_by_output[name]
            for name in node.input
            if name in node_by_output and id(node_by_output[name]) not in node_ids
        ]
        node_ids.update(map(id, new_nodes))
        pending += new_nodes
    return node_ids


# -------------------------------------------------------------------------------------------- second derivatives


def _gradients_whose_own_derivative_is_refused(
    gradients: OptionalGradients,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients, marked so that their own derivative raises an error."""
    present_gradients = [gradient for gradient in gradients if gradient is not None]
    marked_gradients = iter(
        # The function behind torch's own `once_differentiable`.
        torch._C._functions.DelayedError(_SECOND_DERIVATIVE_MESSAGE, len(present_gradients))(
            *(g.detach().requires_grad_() for g in present_gradients)
        )
    )
    return tuple(None if gradient is None else next(marked_gradients) for gradient in gradients)
