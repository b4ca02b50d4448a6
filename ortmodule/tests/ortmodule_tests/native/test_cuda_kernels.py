"""The CUDA kernels that models' training graphs need, and bfloat16 operators without a kernel."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ortmodule._internal import pass_counters
from ortmodule._internal.base.repair_registry import TRAINING
from ortmodule._internal.base.source_guard import owning_class_or_module
from ortmodule._internal.graph_repairs import bfloat16
from ortmodule._internal.module import import_ortmodule_with_all_repairs
from ortmodule._internal.native import cuda_kernels
from ortmodule._internal.torch_in_graph import torch_kernels
from ortmodule_tests.modules import cast_parameters_in_place, manager_of, wrapped
from ortmodule_tests.ort import needs_ort
from ortmodule_tests.tracing.test_half import Bert, Llama

pytestmark = needs_ort
IDS = torch.arange(24).reshape(3, 8) * 5 % 64
FIRST = torch.tensor(4)
# Operators without a CUDA kernel in the graphs below. They compute only int64 sizes, on the CPU,
# from values that are there. A result of 8 to 64 bytes is copied to the GPU in each step, without
# a wait (docs/evidence/gpu.md).
ON_CPU = {"BroadcastGradientArgs"}
# The largest relative error of bfloat16 gradients.
ROUNDING = 2e-2


class Lora(Llama):
    """A Llama with adapters, which alone have gradients."""

    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        self.model = get_peft_model(self.model, config)


TORCHS: dict[Any, set[str]] = {
    Bert: {"gelu", "gelu_backward", "tanh_backward"},
    Llama: {"silu"},
    Lora: {"silu"},
}
"""Torch's operators in the bfloat16 graphs."""


class Graph:
    """A build that stops before the session, which would need a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import_ortmodule_with_all_repairs()
        # Its wrappers must be below those of the test, which go away with it.
        pass_counters.get_or_start_pass_counters()
        # The CPU's replacements are not part of a GPU's graph.
        monkeypatch.setattr(torch_kernels, "replace_training_nodes_by_torch_calls", lambda *_: None)
        monkeypatch.setattr(owning_class_or_module(TRAINING), "_create_execution_agent", self._stop)

    @staticmethod
    def _stop(manager: Any) -> None:
        raise RuntimeError("stopped")

    def of(self, model: nn.Module, *inputs: Any) -> onnx.ModelProto:
        """Return the graph of forward and backward pass, as ORT's session would get it on a GPU."""
        module = wrapped(model)
        with contextlib.suppress(RuntimeError):
            module(*inputs)
        built: onnx.ModelProto = manager_of(module)._onnx_models.optimized_model
        return built


def without_kernel(model: onnx.ModelProto) -> Counter[str]:
    """Count the operators of nodes without a CUDA kernel.

    A Constant does not count, because it becomes an initializer.
    """
    opset = model.opset_import[0].version
    types = cuda_kernels.declared_or_inferred_type_by_tensor_name(model.graph)
    missing = [
        node
        for node in model.graph.node
        if node.op_type != "Constant"
        and not cuda_kernels.has_cuda_kernel_for_types(node, types, opset)
    ]
    return Counter(
        f"{node.op_type}({', '.join(types.get(name, '') for name in node.input)})"
        if {types.get(name, "") for name in node.input} - {"int64", ""}
        else node.op_type
        for node in missing
    )


def _cases() -> list[Any]:
    kinds = [
        (kind, dtype)
        for kind in (Bert, Llama, Lora)
        for dtype in ("float32", "float16", "bfloat16")
    ]
    # The other cases are slow; those in float16 run in CI.
    quick = ((Bert, "bfloat16"), (Llama, "bfloat16"))
    slow = {
        dtype: [pytest.mark.slow, *([pytest.mark.ci] if dtype == "float16" else [])]
        for _, dtype in kinds
    }
    return [
        pytest.param(
            *case, id=f"{case[0].__name__}-{case[1]}", marks=[] if case in quick else slow[case[1]]
        )
        for case in kinds
    ]


