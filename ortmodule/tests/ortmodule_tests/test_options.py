"""Every setting has a visible effect, or is refused with its reason."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule import ORTModuleError, Settings, load
from ortmodule._internal.base import repair_registry
from ortmodule._internal.base.counters import tally
from ortmodule._internal.native import extensions
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule_tests.modules import Words, executed, manager_of, stepped, training_graph
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort, pytest.mark.usefixtures("built")]


# Whether ORT calls this backward or derives the forward, the gradient is the same.
class Doubled(torch.autograd.Function):
    """A custom function whose backward is the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2.0


class Custom(Words):
    """A model that calls such a function."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(super().forward(ids))


class Wide(Words):
    """A model with a layer that is wide enough for torch's matmul."""

    def __init__(self) -> None:
        super().__init__()
        # 256 is torch_kernels.LEAST_MATRIX_WIDTH.
        self.second = nn.Sequential(nn.Linear(32, 256), nn.Linear(256, 256), nn.Linear(256, 16))


class FewLabels(Words):
    """A model of whose labels one in eight is not ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 30)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(self.words(ids)))
        labels = torch.where(ids % 8 == 0, ids, torch.full_like(ids, -100))
        return self.loss(self.head(hidden).reshape(-1, 30), labels.reshape(-1))


class Copied(Words):
    """A model that counts its copies."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        Copied.copies += 1
        twin = Copied()
        twin.load_state_dict(self.state_dict())
        return twin


# ------------------------------------------------------------------------- the effect of each field


