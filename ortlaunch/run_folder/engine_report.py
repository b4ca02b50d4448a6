"""engine.json as types: the engine and options in use, and each substitute with its reason.

The text under a field is its manual, as in records.py. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ortlaunch.base.units import shorten_to_one_line
from ortlaunch.run_folder.records import json_values_of_record

# Fields written as {} instead of null, so that readers can look keys up without a check.
EMPTY = ("onnxruntime",)


@dataclass
class MeasuredEngine:
    """The measurement of one engine."""

    state: str
    """`measured`, or why it was not measured."""
    reason: str | None = None
    """Details of that reason."""
    seconds_per_step: dict[str, float] | None = None
    """Median, quartiles, minimum and maximum of all measured steps, in seconds."""
    samples_per_second: float | None = None
    """Speed over all ranks."""
    parity: dict[str, object] | None = None
    """The comparison with plain PyTorch: its verdict and figures."""
    first_step_seconds: float | None = None
    """Seconds from the launch to the end of the first step, compilation or export included."""

    def run_or_single_step_seconds(
        self, optimizer_steps_or_none: int | None, quantile_name: str
    ) -> float:
        """Return the seconds of a run; of one step if its length is unknown.

        Args:
            optimizer_steps_or_none: optimizer steps of the run; None: unknown.
            quantile_name: `median`, `quartile_1` or `quartile_3` of the duration of a step.
        """
        assert self.seconds_per_step is not None
        assert self.first_step_seconds is not None
        a_step = self.seconds_per_step[quantile_name]
        return (
            a_step
            if optimizer_steps_or_none is None
            else self.first_step_seconds + (optimizer_steps_or_none - 1) * a_step
        )


@dataclass
class Choice:
    """The decision of `engine.name: auto`."""

    asked: str
    """auto."""
    chosen: str
    """The engine with the shortest run."""
    why: str
    """The measured engines, the time of the measurement, and engines that were left out."""
    measured: dict[str, MeasuredEngine]
    """The measurement of each engine."""
    bench: str | None = None
    """The folder of the measurement."""
    key: str | None = None
    """Digest of everything that affects speed; the decision is cached under it."""

    @classmethod
    def from_choice_json(cls, choice_record: Mapping[str, Any]) -> Choice:
        """Return the decision from the contents of choice.json."""
        # The last two fields are absent if their values were None.
        measured = {
            name: MeasuredEngine(**engine_record)
            for name, engine_record in choice_record["measured"].items()
        }
        named = (choice_record["asked"], choice_record["chosen"], choice_record["why"], measured)
        return cls(*named, choice_record.get("bench"), choice_record.get("key"))


@dataclass
class EngineChoice:
    """The requested engine, and the one that runs."""

    asked: str
    """The recipe's `engine.name`."""
    used: str
    """The engine that ran: ort, inductor or eager."""
    fallback_reason: str | None
    """Why another engine than the requested one runs (`engine.allow_fallback`), as ONNX Runtime or
    the exporter reports it; null: the requested one runs."""
    # Copied, so that engine.json alone explains which engine ran.
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

    @property
    def fallback(self) -> str | None:
        """A line on the engine that replaced the requested one, with its reason; None without one."""
        line = f"asked for {self.asked}, fell back to {self.used}: {self.fallback_reason}"
        return shorten_to_one_line(line, 400) if self.fallback_reason else None


@dataclass
class MatmulPrecision:
    """The precision of float32 matmuls."""

    asked: str
    """The recipe's `engine.matmul_precision`."""
    in_force: str
    """`torch.get_float32_matmul_precision()` of the run."""
    mantissa_bits: int
    """Mantissa bits that a matmul on this rank keeps, measured before step 1."""
    format: str
    """The number format with that many bits: float32, TensorFloat32 or bfloat16."""
    gains_nothing: str | None
    """Why a requested lower precision has no effect on this hardware; null: it has one, or float32
    was requested."""
    # torch calls oneDNN for float32 matmuls only at "medium" (worker/model/matmul_precision.py).
    onednn: bool = False
    """Whether oneDNN computes the matmuls of `highest` (`engine.onednn`); torch's setting is then
    "medium"."""


@dataclass
class ChunkedLoss:
    """The head and loss of a language model, computed in chunks of rows (`engine.chunked_loss`)."""

    asked: str | int
    """The recipe's `engine.chunked_loss`."""
    rows: int | None
    """Rows of a chunk; null: the loss is computed whole."""
    why: str | None
    """Why the loss is computed whole or in chunks, if the recipe did not request exactly that."""


@dataclass
class OptimizerGroup:
    """Parameters that are optimized alike, or the frozen ones."""

    optimizer: str | None
    """Name of the optimizer in the recipe; null: they are frozen."""
    learning_rate: float
    """Peak learning rate; 0: they are frozen."""
    weight_decay: float
    """Weight decay."""
    values: int
    """Number of values in all parameters."""
    parameters: list[str]
    """Names of the parameters in the user's model."""