@pytest.mark.parametrize(("kind", "dtype"), _cases())
def test_every_node_has_a_cuda_kernel(
    kind: type[nn.Module], dtype: str, built: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node but computations of sizes has a kernel for its types; no integers are padded."""
    model = kind()
    cast_parameters_in_place(model, getattr(torch, dtype))
    graph = Graph(monkeypatch).of(model, IDS, FIRST)
    if dtype == "bfloat16":
        before = without_kernel(graph)
        bfloat16.replace_bfloat16_nodes_without_kernel_or_refuse(graph)
        # Some operators had no bfloat16 kernel before the completion, and all others still have
        # one.
        assert before.keys() > without_kernel(graph).keys()
        assert TORCHS[kind] <= {
            one.s.decode() for node in graph.graph.node for one in node.attribute
        }
    assert without_kernel(graph).keys() <= ON_CPU
    assert "Pad" not in {node.op_type for node in graph.graph.node}


def _on_cpu(node: Any, types: dict[str, str], opset: int) -> bool:
    """Return whether a node can run on the CPU, where ORT's own kernels have no bfloat16."""
    able = node.op_type in ("Cast", "ATen", "YieldOp", "PythonOp", "PythonOpGrad")
    return able or "bfloat16" not in {types.get(name) for name in (*node.input, *node.output)}


def test_bfloat16_is_completed_to_eagers(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bfloat16 Llama with every node in float32 between casts equals eager."""

    import_ortmodule_with_all_repairs()
    pass_counters.get_or_start_pass_counters()
    build = owning_class_or_module(TRAINING)._build_graph

    def completing(manager: Any, *args: Any) -> None:
        build(manager, *args)
        bfloat16.replace_bfloat16_nodes_without_kernel_or_refuse(
            manager._onnx_models.optimized_model
        )
        bfloat16.replace_bfloat16_nodes_without_kernel_or_refuse(
            manager._onnx_models.optimized_model, _on_cpu
        )

    monkeypatch.setattr(torch_kernels, "replace_training_nodes_by_torch_calls", lambda *_: None)
    exact = Llama()
    ours = copy.deepcopy(exact)
    half = copy.deepcopy(exact)
    for model in (ours, half):
        cast_parameters_in_place(model, torch.bfloat16)
    module = wrapped(ours)
    monkeypatch.setattr(owning_class_or_module(TRAINING), "_build_graph", completing)
    # Compared with float32: ORT's error may be 1.2 times that of eager bfloat16.
    losses = [model(IDS, FIRST) for model in (module, half, exact)]
    for loss in losses:
        loss.float().backward()
    found, eager, wanted = (
        torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        for model in (ours, half, exact)
    )
    torch.testing.assert_close(losses[0].float(), losses[2], rtol=1e-3, atol=0)
    assert (
        float((found - wanted).norm())
        <= 1.2 * float((eager - wanted).norm())
        < ROUNDING * float(wanted.norm())
    )


OPERATORS = {
    "Gelu": (1, nn.functional.gelu),
    "QuickGelu": (1, nn.functional.silu),
    "GeluGrad": (2, torch.ops.aten.gelu_backward),
    "TanhGrad": (2, lambda dy, y: dy * (1 - y.float() * y.float())),
    "SigmoidGrad": (2, lambda dy, y: dy * y.float() * (1 - y.float())),
    "Reciprocal": (1, lambda x: 1 / x),
}


@pytest.mark.parametrize("operator", list(OPERATORS))
def test_an_operator_without_a_bfloat16_kernel_is_completed(operator: str, built: None) -> None:
    """An operator as torch's, or in float32 between casts, has torch's bfloat16 result."""
    import onnxruntime

    import_ortmodule_with_all_repairs()
    from onnxruntime.training.ortmodule.torch_cpp_extensions.cpu import aten_op_executor

    # The runner of torch's operators, which the first ORTModule of a process loads.
    aten_op_executor.load_aten_op_executor_cpp_extension()
    count, expected = OPERATORS[operator]
    domain = "" if operator == "Reciprocal" else "com.microsoft"
    names = [f"x{place}" for place in range(count)]
    extra = {"alpha": 1.0} if operator == "QuickGelu" else {}
    nodes = [
        helper.make_node("Cast", [name], [f"{name}_half"], to=TensorProto.BFLOAT16)
        for name in names
    ]
    nodes.append(
        helper.make_node(
            operator, [f"{name}_half" for name in names], ["y_half"], domain=domain, **extra
        )
    )
    nodes.append(helper.make_node("Cast", ["y_half"], ["y"], to=TensorProto.FLOAT))
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [64]) for name in (*names, "y")
    ]
    # No type for y_half: ORT writes none for a tensor of unknown shape.
    halves = [
        helper.make_tensor_value_info(f"{v.name}_half", TensorProto.BFLOAT16, [64])
        for v in values[:-1]
    ]
    graph = helper.make_graph(nodes, "one", values[:-1], values[-1:], value_info=halves)
    opsets = [
        helper.make_opsetid(name, version)
        for name, version in (("", 17), ("com.microsoft", 1), ("org.pytorch.aten", 1))
    ]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    bfloat16.replace_bfloat16_nodes_without_kernel_or_refuse(model)
    given = [torch.randn(64) for _ in names]
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (result,) = session.run(None, {name: value.numpy() for name, value in zip(names, given)})
    wanted = expected(*(value.bfloat16() for value in given)).bfloat16().float()
    # bfloat16 has 8 significant bits.
    torch.testing.assert_close(torch.from_numpy(result), wanted, rtol=2**-7, atol=1e-6)


def test_an_operator_without_any_kernel_is_refused_with_its_name() -> None:
    """An operator without any kernel is an error with its types, its node and a remedy."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.BFLOAT16, [2]) for name in "xy")
    graph = helper.make_graph(
        [helper.make_node("Sin", ["x"], ["z"]), helper.make_node("Det", ["z"], ["y"], "last")],
        "one",
        [x],
        [y],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    with pytest.raises(
        RuntimeError, match=r"implementation for Det\(bfloat16\), node last: .*fp16.*ORTModule"
    ):
        bfloat16.replace_bfloat16_nodes_without_kernel_or_refuse(model)


KERNELS = {
    ("Pad", "", "int64"): False,
    ("Pad", "", "float16"): True,
    ("Add", "", "bfloat16"): True,
    ("Reciprocal", "", "bfloat16"): False,
    ("Gelu", "com.microsoft", "bfloat16"): False,
    ("Gelu", "com.microsoft", "float16"): True,
    ("ATen", "org.pytorch.aten", "bfloat16"): True,
    ("NoSuchOperator", "", "float"): False,
}


@pytest.mark.parametrize(("name", "domain", "kind"), list(KERNELS))
def test_the_table_of_kernels(name: str, domain: str, kind: str) -> None:
    """The table has the wheel's kernels by operator and type."""
    node = helper.make_node(name, ["x"], ["y"], domain=domain)
    assert (
        cuda_kernels.has_cuda_kernel_for_types(node, {"x": kind, "y": kind}, 17)
        is KERNELS[name, domain, kind]
    )


def test_a_loss_of_another_type_than_its_scores() -> None:
    """Every type constraint of one kernel counts.

    A float32 loss has a kernel for float16 scores and none for bfloat16 scores.
    """
    node = helper.make_node(
        "SoftmaxCrossEntropyLossInternal", ["s", "l"], ["y", "p"], domain="com.microsoft"
    )
    for kind, known in (("bfloat16", False), ("float16", True), ("float", True)):
        assert (
            cuda_kernels.has_cuda_kernel_for_types(
                node, {"s": kind, "l": "int64", "y": "float", "p": "float"}, 17
            )
            is known
        )


@pytest.mark.parametrize(
    ("kind", "operators"), [("bfloat16", ["Sigmoid", "Mul"]), ("float", ["QuickGelu"])]
)
def test_a_session_makes_no_operator_without_a_kernel(
    kind: str, operators: list[str], tmp_path: Path
) -> None:
    """In a bfloat16 graph ORT's session does not fuse nodes into operators without a kernel."""
    import onnxruntime

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    pair = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])]
    graph = helper.make_graph(pair, "silu", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    # The kinds of tensors in the graph that was built; the session below is one of float32.
    built = SimpleNamespace(graph=helper.make_graph([], kind, [helper.make_tensor_value_info(
        "z", getattr(TensorProto, kind.upper()), [2])], []))  # fmt: skip
    manager: Any = SimpleNamespace(
        _device=torch.device("cuda"), _onnx_models=SimpleNamespace(optimized_model=built)
    )
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    bfloat16._session_config_without_bfloat16_fusions_on_gpu(
        lambda manager: (options, [], []), manager
    )
    onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    optimized = onnx.load(options.optimized_model_filepath)
    assert [node.op_type for node in optimized.graph.node] == operators