def memory_optimization(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    kept, recomputed = (executed(witness, Words(), memory_optimization=level) for level in (0, 1))
    assert recomputed.forward.total() <= kept.forward.total()
    # The backward pass has the recomputed nodes, not merged with those of the forward pass.
    assert recomputed.backward.total() > kept.backward.total() + 5
    assert recomputed.backward["LayerNormalization"] == recomputed.backward["Gelu"] == 1


def memory_optimization_config(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    # ORT lists them at level info.
    known = manager_of(
        stepped(Words(), log_level="info")
    )._runtime_inspector.memory_ob.cluster_id_combination_to_saving_symbolics_map
    kept = witness.graphs[-1]
    # ORT's keys are cluster:strategy:count; -1 recomputes all occurrences.
    cluster = next(iter(known)).split(",")[0].rsplit(":", 1)[0]
    recomputed = executed(witness, Words(), memory_optimization_config=[f"{cluster}:-1"])
    assert recomputed.backward.total() > kept.backward.total()


def memory_efficient_grad_management(
    witness: PassAndGraphCounters, tmp_path: Path, capfd: Any
) -> None:
    if extensions.reason_interop_is_unbuildable_or_empty():
        refuses_without_interop(memory_efficient_grad_management=True)
        return
    graph = executed(witness, Words(), memory_efficient_grad_management=True)
    # Each parameter's gradient reaches it by a call of Python.
    assert sum(graph.python.values()) >= len(list(Words().parameters()))
    assert "pass_device_to_ort_grad_management" in repair_registry.applied_repair_names()


def compute_optimizer(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    products = []
    for wanted in (True, False):
        executed(witness, Words(), compute_optimizer=wanted)
        graph = training_graph(stepped(Words(), compute_optimizer=wanted))
        names = [node.op_type for node in graph.node]
        products.append(names[: names.index("Gather")].count("MatMul"))
    # The first word is selected before two of the products, or after all three.
    assert products == [1, 3]


def sparsity_optimizer(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    off, on = (
        executed(witness, FewLabels(), sparsity_optimizer=wanted) for wanted in (False, None)
    )
    if extensions.reason_interop_is_unbuildable_or_empty():
        refuses_without_interop(sparsity_optimizer=True)
    assert on.forward["ShrunkenGather"] > off.forward["ShrunkenGather"] == 0


def print_input_density(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    if extensions.reason_interop_is_unbuildable_or_empty():
        refuses_without_interop(print_input_density=True)
        return
    silent, printing = (
        executed(witness, FewLabels(), print_input_density=wanted) for wanted in (False, True)
    )
    assert printing.python.total() > silent.python.total()
    assert "label tensor density" in capfd.readouterr().out


def custom_autograd(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    # Inlined: no call of Python is left in the graph.
    assert not executed(witness, Custom(), custom_autograd="inline").python
    if extensions.reason_interop_is_unbuildable_or_empty():
        refuses_without_interop(custom_autograd="python")
        with pytest.raises(Exception, match="Couldn't export Python operator Doubled"):
            stepped(Custom())
        return
    # One call in the forward and one in the backward pass.
    assert executed(witness, Custom(), custom_autograd="python").python.total() == 2


def torch_matmul(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    on, off = (executed(witness, Wide(), torch_matmul=wanted) for wanted in (True, False))
    assert {"linear", "matmul", "tensordot"} & on.aten.keys()
    assert not {"linear", "matmul", "tensordot"} & off.aten.keys()


def tf32(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    for wanted in (False, True):
        manager = manager_of(stepped(Words(), tf32=wanted))
        # As on a GPU; no session is created with these options.
        manager._graph_transition_manager._device = torch.device("cuda", 0)
        # torch's allocator needs a CUDA build of the extensions.
        manager._runtime_options.use_external_gpu_allocator = False
        assert manager._get_session_config()[2][0]["use_tf32"] == str(int(wanted))


def opset(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    import onnx

    # Neither is ORTModule's own opset, 17.
    for wanted in (15, 18):
        stepped(Words(), opset=wanted, save_onnx=str(tmp_path))
        exported = onnx.load(tmp_path / "rank_00000_torch_exported_training.onnx")
        assert [item.version for item in exported.opset_import if item.domain == ""] == [wanted]


def deepcopy_before_export(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    copies = {}
    for wanted in (True, False, None):
        Copied.copies = 0
        stepped(Copied(), deepcopy_before_export=wanted)
        copies[wanted] = Copied.copies
    # By default a copy is made, because this model fits twice into the memory.
    assert copies[True] == copies[None] > 0
    assert copies[False] == 0


def log_level(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    said = {wanted: logged(log_level=wanted) for wanted in ("error", "warning", "info")}
    assert said["error"] == ""
    assert "is accelerating your model" in said["warning"]
    # "Plan 1" is a line of ORT's report on memory optimization.
    assert "Plan 1" not in said["warning"]
    assert "Plan 1" in said["info"]


def logged(**settings: Any) -> str:
    """Return the lines that ORT's logger writes at these settings."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("orttraining").addHandler(handler)
    try:
        stepped(Words(), **settings)
    finally:
        logging.getLogger("orttraining").removeHandler(handler)
    return "\n".join(lines)


def save_onnx(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    import onnx

    stepped(Words(), save_onnx=str(tmp_path / "graphs"))
    saved = onnx.load(tmp_path / "graphs" / "rank_00000_execution_model_training.onnx")
    graph = witness.graphs[-1]
    assert len(saved.graph.node) - 1 == graph.forward.total() + graph.backward.total()
    (tmp_path / "file").write_text("")
    # A folder below a regular file cannot be created.
    with pytest.raises(ORTModuleError, match=r"setting save_onnx: cannot write"):
        stepped(Words(), save_onnx=str(tmp_path / "file" / "graphs"))


def refuses_without_interop(**settings: Any) -> None:
    with pytest.raises(
        ORTModuleError, match=rf"setting {next(iter(settings))}: needs .* torch_interop_utils"
    ):
        load(Settings(**settings))


# By field: its check in this file, or the test elsewhere that shows its effect, as "path::test".
FIELDS: dict[str, Callable[[PassAndGraphCounters, Path, Any], None] | str] = {
    "threads": "test_training.py::test_sessions_have_the_threads_asked_for",
    "allow_fallback": "test_training.py::test_an_allowed_fallback_is_counted_with_its_reason",
    "follow_model_state": "state/test_model_state.py::test_a_change_is_not_followed_where_the_setting_says_so",
    "allow_traced_values": "state/test_python_values.py::test_it_is_allowed_where_the_recipe_says_so",
    "torch_operators": "torch_in_graph/test_operator_translation.py::test_named_operators",
    "torch_modules": "torch_in_graph/test_operator_translation.py::test_a_module_that_no_trace_follows",
    "postprocess": "graph_repairs/test_postprocess.py::test_the_changed_graph_runs",
    "memory_optimization": memory_optimization,
    "memory_optimization_config": memory_optimization_config,
    "memory_efficient_grad_management": memory_efficient_grad_management,
    "compute_optimizer": compute_optimizer,
    "sparsity_optimizer": sparsity_optimizer,
    "print_input_density": print_input_density,
    "custom_autograd": custom_autograd,
    "torch_matmul": torch_matmul,
    "tf32": tf32,
    "opset": opset,
    "deepcopy_before_export": deepcopy_before_export,
    "log_level": log_level,
    "save_onnx": save_onnx,
    "free_memory_bytes": "test_options.py::test_no_copy_for_the_export_where_two_would_not_fit",
}


def test_every_setting_is_in_the_table() -> None:
    """Each field has a check of its effect, and each named test exists."""
    assert set(FIELDS) == {field.name for field in dataclasses.fields(Settings)}
    for place in (check for check in FIELDS.values() if isinstance(check, str)):
        path, _, test = place.partition("::")
        assert f"def {test}(" in (Path(__file__).parent / path).read_text(encoding="utf-8"), place


@pytest.mark.parametrize("field", [field for field, check in FIELDS.items() if callable(check)])
def test_the_field_changes_something_or_is_refused(
    field: str, witness: PassAndGraphCounters, tmp_path: Path, capfd: Any
) -> None:
    """Each field changes nodes, files, output or a session's options: more than a variable."""
    check = FIELDS[field]
    assert callable(check)
    check(witness, tmp_path, capfd)


def test_no_copy_for_the_export_where_two_would_not_fit(witness: PassAndGraphCounters) -> None:
    """`deepcopy_before_export=None` compares parameters with free memory, and notes both."""
    size = sum(parameter.numel() * 4 for parameter in Copied().parameters())
    # Just below the limit, and at it.
    for free, is_used in ((2 * size - 1, False), (2 * size, True)):
        Copied.copies = 0
        tally.notes.clear()
        stepped(Copied(), free_memory_bytes=free)
        assert (Copied.copies > 0) == is_used
        assert (
            tally.notes == []
            if is_used
            else f"({size:,} bytes) would not fit into {free:,}" in tally.notes[0]
        )


@pytest.mark.parametrize(
    ("settings", "sessions"), [({}, 1), ({"log_level": "info"}, 2), ({"memory_optimization": 1}, 2)]
)
def test_training_sessions_are_those_that_are_needed(
    settings: dict[str, Any], sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ORT creates one training session, and another one where it lists what it can recompute."""
    from onnxruntime.training.ortmodule import _training_manager

    made: list[object] = []
    agent = _training_manager.TrainingAgent
    monkeypatch.setattr(
        _training_manager, "TrainingAgent", lambda *given: made.append(given) or agent(*given)
    )
    stepped(Words(), **settings)
    assert len(made) == sessions


def test_a_variable_from_outside_changes_nothing(
    witness: PassAndGraphCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every setting is passed to ORT, so variables from outside have no effect."""
    plain = executed(witness, Words())
    # Values that differ from the recipe's defaults.
    for name in ("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER", "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    # ORT fails at "info" in lower case, so that this shows that the variable is not read.
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "info")
    again = executed(witness, Words())
    assert (again.forward, again.backward) == (plain.forward, plain.backward)
