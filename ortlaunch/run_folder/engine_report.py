"""engine.json as types: what really runs, and what stands in for something else. Standard library only.

The text under a field is its manual, as in records.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ortlaunch.run_folder.records import as_json

EMPTY = (
    "onnxruntime",
)  # what is written as {} where there is none, so that a reader can ask it for names


@dataclass
class MeasuredEngine:
    """What a measurement gave of one engine."""

    state: str
    """`measured`, or what kept it from that."""
    reason: str | None = None
    """What that was."""
    seconds_per_step: dict[str, float] | None = None
    """Median, quartiles and ends of all measured steps."""
    samples_per_second: float | None = None
    """Speed over all ranks."""
    parity: dict[str, Any] | None = None
    """The comparison with plain PyTorch: its verdict and figures."""


@dataclass
class Choice:
    """How `engine.name: auto` was decided."""

    asked: str
    """auto."""
    chosen: str
    """The engine that was fastest."""
    why: str
    """What was measured, when, and what was left out."""
    measured: dict[str, MeasuredEngine]
    """Each engine."""
    bench: str | None = None
    """The folder of the measurement."""
    key: str | None = None
    """The digest of what decides speed, by which the choice is remembered."""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Choice:
        """As it was written."""
        named = (found["asked"], found["chosen"], found["why"], found["measured"])
        return cls(*named, found.get("bench"), found.get("key"))


@dataclass
class EngineChoice:
    """Which engine was asked for, and which runs."""

    asked: str
    """The recipe's `engine.name`."""
    used: str
    """The engine that ran: ort, inductor or eager."""
    fallback_reason: str | None
    """Why another engine than the one asked for runs (`engine.allow_fallback`), by ONNX Runtime's or the exporter's own
    words; null: none does."""
    chosen: str | None = None
    """With `engine.name: auto`: this and the fields below are those of choice.json."""
    why: str | None = None
    """As there."""
    measured: dict[str, MeasuredEngine] | None = None
    """As there."""
    bench: str | None = None
    """As there."""
    key: str | None = None
    """As there."""


@dataclass
class MatmulPrecision:
    """How products of float32 matrices are computed."""

    asked: str
    """The recipe's `engine.matmul_precision`."""
    in_force: str
    """`torch.get_float32_matmul_precision()` of the run."""
    mantissa_bits: int
    """Bits of a number that a product on this rank keeps, measured before step 1."""
    format: str
    """The number format with that many bits: float32, TensorFloat32 or bfloat16."""
    gains_nothing: str | None
    """Why a lower precision than float32 was asked for and this hardware has none; null: it has, or none was asked."""
    onednn: bool = False
    """Whether the products of `highest` are oneDNN's (`engine.onednn`), for which torch's setting is "medium"."""


@dataclass
class ChunkedLoss:
    """Head and loss of a language model in chunks of rows (`engine.chunked_loss`)."""

    asked: str | int
    """The recipe's `engine.chunked_loss`."""
    rows: int | None
    """Rows of a chunk; null: the loss is computed whole."""
    why: str | None
    """Why the loss is computed whole, or in chunks, where that was not simply asked for."""


@dataclass
class OptimizerChoice:
    """Which optimizer was asked for, and which runs."""

    asked: str
    """The recipe's `optimizer.name`."""
    used: str
    """The class that runs."""
    why: str | None
    """Why it stands in for the one asked for; null: it is that one."""


@dataclass
class FusedNorm:
    """The overflow check and the gradient norm of ZeRO 1 and 2 in one pass (`zero.fused_gradient_norm`)."""

    applied: bool
    """Whether the fused pass is in force."""
    by: str | None
    """Whose it is: `onnxruntime` (FP16_Optimizer) or `ortlaunch`; null: none."""
    why: str
    """Why it is not ONNX Runtime's, or why there is none."""


@dataclass
class ExportCopy:
    """Whether ONNX Runtime exports a copy of the model (`engine.deepcopy_before_export`)."""

    used: bool
    """Whether it does."""
    parameter_bytes: int
    """Bytes of the model's parameters; two copies must fit."""
    free_bytes: int
    """What the tightest limit of memory left to this rank at that time."""
    limit: str
    """That limit: the machine's memory, a control group or a GPU."""
    limit_bytes: int
    """Its whole size, shared with the other ranks of the host."""


@dataclass
class GraphReport:
    """What one pass through a graph executes, read from the graph as ONNX Runtime optimized it."""

    forward_nodes: int
    """Nodes of the forward pass."""
    forward_operators: dict[str, int]
    """The most frequent operators of the forward pass."""
    aten: dict[str, int]
    """Operators of torch that ONNX Runtime calls, and how often."""
    python: dict[str, int]
    """Custom autograd functions that it calls."""
    triton: dict[str, int]
    """Triton kernels that it calls."""
    backward_nodes: int | None = None
    """Nodes of the backward pass, of a training graph."""
    backward_operators: dict[str, int] | None = None
    """The most frequent operators of the backward pass."""
    provider: str = ""
    """The session's execution provider: CUDAExecutionProvider on a GPU."""
    nodes_by_provider: dict[str, int] = field(default_factory=dict)
    """Nodes that each execution provider runs, copies between them included; empty: unknown, and noted."""


@dataclass
class TorchCalls:
    """An operator or layer that stays torch's inside ONNX Runtime's graph (`engine.torch_operators`)."""

    forward: int
    """Calls in forward passes so far."""
    backward: int
    """Calls in backward passes."""
    seconds: float
    """What they took together on rank 0's thread; on CUDA, to launch their kernels."""


