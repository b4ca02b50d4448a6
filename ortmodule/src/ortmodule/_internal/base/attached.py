"""Records that this package keeps with objects of ONNX Runtime: one type for each kind of object.

A record is the object's attribute `_ortmodule`, so that it lives as long as the object. The record
of a TorchModuleORT is in graph_cache.py, which has the type of its field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from ortmodule._internal.base.settings import Settings
from ortmodule._internal.base.trace_facts import TraceFacts

if TYPE_CHECKING:
    import onnx
    import torch

    from ortmodule._internal.base import ort_types
    from ortmodule._internal.base.graph import GraphNodeCounts

RECORD_ATTRIBUTE = "_ortmodule"
OrtObject = TypeVar("OrtObject")
LinesByNode = dict[tuple[str, str], dict[str, None]]
"""By a layer's path and an operator: the lines of the model's code that its nodes come from."""


class AttachedRecord(Generic[OrtObject]):
    @classmethod
    def attached_to(cls, ort_object: OrtObject) -> Self:
        """Return the record of an object of this kind; the first call creates it."""
        record: Self | None = vars(ort_object).get(RECORD_ATTRIBUTE)
        if record is None:
            record = vars(ort_object)[RECORD_ATTRIBUTE] = cls()
        return record


class GradientReach(NamedTuple):
    """How the gradients of one training graph depend on its inputs and outputs."""

    training_graph: onnx.GraphProto
    needed_positions: list[int]
    """Positions of the inputs and weights whose values the backward pass needs."""
    reached_by_output: list[set[str]]
    """Names of the inputs and weights that each output depends on with a gradient."""


@dataclass
class ManagerRecord(AttachedRecord["ort_types.Manager"]):
    """Of a GraphExecutionManager; a copy of the manager has none (pickling.py)."""

    norm_by_path: dict[str, Any] | None = None
    """The BatchNorm layers with statistics; None before the first pass."""
    gradient_reach: GradientReach | None = None
    """Of the graph of the newest pass."""


@dataclass
class GraphManagerRecord(AttachedRecord["ort_types.GraphTransitionManager"]):
    """Of a GraphTransitionManager."""

    trace_facts: TraceFacts = field(default_factory=TraceFacts)
    """Of the newest trace."""
    batch: tuple[ort_types.Args, ort_types.Kwargs] | None = None
    """The arguments of the newest export, until its session exists."""


@dataclass
class GraphInfoRecord(AttachedRecord["ort_types.GraphInfo"]):
    """Of a PostExportProcessedModelInfo."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    """All outputs of the newest pass, also those that this package added."""
    output_dtypes: list[torch.dtype | None] | None = None
    """The dtypes that the model returns, None for an unknown one; None before the first pass."""
    equal_dims: list[list[tuple[str, int]]] | None = None
    """Inputs and axes that the graph assumes to be equal; None before the first comparison."""


@dataclass
class AgentRecord(AttachedRecord["ort_types.Agent"]):
    """Of an execution agent."""

    node_counts: GraphNodeCounts | None = None
    lines_by_node: LinesByNode = field(default_factory=dict)


@dataclass
class OptionsRecord(AttachedRecord["ort_types.RuntimeOptions"]):
    """Of a _RuntimeOptions, which a module's managers and their copies have."""

    settings: Settings = field(default_factory=Settings)
    """The module's settings; the defaults for an ORTModule that ORT's own class made."""
    inlines_custom_functions: bool = False
    lines_by_node: LinesByNode = field(default_factory=dict)
    """Of the newest export."""
    lines_by_torch_by_onnx_operator: dict[str, dict[str, str]] = field(default_factory=dict)
    """By ONNX operator: the torch operators that were translated to it, and where the model has each."""
    blamed_operators: set[str] = field(default_factory=set)
    """Operators of torch at whose form in ONNX a build has failed."""
    torch_layer_paths: set[str] = field(default_factory=set)
    """Layers for which earlier exports detected that they must run as torch."""


@dataclass
class InferenceRecord(AttachedRecord["ort_types.ShapeInference"]):
    """Of a SymbolicShapeInference, which is one for each graph."""

    node: onnx.NodeProto | None = None
    """The node whose shapes are inferred now."""
    batch_size_by_dim_name: dict[str, int] | None = None
    """Sizes in the batch of the export; None before the first of them is read."""
    name_by_either_size: dict[frozenset[object], str] = field(default_factory=dict)
    """By two sizes: the symbolic size of a dimension that has one of them."""
