"""Autograd's rules for ONNX Runtime's backward pass.

The rules concern unused outputs, outputs without a gradient, changed tensors and second
derivatives. ORT gives every weight a gradient of zeros where its output was not used, takes a
gradient of all but one of the outputs that have none, computes with tensors that were changed after
the forward pass, and has no derivative of its gradients. Here weights of unused outputs and outputs
without a gradient get none, as in PyTorch. Changed tensors raise an error as in PyTorch, and so do
second derivatives, which PyTorch would compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ortlaunch.ortmodule.base.gradients import reached
from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.source_guard import TRAINING, owner

if TYPE_CHECKING:
    import onnx

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, GraphInfo, Manager

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
_SIZES = {"Shape", "Size"}
_TWICE = (
    "ONNX Runtime's graph has no derivative of its gradients, and this loss was computed of them "
    "(create_graph=True): use the model without ORTModule for gradient penalties, forces "
    "and other second derivatives"
)


def follow_autograd() -> None:
    """Let ORT's autograd function follow autograd's rules.

    It ignores versions of tensors, unused outputs, most outputs without a gradient, and second
    derivatives.
    """
    wrap_method(owner(TRAINING), "_create_autofunction_class", _following)


Gradients = Sequence["torch.Tensor | None"]


class _Facts(NamedTuple):
    """Facts about one training graph."""

    needed: list[int]
    """Positions of the inputs and weights whose values the backward pass needs."""
    reached: list[set[str]]
    """Names of the inputs and weights that each output depends on with a gradient."""


class _Saved(NamedTuple):
    name: str
    tensor: torch.Tensor
    version: int
    address: int


def _following(original: AnyFunction, manager: Manager) -> object:
    function = original(manager)

    class _ORTModuleFunction(function):  # type: ignore[misc,valid-type]
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> object:
            # Hooks of a checkpoint around the module would run it again for what a torch operator
            # inside the graph saves, while ONNX Runtime holds its lock.
            with torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
                outputs = function.forward(ctx, *inputs)
            # ORT marks one after the other, and of several calls autograd keeps the last alone.
            constant = manager._graph_info.output_grad_indices_non_differentiable
            ctx.mark_non_differentiable(*(outputs[place] for place in constant))
            names = list(_info(manager).onnx_graph_input_names)
            ctx.ortlaunch_saved = list(_saved(names, inputs, _facts(manager).needed))
            return outputs

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> object:
            _check_versions(ctx.ortlaunch_saved)
            # The gradient of a sum over nothing has strides that ORT refuses.
            gradients = tuple(
                g if g is None or g.numel() else g.new_empty(g.shape) for g in gradients
            )
            # With create_graph=True, autograd would record the operations of ORT's own backward.
            with torch.no_grad():
                found = function.backward(ctx, *gradients)
            # Frees the tensors, which nothing needs after the check.
            ctx.ortlaunch_saved = []
            found = _without_unused(manager, gradients, found)
            return _once_differentiable(found) if torch.is_grad_enabled() else found

    return _ORTModuleFunction


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _info(manager: Manager) -> GraphInfo:
    return manager._graph_transition_manager._post_export_processed_model_info


def _facts(manager: Manager) -> _Facts:
    """Return the facts about the current graph, computed once for each graph."""
    info = _info(manager)
    graph = manager._onnx_models.optimized_model.graph
    known: tuple[object, _Facts] | None = vars(manager).get("_ortlaunch_facts")
    if known is None or known[0] is not graph:
        names = set(_needed(graph))
        places = [place for place, name in enumerate(info.onnx_graph_input_names) if name in names]
        exported = info._post_export_processed_model.graph
        # Of the exported graph, because optimizations may rename or merge values.
        outputs = [reached(exported, [output.name]) for output in exported.output]
        known = vars(manager)["_ortlaunch_facts"] = graph, _Facts(places, outputs)
    return known[1]


# ------------------------------------------------------------------------------------------------ unused outputs


def _without_unused(
    manager: Manager, gradients: Gradients, found: Gradients
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients, with None where only outputs without a gradient depend on the input."""
    if all(gradient is not None for gradient in gradients):
        return tuple(found)
    outputs = _facts(manager).reached
    used = set[str]().union(
        *(names for names, gradient in zip(outputs, gradients) if gradient is not None)
    )
    names = _info(manager).onnx_graph_input_names
    return tuple(gradient if name in used else None for name, gradient in zip(names, found))


# ----------------------------------------------------------------------------------------------- changed tensors


def _saved(
    names: Sequence[str], inputs: Sequence[torch.Tensor], places: Sequence[int]
) -> Iterator[_Saved]:
    """Yield the tensors at these positions with their current version and address."""
    for place in places:
        tensor = inputs[place]
        # Inference tensors have no version counter.
        if not tensor.is_inference():
            yield _Saved(names[place], tensor, tensor._version, tensor.data_ptr())


def _check_versions(saved: Sequence[_Saved]) -> None:
    """Raise RuntimeError if a tensor was changed or replaced since the forward pass."""
    for name, tensor, version, address in saved:
        if (tensor._version, tensor.data_ptr()) != (version, address):
            kind = f"{tensor.type()} {list(tensor.shape)}"
            how = f"is at version {tensor._version}; expected version {version} instead"
            if tensor._version == version:
                how = "has another memory than in the forward pass (`.data = ...`)"
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{kind}], which is "
                f"{name.replace('_original_module.', '', 1)}, {how}. Change it after the backward "
                "pass, or call the module again before the backward pass"
            )


def _needed(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names of the inputs whose values the backward pass reads, in any shape."""
    nodes = list(graph.node)
    # ORT's YieldOp separates the forward from the backward pass.
    border = next(place for place, node in enumerate(nodes) if node.op_type == "YieldOp")
    makers = {name: node for node in nodes for name in node.output}
    first = _before(nodes[border], makers)
    for node in nodes:
        if id(node) not in first and node is not nodes[border] and node.op_type not in _SIZES:
            yield from (_origin(name, makers) for name in node.input)


def _origin(name: str, makers: dict[str, onnx.NodeProto]) -> str:
    """Return the name of the value that a value copies, apart from shape and type."""
    while name in makers and makers[name].op_type in _SAME_VALUES:
        name = makers[name].input[0]
    return name


def _before(end: onnx.NodeProto, makers: dict[str, onnx.NodeProto]) -> set[int]:
    """Return the ids of the nodes that `end` needs."""
    found: set[int] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        new = [
            makers[name] for name in node.input if name in makers and id(makers[name]) not in found
        ]
        found.update(map(id, new))
        waiting += new
    return found


# -------------------------------------------------------------------------------------------- second derivatives


def _once_differentiable(found: Gradients) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients, marked so that their own derivative raises an error."""
    made = [gradient for gradient in found if gradient is not None]
    marked = iter(
        # The function behind torch's own `once_differentiable`.
        torch._C._functions.DelayedError(_TWICE, len(made))(
            *(g.detach().requires_grad_() for g in made)
        )
    )
    return tuple(None if gradient is None else next(marked) for gradient in found)
