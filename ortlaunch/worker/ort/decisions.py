"""Checks in each pass that what a model's Python code read from tensors is what it read in the export.

A graph holds such a number, and the branch or loop that was taken by it, as it was: `if x.sum() > 0`, `len(x)`,
`loss.item()`. The export puts into the graph whether all of them are as they were, as one more output; where they are
not, the graph is exported anew with the batch at hand.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from ortlaunch.errors import EngineError
from ortlaunch.worker.ort.known import EVALUATION, TRAINING, TRANSITION, owner
from ortlaunch.worker.ort.model_state import forget_graph
from ortlaunch.worker.ort.patching import wrap_method
from ortlaunch.worker.ort.tally import tally, traced

_HOLDS = "ortlaunch_holds"
_CHECKED = "aten::_is_all_true"  # how torch.distributions checks its arguments; it has no ONNX form
_T = torch.Tensor
_READS = {_T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.__len__, _T.item, _T.tolist, _T.numpy}


def check_decisions() -> None:
    """What Python read of a tensor in the export, a branch, a loop, a length, was that of every later step."""
    wrap_method(owner(TRANSITION), "_get_exported_model", _noting)
    for manager in (TRAINING, EVALUATION):
        wrap_method(owner(manager), "forward", _checking)


def _noting(original: Callable[..., Any], **kwargs: Any) -> Any:
    with _noted(type(kwargs["flattened_module"])) as reads:
        model, schema = original(**kwargs)
    if reads.kept:
        _put_out(model.graph)
        traced(kwargs["stage3_param_handle"])["decisions"] = [len(model.graph.output) - 1, sorted(reads.places)]
    return model, schema


def _put_out(graph: Any) -> None:
    """Join a lot to the last output: of sizes that never change, ORT makes a constant, and takes none for an output."""
    from onnx import TensorProto, helper

    told = graph.output[-1].name
    least = helper.make_tensor("", TensorProto.FLOAT, [1], [-1.0])
    graph.node.extend(
        [
            helper.make_node("RandomUniform", [], [f"{_HOLDS}_lot"], shape=[1], seed=0.0),
            helper.make_node("Constant", [], [f"{_HOLDS}_least"], value=least),
            helper.make_node("Greater", [f"{_HOLDS}_lot", f"{_HOLDS}_least"], [f"{_HOLDS}_always"]),
            helper.make_node("And", [told, f"{_HOLDS}_always"], [_HOLDS]),
        ]
    )
    del graph.output[-1]
    graph.output.append(helper.make_tensor_value_info(_HOLDS, TensorProto.BOOL, [1]))


@contextlib.contextmanager
def _noted(kind: Any) -> Iterator[_Reads]:
    """Yields, filled by a trace, what was read of tensors; the trace gets whether all is as it was."""
    forward, reads = kind.forward, _Reads()

    @functools.wraps(forward)
    def telling(module: Any, *args: Any) -> Any:
        outputs = forward(module, *args)
        if torch._C._get_tracing_state() is not None and reads.kept:
            outputs.append(functools.reduce(torch.logical_and, reads.kept.values()))
        return outputs

    with mock.patch.object(kind, "forward", telling), reads:
        yield reads


class _Reads(TorchFunctionMode):
    """Follows what Python reads of traced tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, torch.Tensor] = {}  # by the name of the tensor in the trace: whether it is as it was
        self.places: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and torch._C._get_tracing_state() is not None:
            self._keep(args[0].shape[0] if func is _T.__len__ else args[0])
        return func(*args, **(kwargs or {}))

    def _keep(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        value = torch._C._get_value_trace(tensor)
        if value.debugName() in self.kept or value.node().kind() == _CHECKED or _constant(value):
            return
        then = torch.tensor(tensor.tolist(), dtype=tensor.dtype, device=tensor.device)
        if tensor.is_floating_point():  # which two kernels may round apart
            same = (tensor.detach() - then).abs() <= then.abs() * 1e-4 + 1e-6
        else:
            same = tensor == then
        self.kept[value.debugName()] = same.all() if same.dim() else same
        self.places.add(_place())


_DRAWN = ("rand", "bernoulli", "normal", "multinomial", "dropout")


def _constant(value: Any) -> bool:
    """Whether a value of a trace comes of no input, weight or draw."""
    pending, seen = [value], set()
    while pending:
        node = pending.pop().node()
        if node.kind() == "prim::Param" or any(word in node.kind() for word in _DRAWN):
            return False
        if node not in seen:
            seen.add(node)
            pending += node.inputs()
    return True


def _place() -> str:
    """File and line of the model's code, the nearest outside torch and this package."""
    frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
    own = [frame for frame in frames if "/worker/ort/" not in frame.filename]
    return f"{own[-1].filename}:{own[-1].lineno}"


# ------------------------------------------------------------------------------------------------ in each pass


def _checking(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(manager, *args, **kwargs)
    if _as_exported(manager):
        return output
    found = traced(manager._graph_transition_manager)
    (_, places), again = found["decisions"], not found.get("batch_norms")  # whose statistics have this batch already
    where = ", ".join(places[:5])
    if again:
        tally.note(f"exported again, because a value that Python reads of a tensor had changed: {where}")
        forget_graph(manager)
        output = original(manager, *args, **kwargs)
        if _as_exported(manager):
            return output
    raise EngineError(
        f"the model's Python code reads a tensor whose value had changed since the export, at one of {where}: ONNX "
        "Runtime's graph holds the old one; use torch.where, or give it to the forward pass as a number"
    )


def _as_exported(manager: Any) -> bool:
    transition = manager._graph_transition_manager
    decisions = traced(transition).get("decisions")
    outputs = getattr(transition._post_export_processed_model_info, "_ortlaunch_outputs", None)  # buffers.py's
    return decisions is None or outputs is None or bool(outputs[decisions[0]])