@dataclass
class OptimizerChoice:
    """The requested optimizer, and the one that runs."""

    asked: str
    """The recipe's `optimizer.name`."""
    used: str
    """The class that runs."""
    why: str | None
    """Why it replaces the requested one; null: it is the requested one."""
    groups: list[OptimizerGroup]
    """Every parameter with its group; one that a LightningModule configures is not listed."""


@dataclass
class FusedNorm:
    """Overflow check and gradient norm of ZeRO 1 and 2 in one pass (`zero.fused_gradient_norm`)."""

    applied: bool
    """Whether the fused pass is used."""
    why: str
    """Why it is not; empty: it is."""


@dataclass
class GraphReport:
    """The operators of one pass through a graph, as ONNX Runtime optimized it."""

    forward_nodes: int
    """Nodes of the forward pass."""
    forward_operators: dict[str, int]
    """The most frequent operators of the forward pass."""
    aten: dict[str, int]
    """torch operators that ONNX Runtime calls, with the number of calls."""
    python: dict[str, int]
    """Custom autograd functions that ONNX Runtime calls, with the number of calls."""
    triton: dict[str, int]
    """Triton kernels that ONNX Runtime calls, with the number of calls."""
    backward_nodes: int | None = None
    """Nodes of the backward pass; absent for an evaluation graph."""
    backward_operators: dict[str, int] | None = None
    """The most frequent operators of the backward pass."""
    provider: str = ""
    """The session's execution provider: CUDAExecutionProvider on a GPU."""
    # Nodes without a CUDA kernel run on the CPU, at the price of copies.
    nodes_by_provider: dict[str, int] = field(default_factory=dict)
    """Nodes that each execution provider runs, copies between them included; empty: unknown, with a
    note."""


@dataclass
class TorchCalls:
    """An operator or layer that torch runs inside ORT's graph (`engine.torch_operators`)."""

    forward: int
    """Calls in forward passes so far."""
    backward: int
    """Calls in backward passes."""
    # CUDA kernels run asynchronously; a wait for them here would slow the training.
    seconds: float
    """Seconds of all these calls on rank 0's thread; on CUDA only for launching their kernels."""


@dataclass
class Postprocess:
    """The user's function on the exported graph (`engine.postprocess`)."""

    function: str
    """The function, as `module:function`."""
    nodes_before: int
    """Nodes of the newest exported training graph; of an evaluation graph if only that exists."""
    nodes_after: int
    """Nodes of the graph that the function returned."""


@dataclass
class OnnxRuntime:
    """The settings of ONNX Runtime and counts of its work, on rank 0."""

    repairs: list[str]
    """Repairs of ORTModule that are applied (docs/ortmodule/repairs.md)."""
    repairs_not_applied: dict[str, str]
    """Repairs that are not applied, each with its reason."""
    settings: dict[str, Any]
    """The recipe's settings of engine ort that differ from their defaults."""
    variables: dict[str, str]
    """ORTModule's variables in the rank's environment."""
    forward_passes: int
    """Forward passes by ONNX Runtime in the run's own steps; probes and comparisons are not
    counted."""
    backward_passes: int
    """Backward passes by ONNX Runtime."""
    evaluation_passes: int
    """Forward passes in evaluations."""
    fallbacks: int
    """Passes that ran in plain PyTorch; 0 unless `engine.allow_fallback`."""
    fallback_reasons: list[str]
    """Reasons of these fallbacks."""
    graphs_built: int
    """Training and evaluation graphs that were built."""
    nodes_run: int
    """Nodes executed so far: the sum over graphs of passes times nodes."""
    training_graph: GraphReport | None
    """The newest training graph; null: none was built."""
    evaluation_graph: GraphReport | None
    """The newest evaluation graph; null: none was built."""
    exports: int
    """Runs of torch.onnx.export."""
    re_exports: int
    """Exports after a model's first ones for training and evaluation, because a call, mode or value
    had changed."""
    export_seconds: float
    """Seconds of all exports, including the model's passes during them."""
    label_density: float | None
    """Share of a batch's labels that count in the loss, if the others are left out of the
    computation."""
    notes: list[str]
    """Notes about the exports for the user; they are printed, too."""
    torch_calls: dict[str, TorchCalls] = field(default_factory=dict)
    """Operators (`aten.lstm`) and layers (`module encoder.router`) that torch runs inside the
    graph."""
    torch_share: float = 0.0
    """Share of these operators and layers in the time of the passes."""
    postprocess: Postprocess | None = None
    """The function on the exported graph; null: none."""


