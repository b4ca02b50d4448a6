"""Every field under `engine` has a visible effect, or is refused with its reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.base import machine
from ortlaunch.base.errors import EngineError
from ortlaunch.ortmodule import options
from ortlaunch.ortmodule.base import repair_registry
from ortlaunch.ortmodule.native import extensions
from ortlaunch.ortmodule.pass_counters import PassAndGraphCounters
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.worker.engine.ort_settings import import_ortmodule_with_settings
from tests.ort import needs_ort
from tests.ortmodule.modules import Words, executed, manager_of, refused, stepped, training_graph

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
    # A level and a list contradict each other.
    assert "chooses the subgraphs itself" in refused(
        memory_optimization=1, memory_optimization_config=["A:1:-1"]
    )
    assert "write cluster:strategy:count" in refused(memory_optimization_config=["A"])


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
    assert "without compute_optimizer: true" in refused(
        sparsity_optimizer=True, compute_optimizer=False
    )
    off, on = (
        executed(witness, FewLabels(), sparsity_optimizer=wanted) for wanted in (False, None)
    )
    if extensions.reason_interop_is_unbuildable_or_empty():
        refuses_without_interop(sparsity_optimizer=True)
    assert on.forward["ShrunkenGather"] > off.forward["ShrunkenGather"] == 0


def print_input_density(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    assert "without sparsity_optimizer" in refused(
        print_input_density=True, sparsity_optimizer=False
    )
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
    assert "has no effect with memory optimization" in refused(
        torch_matmul=True, memory_optimization=1
    )
    assert "whose graph has no weights" in refused(
        torch_matmul=True, memory_efficient_grad_management=True
    )
    assert "has no effect on cuda" in refused("cuda", torch_matmul=True)


def matmul_precision(witness: PassAndGraphCounters, tmp_path: Path, capfd: Any) -> None:
    # torch computes the matmuls of the graph, at its setting.
    medium = executed(witness, Wide(), matmul_precision="medium")
    assert {"linear", "matmul", "tensordot"} & medium.aten.keys()
    # Each of these settings keeps the matmuls ORT's on the CPU.
    for field in (
        {"torch_matmul": False},
        {"memory_optimization": 1},
        {"memory_efficient_grad_management": True},
    ):
        assert "ONNX Runtime computes its matmul" in refused(matmul_precision="medium", **field)
        assert "computes its matmul" not in refused("cuda", matmul_precision="medium", **field)


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
    with pytest.raises(EngineError, match=r"Settings\.save_onnx: cannot write"):
        stepped(Words(), save_onnx=str(tmp_path / "file" / "graphs"))


def refuses_without_interop(**settings: Any) -> None:
    with pytest.raises(
        EngineError, match=rf"engine\.{next(iter(settings))}: needs .* torch_interop_utils"
    ):
        import_ortmodule_with_settings(Engine(**settings), {})


# By field: its check in this file, or the test elsewhere that shows its effect, as "path::test".
FIELDS: dict[str, Callable[[PassAndGraphCounters, Path, Any], None] | str] = {
    "name": "tests/e2e/test_engines.py::test_inductor",
    "allow_fallback": "tests/e2e/test_engines.py::test_a_fallback_that_is_allowed_is_told",
    "parity_steps": "tests/e2e/test_parity_steps.py::test_training_is_what_it_is_without",
    "parity_tolerance": "tests/e2e/test_parity_steps.py::test_the_tolerance_is_the_recipes",
    "allow_traced_values": "tests/ortmodule/state/test_python_values.py::test_it_is_allowed_where_the_recipe_says_so",
    "torch_operators": "tests/ortmodule/torch_in_graph/test_operator_translation.py::test_named_operators",
    "torch_modules": "tests/ortmodule/torch_in_graph/test_operator_translation.py::test_a_module_that_no_trace_follows",
    "postprocess": "tests/ortmodule/graph_repairs/test_postprocess.py::test_the_changed_graph_runs",
    "memory_optimization": memory_optimization,
    "memory_optimization_config": memory_optimization_config,
    "memory_efficient_grad_management": memory_efficient_grad_management,
    "compute_optimizer": compute_optimizer,
    "sparsity_optimizer": sparsity_optimizer,
    "print_input_density": print_input_density,
    "custom_autograd": custom_autograd,
    "torch_matmul": torch_matmul,
    "matmul_precision": matmul_precision,
    "onednn": "tests/worker/model/test_matmul_precision.py::test_products_are_onednns_where_that_is_faster",
    "chunked_loss": "tests/worker/model/test_chunked_loss_ranks.py::test_two_ranks_on_two_engines",
    "opset": opset,
    "deepcopy_before_export": deepcopy_before_export,
    "log_level": log_level,
    "save_onnx": save_onnx,
    "ort_variables": "tests/ortmodule/test_cuda_options.py::test_variables_reach_the_provider",
}


def test_every_field_of_the_engine_is_in_the_table() -> None:
    """Each field has a check of its effect, and each named test exists."""
    assert set(FIELDS) == set(Engine.model_fields)
    for place in (check for check in FIELDS.values() if isinstance(check, str)):
        path, _, test = place.partition("::")
        assert f"def {test}(" in (Path(__file__).parents[2] / path).read_text(encoding="utf-8"), (
            place
        )


@pytest.mark.parametrize("field", [field for field, check in FIELDS.items() if callable(check)])
def test_the_field_changes_something_or_is_refused(
    field: str, witness: PassAndGraphCounters, tmp_path: Path, capfd: Any
) -> None:
    """Each field changes nodes, files, output or a session's options: more than a variable."""
    check = FIELDS[field]
    assert callable(check)
    check(witness, tmp_path, capfd)


def test_no_copy_for_the_export_where_two_would_not_fit(
    witness: PassAndGraphCounters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`deepcopy_before_export: null` compares parameters with free memory, and reports both."""
    size = sum(parameter.numel() * 4 for parameter in Copied().parameters())
    # Just below the limit, and at it.
    for free, used in ((2 * size - 1, False), (2 * size, True)):
        monkeypatch.setattr(
            machine,
            "machine_and_control_group_memory_limits",
            lambda free=free: [machine.MemoryLimit("a group", 1 << 30, free)],
        )
        Copied.copies = 0
        stepped(Copied())
        assert (Copied.copies > 0) == used
        assert options.deepcopy_decision_record()["deepcopy_before_export"] == {
            "used": used, "parameter_bytes": size, "free_bytes": free, "limit": "a group", "limit_bytes": 1 << 30
        }  # fmt: skip


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


def test_free_memory_is_divided_by_the_ranks_of_a_host() -> None:
    """Free memory is shared by the ranks of a host, because each rank exports its own copy."""
    alone = options._device_memory_limit_with_free_bytes_per_process(Words(), 1).free_bytes
    # More than 1 MiB, so that the comparison below means something.
    assert alone > 2**20
    assert (
        options._device_memory_limit_with_free_bytes_per_process(Words(), 4).free_bytes < alone / 2
    )


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


def test_a_host_whose_environment_contradicts_is_refused() -> None:
    """A variable on a host that contradicts the recipe is refused."""
    with pytest.raises(
        EngineError, match=r"LEVEL=1 on this host contradicts engine.memory_optimization \(0\)"
    ):
        import_ortmodule_with_settings(Engine(), {"ORTMODULE_MEMORY_OPT_LEVEL": "1"})
