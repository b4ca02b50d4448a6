"""Copies of an ORTModule that has run: by copy.deepcopy and by pickle."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule._internal.base.attached import RECORD_ATTRIBUTE, ManagerRecord, OptionsRecord
from ortmodule_tests.forks import Run
from ortmodule_tests.modules import manager_of, same, wrapped
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built", "seeded")]
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


# At the top of this file, because pickle stores a class by its name.
class Pickled(nn.Module):
    """A model whose forward pass depends on a value, which a setting allows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.last(self.norm(self.first(x))).square().mean() * self.scale
        # Always true, but the exporter cannot know it.
        return loss if x.sum() > -1e9 else -loss


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_a_copy_of_a_built_module_trains_apart(copied: Callable[[Any], Any]) -> None:
    """A copy has the first module's weights and settings, its own graph and its own model."""
    model = Pickled()
    module = wrapped(model, allow_traced_values=True)
    module(X).backward()
    twin = copied(module)
    # Settings go along, and nothing about the first module's graph.
    assert OptionsRecord.attached_to(manager_of(twin)._runtime_options).settings.allow_traced_values
    assert ManagerRecord.attached_to(manager_of(twin)) == ManagerRecord()
    twin.zero_grad()
    # Only the copy may follow this change.
    twin.module.scale = 3.0
    eager = copy.deepcopy(twin.module)
    for each in (twin, eager):
        each(X).backward()
    same(twin.module, eager)
    assert not any(
        ours is theirs for ours, theirs in zip(model.parameters(), twin.module.parameters())
    )
    # 3.0 instead of 2.0: 1.5 times the loss.
    assert twin(X).item() == pytest.approx(1.5 * module(X).item(), rel=1e-5)


def test_each_object_of_ort_holds_one_record() -> None:
    """This package keeps what it knows about an object of ORT in one attribute of the object."""
    module = wrapped(nn.Linear(4, 2))
    module(X).sum().backward()
    manager = manager_of(module)
    graph_manager = manager._graph_transition_manager
    for ort_object in (
        module._torch_module,
        manager,
        manager._runtime_options,
        manager._execution_agent,
        graph_manager,
        graph_manager._post_export_processed_model_info,
    ):
        names = [name for name in vars(ort_object) if name.startswith("_ortmodule")]
        assert names == [RECORD_ATTRIBUTE], type(ort_object)


# Imports nothing of this package: loading the pickle must do it, also on torch 2.9 and later, where
# the import needs repairs.
_LOADS = """
import pickle, sys, torch
with open(sys.argv[1], "rb") as file:
    module = pickle.load(file)
loss = module(torch.ones(2, 4)).sum()
loss.backward()
print(loss.item(), module.module.weight.grad.sum().item())
"""


def test_a_fresh_process_loads_a_pickle(tmp_path: Path, fresh: Run) -> None:
    """A pickle alone makes a new process import ONNX Runtime, with all repairs that this needs."""
    module = wrapped(nn.Linear(4, 2))
    path = tmp_path / "module.pickle"
    loss = module(torch.ones(2, 4)).sum()
    path.write_bytes(pickle.dumps(module))
    process = fresh(_LOADS, str(path))
    assert process.returncode == 0, process.stderr
    assert [float(number) for number in process.stdout.split()[-2:]] == pytest.approx(
        # The gradient of 2 x 4 weights is 2, the number of rows.
        [loss.item(), 16.0]
    )
