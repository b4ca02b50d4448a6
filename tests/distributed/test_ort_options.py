"""Every field under `engine` changes something to be seen, or is refused with its reason; the witness is exact."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import onnx
import pytest
import torch
from torch import nn

from ortlaunch import extensions
from ortlaunch.errors import EngineError
from ortlaunch.recipe.engine import Engine
from ortlaunch.recipe.rules import broken, device_rules
from ortlaunch.worker.ort import compat, options, patching
from ortlaunch.worker.ort.graph import Graph, size
from ortlaunch.worker.ort.witness import Witness
from ortlaunch.worker.ort.wrap import wrap
from tests.makers import recipe

INSTALLED = bool(extensions.versions(extensions.EXTRA_OF))
pytestmark = pytest.mark.skipif(not INSTALLED, reason='needs onnxruntime-training: pip install "ortlaunch[ort-cpu]"')
INTEROP = not extensions.interop_refusal()


@pytest.fixture(autouse=True)
def _nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of exports, so that each setting meets an export of its own."""
    if INSTALLED:
        compat.import_ortmodule()  # its extensions are in the real one
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "extensions").symlink_to(extensions.cache_dir().parent.resolve())
        monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def installed_witness() -> Witness:
    if not extensions.is_built():
        subprocess.run([sys.executable, "-m", extensions.__name__], check=True, timeout=280)
    witness = Witness()
    witness.install()
    return witness


@pytest.fixture
def witness(installed_witness: Witness) -> Witness:
    """One witness for all tests, set to zero before each."""
    installed_witness.reset()
    return installed_witness


class Words(nn.Module):
    """Embedding, LayerNorm, GELU and a loss on the first word only, which the compute optimizer moves up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.first, self.norm = nn.Embedding(30, 16), nn.Linear(16, 32), nn.LayerNorm(32)
        self.second, self.last = nn.Linear(32, 16), nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.second(nn.functional.gelu(self.norm(self.first(self.words(ids)))))
        return self.last(hidden)[:, 0].square().mean()


class Casts(nn.Module):
    """Casts to 16 bits and back around what computes nothing, what computes little, and a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(ids.float().reshape(-1, 8)).half().transpose(0, 1).float().transpose(0, 1)
        return self.norm(nn.functional.gelu(hidden).half().float()).half().reshape(-1).float().square().mean()


class Doubled(torch.autograd.Function):
    """A function whose backward is the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2.0


class Custom(Words):
    """A model with such a function in it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(super().forward(ids))


class FewLabels(Words):
    """One label in eight counts."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(32, 30), nn.CrossEntropyLoss()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(self.words(ids)))
        labels = torch.where(ids % 8 == 0, ids, torch.full_like(ids, -100))
        return self.loss(self.head(hidden).reshape(-1, 30), labels.reshape(-1))


class Copied(Words):
    """Counts its copies."""

    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        Copied.copies += 1
        twin = Copied()
        twin.load_state_dict(self.state_dict())
        return twin


IDS = torch.arange(32).reshape(4, 8) % 30


def stepped(module: nn.Module, **settings: Any) -> Any:
    """The module under engine ort with these settings, after one pass forward and backward."""
    options.prepare(Engine(**settings), {})
    wrapped = wrap(module, Engine(**settings), threads=1)
    wrapped(IDS).backward()
    return wrapped


def executed(witness: Witness, module: nn.Module, **settings: Any) -> Graph:
    """The training graph that such a pass runs; its gradients are those of eager PyTorch."""
    eager = copy.deepcopy(module)
    eager(IDS).backward()
    stepped(module, **settings)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, eager.get_parameter(name).grad, msg=name)
    return witness.graphs[-1]


def manager_of(wrapped: Any) -> Any:
    return wrapped._torch_module._execution_manager(True)


def refused(**settings: Any) -> str:
    """What the recipe's rules say of these settings on a CPU."""
    made = recipe(engine={"name": "ort", **settings})
    return "\n".join(text for _, text in [*broken(made), *device_rules(made, "cpu")])