@dataclass
class OnnxRuntime:
    """What ONNX Runtime was told and what it has executed, on rank 0."""

    repairs: list[str]
    """Repairs of ORTModule that are applied (docs/repairs.md)."""
    repairs_not_applied: dict[str, str]
    """Repairs that are not, each with its reason."""
    settings: dict[str, Any]
    """The recipe's settings of engine ort that are not their defaults."""
    variables: dict[str, str]
    """ORTModule's variables in the rank's environment."""
    forward_passes: int
    """Passes forward by ONNX Runtime, of the run's own steps: probes and comparisons are not counted."""
    backward_passes: int
    """Passes backward."""
    evaluation_passes: int
    """Passes in evaluation."""
    fallbacks: int
    """Passes that went to plain PyTorch; 0 unless `engine.allow_fallback`."""
    fallback_reasons: list[str]
    """Their reasons."""
    graphs_built: int
    """Training and evaluation graphs that were built."""
    nodes_run: int
    """Nodes executed so far, each graph's passes by its own nodes."""
    training_graph: GraphReport | None
    """The newest training graph; null: none was built."""
    evaluation_graph: GraphReport | None
    """The newest evaluation graph."""
    exports: int
    """Runs of torch.onnx.export."""
    re_exports: int
    """Exports beyond a model's first ones for training and evaluation, because a call, mode or value had changed."""
    export_seconds: float
    """Spent in those exports, with the passes of the model that they take."""
    label_density: float | None
    """Share of the labels that count in a batch, where the others are left out of the computation."""
    notes: list[str]
    """What a person should know of the exports; printed too."""
    torch_calls: dict[str, TorchCalls] = field(default_factory=dict)
    """Operators (`aten.lstm`) and layers (`module encoder.router`) that run as torch inside the graph."""
    torch_share: float = 0.0
    """Their share of the time of the passes."""
    deepcopy_before_export: ExportCopy | None = None
    """Whether a copy was exported, and what decided it."""


@dataclass
class Inductor:
    """What torch.compile has compiled, on rank 0."""

    graphs: int
    """Graphs compiled."""
    graph_breaks: int
    """Breaks, each of which leaves a piece of the model to eager PyTorch."""


@dataclass
class Parity:
    """The comparison with plain PyTorch (`engine.parity_steps`); its steps are in parity.jsonl."""

    verdict: str
    """`passed`, `failed` or `not compared`."""
    why: str | None = None
    """Why nothing was compared, or why something was that nobody asked for (`engine.parity_steps: auto`)."""
    steps: list[int] | None = None
    """The steps that were compared."""
    loss_difference: float | None = None
    """Largest relative difference of the loss."""
    gradient_difference: float | None = None
    """Largest relative difference of a gradient."""
    state_difference: float | None = None
    """Largest relative difference of a weight or buffer that a forward and backward pass changed."""
    rounding: list[str] | None = None
    """What differs by more than the tolerance and is rounding, as a pass in float64 shows."""
    worst: list[list[Any]] | None = None
    """Name and difference of what differs most."""
    tolerance: float | None = None
    """The recipe's `engine.parity_tolerance`, or its default for the precision."""
    dropouts_switched_off: int | None = None
    """Dropout layers that were off in both."""
    matmul_precision: str | None = None
    """The precision at which both were compared."""
    seconds: float | None = None
    """What the comparison took."""


@dataclass
class Binding:
    """Which cores the ranks run on (`launch.binding`)."""

    asked: str
    """The recipe's `launch.binding`."""
    used: str
    """core or numa; none: no rank is bound."""
    why: str | None
    """Why rank 0 is not, where none is."""
    cores: list[str]
    """Of each rank, as the kernel writes them: `0-7,16`."""


@dataclass
class EngineReport:
    """What really runs, and what stands in for something else; written by rank 0 at every logged step and the end."""

    engine: EngineChoice
    """Asked and used."""
    device: str
    """cpu or cuda."""
    precision: str
    """The recipe's `precision`."""
    matmul_precision: MatmulPrecision
    """Products of float32 matrices."""
    ranks: int
    """Processes that train."""
    threads_per_rank: int
    """CPU threads of each."""
    parameters: int
    """Parameters of the model."""
    trained_parameters: int
    """Those that get gradients."""
    sharding: str
    """`none`, `DistributedDataParallel` or `DeepSpeed ZeRO` and its stage."""
    optimizer: OptimizerChoice
    """Asked and used."""
    chunked_loss: ChunkedLoss
    """Head and loss in chunks."""
    attention: str | None
    """transformers' implementation of attention; null: not a model of transformers."""
    pretrained: dict[str, list[str]] | None
    """Weights of the model that the pretrained ones lack (`missing`), pretrained ones that the model has not
    (`unexpected`), how the vocabulary changed (`resized`), and a head of another number of labels, which starts at
    random (`relabelled`); null: nothing was loaded."""
    gradient_checkpointing: str | None
    """Who computes layers again in the backward pass; null: nobody."""
    onnxruntime: OnnxRuntime | None
    """ONNX Runtime's part; empty where it was not asked for."""
    versions: dict[str, str]
    """Versions of the packages that decide numbers and speed."""
    fp16_optimizer: FusedNorm
    """Overflow check and gradient norm."""
    freed_memory: str | None
    """What becomes of memory that the process frees; null: on a GPU."""
    binding: Binding | None = None
    """Cores of each rank."""
    unused_parameters: list[str] = field(default_factory=list)
    """Parameters that took no part in the loss; DistributedDataParallel got zeros for them."""
    inductor: Inductor | None = None
    """torch.compile's part, on engine inductor."""
    parity: Parity | None = None
    """The comparison with plain PyTorch, where there was to be one."""

    def to_json(self) -> dict[str, Any]:
        """The content of engine.json."""
        return {
            name: {} if value is None and name in EMPTY else value
            for name, value in as_json(self).items()
        }
