"""Run the examples of the operator table, each with its row and without.

Without its row an example may end the process, so that it runs in a fork.
"""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from ortmodule._internal.base.counters import tally
from ortmodule._internal.torch_in_graph import operator_table
from ortmodule._internal.torch_in_graph.operator_table import Example, OperatorRemedy
from ortmodule_tests.modules import training_graph, wrapped

BATCHES_OF_INTEGERS = ((1, 2, 3, 4, 5, 1), (7, -1, 0, 2, 5))
# Of one run, which takes less than a second on a quiet machine.
TIMEOUT_SECONDS = 60
FAULT_SIGNALS = (signal.SIGABRT, signal.SIGFPE, signal.SIGSEGV)


class Net(nn.Module):
    """An example behind a layer."""

    def __init__(self, example: Example) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.example = example

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return self.example(self.layer(x), k)


class Outcome(NamedTuple):
    """The values that a model computes from the batches, up to an error."""

    tensors: list[torch.Tensor]
    error_name: str

    def equals(self, other: Outcome) -> bool:
        """Return whether both have the same error, and values equal up to rounding."""
        return (
            self.error_name == other.error_name
            and len(self.tensors) == len(other.tensors)
            and all(map(is_close, self.tensors, other.tensors))
        )


def is_close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether shapes are equal, and values up to rounding."""
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def run_batches(net: Net, module: nn.Module) -> Outcome:
    """Return the results and gradients of both batches."""
    tensors = []
    for integers in BATCHES_OF_INTEGERS:
        net.zero_grad()
        x = torch.linspace(-2, 2, len(integers) * 6).sin().view(-1, 6)
        try:
            y = module(x, torch.tensor(integers))
            # Each result has a factor of its own, so that exchanged results show.
            (y * torch.arange(1.0, y.numel() + 1).view(y.shape).cos()).sum().backward()
        except Exception as error:
            return Outcome(tensors, type(error).__name__)
        tensors += [y.detach(), *(p.grad.clone() for p in net.parameters())]
    return Outcome(tensors, "")


class Comparison(NamedTuple):
    """How ONNX Runtime computes an example, beside eager PyTorch."""

    verdict: str
    """right, wrong, error, or died; right is also the error that eager PyTorch raises."""
    exports: int = 0
    nodes: int = 0
    error_name: str = ""


def compare_with_eager(example: Example, torch_operators: str = "auto") -> Comparison:
    """Run an example on ONNX Runtime and in eager PyTorch."""
    torch.manual_seed(0)
    eager = Net(example)
    net = copy.deepcopy(eager)
    expected = run_batches(eager, eager)
    # An example that ends in the first batch, or whose values are not finite, shows nothing.
    assert expected.tensors, expected.error_name
    assert all(tensor.isfinite().all() for tensor in expected.tensors)
    module = wrapped(net, torch_operators=torch_operators)
    exports_before = tally.exports
    outcome = run_batches(net, module)
    verdict = "right" if outcome.equals(expected) else "error" if outcome.error_name else "wrong"
    # An export that was refused has no graph.
    nodes = 0 if outcome.error_name else len(training_graph(module).node)
    return Comparison(verdict, tally.exports - exports_before, nodes, outcome.error_name)


def compare_in_fork(compare: Callable[[], Comparison]) -> Comparison:
    """Return a comparison that is made in a forked process.

    Its verdict is "died" if a signal of a fault ends the process.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(TIMEOUT_SECONDS)
        comparison = compare()
        os.write(write_end, json.dumps(comparison).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        text = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0 or -status in FAULT_SIGNALS, status
    return Comparison(*json.loads(text)) if text else Comparison("died")


def remove_row(row: OperatorRemedy) -> None:
    """Take a row out of the table of this process."""
    operator_table.OPERATORS = tuple(each for each in operator_table.OPERATORS if each is not row)
    rows = operator_table._TORCH_ROWS_BY_NAME.get(f"aten::{row.name}", [])
    rows[:] = [each for each in rows if each is not row]


def add_row(row: OperatorRemedy) -> None:
    """Add a row to the table of this process."""
    operator_table.OPERATORS = (*operator_table.OPERATORS, row)
    if row.form is operator_table.TORCH:
        operator_table._TORCH_ROWS_BY_NAME.setdefault(f"aten::{row.name}", []).append(row)


def has_effect(row: OperatorRemedy) -> bool:
    """Return whether a row of the table changes how ONNX Runtime computes its example.

    Without it the example is wrong, an error, the end of the process, or one more export. For a row
    for speed it is a larger graph. Where torch may compute nothing (`torch_operators: off`), the row
    makes an operator right, or refuses one that is wrong.
    """

    def compare(torch_operators: str, without_row: bool) -> Comparison:
        def compare_now() -> Comparison:
            if without_row:
                remove_row(row)
            return compare_with_eager(row.example, torch_operators)

        return compare_in_fork(compare_now)

    without = compare("auto", True)
    if row.is_for_speed:
        return without.nodes > compare("auto", False).nodes
    if without.verdict != "right" or without.exports > 1:
        return True
    without = compare("off", True)
    return without.verdict not in ("right", compare("off", False).verdict)


def print_rows_without_effect() -> None:
    """Print the names of the table's rows without effect; a program for a process that may fork."""
    from ortmodule._internal import import_ortmodule

    import_ortmodule.import_ortmodule_with_repairs_and_export_steps()
    # The first export imports modules; the forks share them.
    compare_with_eager(lambda h, k: h)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    print(*(row.name for row in operator_table.OPERATORS if not has_effect(row)))