@dataclass
class Inductor:
    """The work of torch.compile on rank 0."""

    graphs: int
    """Graphs compiled."""
    graph_breaks: int
    """Graph breaks; at each one a part of the model runs in eager PyTorch."""


@dataclass
class Parity:
    """The comparison with plain PyTorch (`engine.parity_steps`); its steps are in parity.jsonl."""

    verdict: str
    """`passed`, `failed` or `not compared`."""
    why: str | None = None
    """Why nothing was compared, or why `engine.parity_steps: auto` chose a comparison."""
    steps: list[int] | None = None
    """The steps that were compared."""
    loss_difference: float | None = None
    """Largest relative difference of the loss."""
    gradient_difference: float | None = None
    """Largest relative difference of a gradient."""
    state_difference: float | None = None
    """Largest relative difference of a weight or buffer that a forward and backward pass changed.
    """
    rounding: list[str] | None = None
    """Tensors that differ by more than the tolerance only by rounding, as a pass in float64
    shows."""
    worst: list[list[Any]] | None = None
    """Name and difference of the tensors that differ most."""
    tolerance: float | None = None
    """The recipe's `engine.parity_tolerance`, or its default for the precision."""
    dropouts_switched_off: int | None = None
    """Dropout layers that were off in both engines."""
    matmul_precision: str | None = None
    """The matmul precision of both engines during the comparison."""
    seconds: float | None = None
    """Duration of the comparison."""


@dataclass
class Binding:
    """The cores on which the ranks run (`launch.binding`)."""

    asked: str
    """The recipe's `launch.binding`."""
    used: str
    """core or numa; none: no rank is bound."""
    why: str | None
    """Why rank 0 is not bound; null: it is bound."""
    cores: list[str]
    """Cores of each rank, in the kernel's notation: `0-7,16`."""


@dataclass
class EngineReport:
    """The engine and options in use, with each substitute.

    Rank 0 writes it at every logged step and at the end.
    """

    engine: EngineChoice
    """The requested and the used engine."""
    device: str
    """cpu or cuda."""
    precision: str
    """The recipe's `precision`."""
    matmul_precision: MatmulPrecision
    """The precision of float32 matmuls."""
    ranks: int
    """Processes that train."""
    threads_per_rank: int
    """CPU threads of each rank."""
    # Both count elements of tensors, as `sum(p.numel() ...)`.
    parameters: int
    """Parameters of the model."""
    trained_parameters: int
    """Parameters that get gradients."""
    sharding: str
    """`none`, `DistributedDataParallel`, `DeepSpeed ZeRO` and its stage, or `FSDP2` and its mesh."""
    optimizer: OptimizerChoice
    """The requested and the used optimizer."""
    chunked_loss: ChunkedLoss
    """Head and loss in chunks."""
    attention: str | None
    """transformers' implementation of attention; null: not a transformers model."""
    pretrained: dict[str, list[str]] | None
    """Differences of the loaded weights: weights only in the model (`missing`), weights only in the
    pretrained file (`unexpected`), a changed vocabulary (`resized`), and a head with another number
    of labels, which is initialized at random (`relabelled`); null: nothing was loaded."""
    gradient_checkpointing: str | None
    """The implementation that recomputes layers in the backward pass; null: none."""
    onnxruntime: OnnxRuntime | None
    """ONNX Runtime's part; empty if another engine was requested."""
    versions: dict[str, str]
    """Versions of the packages that affect results and speed."""
    fp16_optimizer: FusedNorm
    """Overflow check and gradient norm."""
    freed_memory: str | None
    """How the allocator handles memory that the process frees; null: on a GPU."""
    binding: Binding | None = None
    """Cores of each rank."""
    unused_parameters: list[str] = field(default_factory=list)
    """Parameters that took no part in the loss; DistributedDataParallel and DeepSpeed take zeros for
    their gradients."""
    inductor: Inductor | None = None
    """torch.compile's part, with engine inductor."""
    parity: Parity | None = None
    """The comparison with plain PyTorch, if one was planned."""
    tensor_slices: dict[str, int | None] | None = None
    """The dimension along which the ranks of `parallel.tensor` slice each parameter; null for one
    that each of them has whole."""
    quantized_weights: str | None = None
    """The form of the frozen weights (`model.quantize`), and how many are in it; null: none."""
    packed_documents: str | None = None
    """How packed documents are kept apart: by attention, or by a mask, its size, and the reason why;
    null: samples are not packed, or documents attend to each other."""
    plain_evaluations: int = 0
    """Evaluations of engine ort that plain PyTorch ran, because the export of a graph would have
    taken longer than the graph would have saved so far."""

    def to_json(self) -> dict[str, Any]:
        """Return the contents of engine.json."""
        return {
            name: {} if value is None and name in EMPTY else value
            for name, value in json_values_of_record(self).items()
        }