def cuda_provider(wrapped: Any) -> dict[str, str]:
    """The options that a session on a GPU would get."""
    manager = manager_of(wrapped)
    manager._graph_transition_manager._device = torch.device("cuda", 0)
    manager._runtime_options.use_external_gpu_allocator = False
    return manager._get_session_config()[2][0]


# ---------------------------------------------------------------------------------------- what each field changes


def memory_optimization(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    kept, recomputed = (executed(witness, Words(), memory_optimization=level) for level in (0, 1))
    assert size(recomputed.forward) <= size(kept.forward)
    assert size(recomputed.backward) > size(kept.backward) + 5
    assert recomputed.backward["LayerNormalization"] == 1


def memory_optimization_config(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    known = manager_of(stepped(Words()))._runtime_inspector.memory_ob.cluster_id_combination_to_saving_symbolics_map
    kept = witness.graphs[-1]
    cluster = next(iter(known)).split(",")[0].rsplit(":", 1)[0]
    recomputed = executed(witness, Words(), memory_optimization_config=[f"{cluster}:-1"])
    assert size(recomputed.backward) > size(kept.backward)
    assert "chooses the subgraphs itself" in refused(memory_optimization=1, memory_optimization_config=["A:1:-1"])
    assert "write cluster:strategy:count" in refused(memory_optimization_config=["A"])


def memory_efficient_grad_management(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    if not INTEROP:
        refuses_without_interop(memory_efficient_grad_management=True)
        return
    graph = executed(witness, Words(), memory_efficient_grad_management=True)
    assert sum(graph.python.values()) >= len(list(Words().parameters()))
    assert "manage_gradients_on_device" in patching.applied()


def compute_optimizer(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    on, off = (executed(witness, Words(), compute_optimizer=wanted) for wanted in (True, False))
    assert on.forward + on.backward != off.forward + off.backward


def sparsity_optimizer(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    assert "without compute_optimizer: true" in refused(sparsity_optimizer=True, compute_optimizer=False)
    off = executed(witness, FewLabels(), sparsity_optimizer=False)
    if not INTEROP:
        refuses_without_interop(sparsity_optimizer=True)
        return
    on = executed(witness, FewLabels(), sparsity_optimizer=True)
    assert on.forward["ShrunkenGather"] > off.forward["ShrunkenGather"] == 0


def print_input_density(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    assert "without sparsity_optimizer" in refused(print_input_density=True, sparsity_optimizer=False)
    if not INTEROP:
        refuses_without_interop(print_input_density=True)
        return
    silent, printing = (executed(witness, FewLabels(), print_input_density=wanted) for wanted in (False, True))
    assert size(printing.python) > size(silent.python)
    assert "label tensor density" in capfd.readouterr().out


def custom_autograd(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    assert not executed(witness, Custom(), custom_autograd="inline").python
    if not INTEROP:
        refuses_without_interop(custom_autograd="python")
        with pytest.raises(Exception, match="Couldn't export Python operator Doubled"):
            stepped(Custom())
        return
    assert size(executed(witness, Custom(), custom_autograd="python").python) == 2


def opset(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    for wanted in (15, 18):
        stepped(Words(), opset=wanted, save_onnx=str(tmp_path))
        exported = onnx.load(tmp_path / "rank_00000_torch_exported_training.onnx")
        assert [item.version for item in exported.opset_import if item.domain == ""] == [wanted]


def deepcopy_before_export(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    copies = {}
    for wanted in (True, False, None):
        Copied.copies = 0
        stepped(Copied(), deepcopy_before_export=wanted, export_cache=False)
        copies[wanted] = Copied.copies
    assert copies[True] == copies[None] > 0
    assert copies[False] == 0


def log_level(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    said = {wanted: logged(log_level=wanted) for wanted in ("error", "warning", "info")}
    assert said["error"] == ""
    assert "is accelerating your model" in said["warning"]
    assert "Plan 1" not in said["warning"]
    assert "Plan 1" in said["info"]


def logged(**settings: Any) -> str:
    """What ORT's logger lets through."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("orttraining").addHandler(handler)
    try:
        stepped(Words(), **settings)
    finally:
        logging.getLogger("orttraining").removeHandler(handler)
    return "\n".join(lines)


def save_onnx(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    stepped(Words(), save_onnx=str(tmp_path / "graphs"))
    saved = onnx.load(tmp_path / "graphs" / "rank_00000_execution_model_training.onnx")
    graph = witness.graphs[-1]
    assert len(saved.graph.node) - 1 == size(graph.forward) + size(graph.backward)
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"engine\.save_onnx: cannot write"):
        stepped(Words(), save_onnx=str(tmp_path / "file" / "graphs"))


def cast_propagation(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    built = {name: nodes_built(cast_propagation=name) for name in ("flood_fill", "insert_and_reduce", "none")}
    assert len(set(map(tuple, built.values()))) == 3
    assert "moves the casts of autocast" in refused(cast_propagation="none")


def cast_propagation_level(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    built = {level: nodes_built(cast_propagation_level=level) for level in (0, 1, 2)}
    assert len(set(map(tuple, built.values()))) == 3
    assert "moves the casts of autocast" in refused(cast_propagation_level=2)


def nodes_built(**settings: Any) -> list[str]:
    torch.manual_seed(0)
    return [node.op_type for node in manager_of(stepped(Casts(), **settings))._onnx_models.optimized_model.graph.node]


def print_memory_stats(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    assert "does nothing on CPU: it reads CUDA's allocator" in refused(print_memory_stats=True)
    observer = manager_of(stepped(Words(), print_memory_stats=True))._runtime_inspector.memory_ob
    assert observer._print_memory_stats_by_step


def conv_algorithm_search(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    assert "does nothing on CPU: it is cuDNN's" in refused(conv_algorithm_search="exhaustive")
    assert cuda_provider(stepped(Words(), conv_algorithm_search="exhaustive"))["cudnn_conv_algo_search"] == "EXHAUSTIVE"
    assert cuda_provider(stepped(Words()))["cudnn_conv_algo_search"] == "HEURISTIC"


def tuning(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    assert "does nothing on CPU" in refused(tuning=True)
    assert cuda_provider(stepped(Words(), tuning=True))["tunable_op_tuning_enable"] == "1"
    assert "tunable_op_enable" not in cuda_provider(stepped(Words()))


def tuning_duration_ms(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    assert "does nothing without tuning: true" in refused(tuning_duration_ms=5)
    provider = cuda_provider(stepped(Words(), tuning=True, tuning_duration_ms=5))
    assert provider["tunable_op_max_tuning_duration_ms"] == "5"


def tuning_results(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    assert "does nothing on CPU" in refused(tuning_results="here")
    stepped(Words(), tuning=True, tuning_results=str(tmp_path))
    assert (tmp_path / "tuning_results_training.json").exists()
    assert cuda_provider(stepped(Words(), tuning_results=str(tmp_path)))["tunable_op_enable"] == "1"


def triton(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    assert "does nothing on CPU: Triton writes kernels for GPUs" in refused(triton=True)
    with pytest.raises(EngineError, match=r"engine\.triton: the installed ONNX Runtime was built without Triton"):
        options.prepare(Engine(triton=True), {})


def triton_config(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    assert "does nothing without triton: true" in refused(triton_config={"min_nodes": 3})
    assert "unknown key; valid here: ops" in refused(triton=True, triton_config={"nodes": 3})
    assert "must be none, scalar or all" in refused(triton=True, triton_config={"initializer": "some"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTMODULE_TRITON_CONFIG_FILE", "")
        for name in ("triton", "triton.language"):  # ORT's package imports it for its kernels
            patch.setitem(sys.modules, name, MagicMock())
        options.set_attributes(stepped(Words()), Engine(triton=True, triton_config={"min_nodes": 3}))
        read = importlib.import_module("onnxruntime.training.ort_triton").get_config()
    assert json.loads(read)["min_nodes"] == 3


def flash_attention(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    said = refused(flash_attention=True)
    assert "does nothing without triton: true" in said
    assert "does nothing on CPU: it is a Triton kernel" in said


def efficient_attention(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    assert "does nothing on CPU: torch has that kernel for CUDA only" in refused(efficient_attention=True)
    assert registered_in_a_new_process(efficient_attention=True) == "optimize_graph_for_aten_efficient_attention"
    with pytest.raises(EngineError, match=r"engine\.efficient_attention: ONNX Runtime found nothing to replace"):
        options.require_effect(Engine(efficient_attention=True), witness.graphs)


def aten_sdpa(witness: Witness, tmp_path: Path, capfd: Any) -> None:
    assert "does nothing on CPU: torch has that kernel for CUDA only" in refused(aten_sdpa=True)
    with pytest.raises(EngineError, match=r"as it was up to torch 2\.4"):
        options.prepare(Engine(aten_sdpa=True), {})


def registered_in_a_new_process(**settings: Any) -> str:
    """Graph optimizers for CUDA that ORT has after an import with these settings."""
    script = (
        "from ortlaunch.recipe.engine import Engine\nfrom ortlaunch.worker.ort import options\n"
        f"options.prepare(Engine(**{settings!r}), {{}})\n"
        "from onnxruntime.training.ortmodule.graph_optimizer_registry import GraphOptimizerRegistry as Registry\n"
        "print('found:', *[f.__name__ for found in Registry._OPTIMIZER_FUNCS.values() for f, _, _ in found])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split("found:")[1].strip()


def refuses_without_interop(**settings: Any) -> None:
    with pytest.raises(EngineError, match=rf"engine\.{next(iter(settings))}: needs .* torch_interop_utils"):
        options.prepare(Engine(**settings), {})


# A field's check here, or the test elsewhere that shows what it changes, as "path::test".
FIELDS: dict[str, Callable[[Witness, Path, Any], None] | str] = {
    "name": "tests/e2e/test_runs.py::test_inductor",
    "allow_fallback": "tests/e2e/test_runs.py::test_a_fallback_that_is_allowed_is_told",
    "parity_steps": "tests/e2e/test_parity_steps.py::test_training_is_what_it_is_without",
    "parity_tolerance": "tests/e2e/test_parity_steps.py::test_the_tolerance_is_the_recipes",
    "parity_only": "tests/e2e/test_parity_steps.py::test_two_ranks_compare_each_its_own_batch",
    "export_cache": "tests/e2e/test_runs.py::test_a_run_on_onnx_runtime_goes_on",
    "memory_optimization": memory_optimization,
    "memory_optimization_config": memory_optimization_config,
    "memory_efficient_grad_management": memory_efficient_grad_management,
    "compute_optimizer": compute_optimizer,
    "sparsity_optimizer": sparsity_optimizer,
    "print_input_density": print_input_density,
    "custom_autograd": custom_autograd,
    "opset": opset,
    "deepcopy_before_export": deepcopy_before_export,
    "log_level": log_level,
    "save_onnx": save_onnx,
    "print_memory_stats": print_memory_stats,
    "cast_propagation": cast_propagation,
    "cast_propagation_level": cast_propagation_level,
    "conv_algorithm_search": conv_algorithm_search,
    "triton": triton,
    "triton_config": triton_config,
    "flash_attention": flash_attention,
    "efficient_attention": efficient_attention,
    "aten_sdpa": aten_sdpa,
    "tuning": tuning,
    "tuning_duration_ms": tuning_duration_ms,
    "tuning_results": tuning_results,
}


def test_every_field_of_the_engine_is_in_the_table() -> None:
    """A new field needs a check of what it changes; a named test must exist."""
    assert set(FIELDS) == set(Engine.model_fields)
    for place in (check for check in FIELDS.values() if isinstance(check, str)):
        path, _, test = place.partition("::")
        assert f"def {test}(" in (Path(__file__).parents[2] / path).read_text(encoding="utf-8"), place


@pytest.mark.parametrize("field", [field for field, check in FIELDS.items() if callable(check)])
def test_the_field_changes_something_or_is_refused(field: str, witness: Witness, tmp_path: Path, capfd: Any) -> None:
    """Nodes of the executed graph, files, output, a session's options: never just a variable."""
    check = FIELDS[field]
    assert callable(check)
    check(witness, tmp_path, capfd)


def test_no_copy_for_the_export_where_two_would_not_fit(witness: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    """deepcopy_before_export: null looks at parameters and free memory, and says what it saw."""
    size = sum(parameter.numel() * 4 for parameter in Copied().parameters())
    for free, used in ((2 * size - 1, False), (2 * size, True)):
        monkeypatch.setattr(options, "_free_bytes", lambda module, ranks, free=free: free)
        Copied.copies = 0
        stepped(Copied())
        assert (Copied.copies > 0) == used
        assert options.report()["deepcopy_before_export"] == {
            "used": used, "parameter_bytes": size, "free_bytes": free
        }  # fmt: skip


def test_free_memory_is_divided_by_the_ranks_of_a_host() -> None:
    """Each rank of a host exports its own copy."""
    alone = options._free_bytes(Words(), 1)
    assert alone > 2**20
    assert options._free_bytes(Words(), 4) < alone / 2


def test_a_variable_from_outside_changes_nothing(witness: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's value is passed for every setting, also at its default."""
    plain = executed(witness, Words())
    for name in ("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER", "ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "info")  # ends ORT, which knows INFO only
    again = executed(witness, Words())
    assert (again.forward, again.backward) == (plain.forward, plain.backward)


def test_a_host_whose_environment_contradicts_is_refused() -> None:
    """Another host's shell may set what the launching host's does not."""
    with pytest.raises(EngineError, match=r"LEVEL=1 on this host contradicts engine.memory_optimization \(0\)"):
        options.prepare(Engine(), {"ORTMODULE_MEMORY_OPT_LEVEL": "1"})


# ------------------------------------------------------------------------------------------- each repair is needed

WITHOUT_REPAIR = """
import json, sys
from ortlaunch.worker.ort import compat, patching, setting_repairs
from ortlaunch.recipe.engine import Engine
from ortlaunch.worker.ort.wrap import wrap
skipped = sys.argv[1]
# On torch 2.7 and later this other repair takes the hooks out altogether.
compat._AFTER_IMPORT = tuple(repair for repair in compat._AFTER_IMPORT if repair.__name__ != "skip_sparsity_hooks")
compat.import_ortmodule()
if skipped in vars(setting_repairs):
    setattr(setting_repairs, skipped, lambda: False)
import torch
model = torch.nn.Linear(4, 1)
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.linear(x).sum()
for settings in json.loads(sys.argv[2]):
    model = Loss()
    wrap(model, Engine(**settings), threads=1)(torch.ones(2, 4)).backward()
    assert model.linear.weight.grad.tolist() == [[2.0] * 4]
print("applied:", *patching.applied())
"""


def steps_without(skipped: str, *settings: dict[str, bool]) -> subprocess.CompletedProcess[str]:
    """A fresh process that leaves out one repair and takes a step with each of these settings."""
    command = [sys.executable, "-c", WITHOUT_REPAIR, skipped, json.dumps(settings)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("skipped", ["nothing", "switch_off_sparsity"])
def test_switching_sparsity_off_needs_its_repair(skipped: str, witness: Witness) -> None:
    """Stock ORTModule walks through None where compute or sparsity optimization is off."""
    done = steps_without(skipped, {"compute_optimizer": False}, {"sparsity_optimizer": False})
    if skipped == "nothing":
        assert done.returncode == 0, done.stderr
        assert "switch_off_sparsity" in done.stdout.split("applied:")[1].split()
    else:
        assert "'NoneType' object is not iterable" in done.stderr


@pytest.mark.skipif(not INTEROP, reason="needs ORT's extension torch_interop_utils")
@pytest.mark.parametrize("skipped", ["nothing", "manage_gradients_on_device"])
def test_gradient_management_needs_its_repair(skipped: str, witness: Witness) -> None:
    """Stock ORTModule gives parameters where torch.zeros wants a device."""
    done = steps_without(skipped, {"memory_efficient_grad_management": True})
    if skipped == "nothing":
        assert done.returncode == 0, done.stderr
    else:
        assert "zeros()" in done.stderr


# ------------------------------------------------------------------------------------------- the witness is exact


class Layered(nn.Module):
    """A two-layer BERT with dropout."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
        config = transformers.BertConfig(
            **sizes, num_attention_heads=4, max_position_embeddings=32, attn_implementation="eager"
        )
        self.model = transformers.AutoModelForMaskedLM.from_config(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss


@pytest.fixture
def profiling(witness: Witness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every session write down each node that it runs."""
    from onnxruntime.training.ortmodule._graph_execution_manager import GraphExecutionManager

    configure = GraphExecutionManager._get_session_config

    def with_profile(manager: Any) -> Any:
        session_options, providers, provider_options = configure(manager)
        session_options.enable_profiling, session_options.profile_file_prefix = True, str(tmp_path / "profile")
        return session_options, providers, provider_options

    monkeypatch.setattr(GraphExecutionManager, "_get_session_config", with_profile)


def profiled(wrapped: Any, training: bool = True) -> Counter[str]:
    """Nodes by operator that ORT itself says it has run."""
    manager = wrapped._torch_module._execution_manager(training)
    events = json.loads(Path(manager._execution_agent._inference_session.end_profiling()).read_text())
    nodes = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    return Counter(event["args"]["op_name"] for event in nodes)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("model", [Words, Layered])
def test_counted_nodes_are_those_that_onnx_runtime_ran(
    model: type[nn.Module], level: int, witness: Witness, profiling: None
) -> None:
    """By operator, for a forward pass alone and for both, against ORT's own profile."""
    settings = Engine(memory_optimization=level)
    forward = wrap(model(), settings, threads=1)
    loss = forward(IDS)
    assert profiled(forward) == witness.graphs[-1].forward
    del loss
    both = wrap(model(), settings, threads=1)
    both(IDS).backward()
    graph = witness.graphs[-1]
    assert profiled(both) == graph.forward + graph.backward
    assert graph.nodes_run == size(graph.forward + graph.backward)


def test_evaluation_is_counted_with_its_own_graph(witness: Witness, profiling: None) -> None:
    """Nodes run are passes times nodes, each graph by its own."""
    wrapped = wrap(Words(), Engine(), threads=1)
    for _ in range(3):
        wrapped(IDS).backward()
    wrapped.eval()
    with torch.no_grad():
        wrapped(IDS)
    counts = witness.counts()
    assert counts["graphs_built"] == 2
    assert profiled(wrapped, training=False) == witness.graphs[-1].forward
    graph, evaluation = counts["training_graph"], counts["evaluation_graph"]
    run = 3 * (graph["forward_nodes"] + graph["backward_nodes"]) + evaluation["forward_nodes"]
    assert counts["nodes_run"] == run == size(profiled(wrapped)) + evaluation["forward_nodes"]


def test_calls_out_of_onnx_runtime_are_named(witness: Witness) -> None:
    """Torch's operators inside the graph, by name."""
    graph = executed(witness, Words())
    assert graph.aten == Counter(embedding=1, embedding_backward=1)
    assert graph.describe()["python"] == {}


def test_a_restart_keeps_what_was_built(witness: Witness) -> None:
    """The pass that tries the model out is not a step; its export and its graph are the run's."""
    wrapped = stepped(Words())
    witness.restart()
    counts = witness.counts()
    assert (counts["forward_passes"], counts["nodes_run"]) == (0, 0)
    wrapped(IDS)
    assert witness.counts()["nodes_run"] == counts["training_graph"]["forward_nodes"] > 0
