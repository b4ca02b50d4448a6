"""setting postprocess: a function of the user's on each exported graph."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ortmodule import ORTModule, SettingError, Settings
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule_tests.ort import needs_ort

pytestmark = needs_ort


def with_identity(model: Any) -> Any:
    """Insert an Identity before the last node, in a new graph."""
    return inserted(model, "Identity")


def with_negation(model: Any) -> Any:
    """Change a value: the last node gets its first input's negative."""
    return inserted(model, "Neg")


def inserted(model: Any, operator: str) -> Any:
    import onnx

    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    last = changed.graph.node[-1]
    between = onnx.helper.make_node(operator, [last.input[0]], ["between"])
    last.input[0] = "between"
    changed.graph.node.insert(len(changed.graph.node) - 1, between)
    return changed


def passed(postprocess: Callable[[Any], Any] | None) -> tuple[Any, list[torch.Tensor]]:
    """Return the module, and output and gradients of a training and an evaluation pass."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    module = ORTModule(net, Settings(postprocess=postprocess))
    output = module(torch.ones(3, 4))
    output.square().sum().backward()
    with torch.no_grad():
        evaluated = module.eval()(torch.ones(3, 4))
    return module, [output, evaluated, *(one.grad for one in net.parameters())]


def test_an_identity_changes_nothing(witness: PassAndGraphCounters) -> None:
    """Outputs and gradients stay bit for bit; the report names the function and the nodes."""
    _, plain = passed(None)
    module, changed = passed(with_identity)
    assert all(map(torch.equal, plain, changed))
    report = module.report()
    name = f"{__name__}:with_identity"
    assert report["postprocess"]["function"] == report["settings"]["postprocess"] == name
    before = report["postprocess"]["nodes_before"]
    assert report["postprocess"]["nodes_after"] == before + 1
    note = f"setting postprocess: {name} made {before + 1} nodes of an exported graph's {before}"
    assert note in report["notes"]
    assert (
        pickle.loads(pickle.dumps(module))._settings_of_this_module().postprocess is with_identity
    )


def test_the_changed_graph_runs(witness: PassAndGraphCounters) -> None:
    """A changed value reaches output, evaluation and gradients."""
    _, plain = passed(None)
    _, changed = passed(with_negation)
    assert not any(map(torch.allclose, plain[:2], changed[:2]))


def without_result(model: Any) -> None:
    """Return nothing."""


def renamed(model: Any) -> Any:
    """Rename an output."""
    model.graph.node[-1].output[0] = model.graph.output[0].name = "other"
    return model


def failing(model: Any) -> Any:
    """Raise an error."""
    raise KeyError("no such node")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (without_result, "returned NoneType; it must return an onnx.ModelProto"),
        (renamed, "changed the graph's outputs from .* to other; they must stay"),
        (failing, "raised KeyError: 'no such node'"),
    ],
)
def test_a_bad_function_is_an_error(
    witness: PassAndGraphCounters, function: Callable[[Any], Any], message: str
) -> None:
    """A function that fails, or returns no graph with the same ends, ends the first pass."""
    with pytest.raises(
        SettingError, match=rf"setting postprocess: .*{function.__name__} {message}"
    ):
        passed(function)
