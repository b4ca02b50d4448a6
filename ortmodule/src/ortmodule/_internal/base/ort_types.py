"""Types of other packages' objects as far as ortmodule uses them.

These are stubs for the type checker, without code. ONNX Runtime 1.19.2 ships no annotations, and
most of its attributes here are private. attached.py has what ortmodule keeps with its objects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import onnx
    import torch
    from torch import nn

AnyFunction = Callable[..., Any]
"""A function of another package, called with the arguments of its caller."""
Args = tuple[Any, ...]
"""Positional arguments of such a function."""
Kwargs = dict[str, Any]
"""Keyword arguments of such a function."""


class GraphInfo(Protocol):
    """The result of a model's post-export processing: ORT's PostExportProcessedModelInfo."""

    onnx_graph_input_names: list[str]
    onnx_graph_input_names_require_grad: list[str]
    onnx_graph_input_data_accessor_user_defined: dict[
        str, Callable[[Args, Kwargs], torch.Tensor | None]
    ]
    onnx_graph_input_const_as_tensor: dict[str, torch.Tensor]
    _post_export_processed_model: onnx.ModelProto
    _flattened_module: nn.Module


class ExportInfo(Protocol):
    """ORT's ModelInfoForExport."""

    onnx_graph_input_const_as_tensor: dict[str, torch.Tensor]
    onnx_graph_input_names: list[str]
    onnx_graph_input_names_require_grad: list[str]
    export_mode: torch.onnx.TrainingMode


class RuntimeOptions(Protocol):
    """ORT's _RuntimeOptions."""

    enable_compute_optimizer: bool
    enable_custom_autograd_function: bool
    enable_embedding_sparse_optimizer: bool
    memory_optimization_level: object
    print_input_density: bool
    recompute_probe_config: str

    def memory_optimizer_is_enabled(self) -> bool: ...


class GraphTransitionManager(Protocol):
    """ORT's GraphTransitionManager."""

    _original_model_has_changed: bool
    _exported_model_info: object
    _post_export_processed_model_info: GraphInfo
    _runtime_options: RuntimeOptions

    def get_post_processed_model(self, inputs: Args, kwargs: Kwargs) -> tuple[bool, GraphInfo]: ...


class OrtSession(Protocol):
    """ORT's InferenceSession."""

    def get_providers(self) -> list[str]: ...
    def get_provider_options(self) -> Mapping[str, Mapping[str, str]]: ...


class SessionOptions(Protocol):
    """ORT's SessionOptions."""

    execution_order: object
    intra_op_num_threads: int
    optimized_model_filepath: str

    def add_session_config_entry(self, key: str, value: str) -> None: ...


class Agent(Protocol):
    """ORT's execution agents."""

    _inference_session: OrtSession


class OnnxModels(Protocol):
    """ORT's ONNXModels."""

    optimized_model: onnx.ModelProto


class MemoryObserver(Protocol):
    """ORT's MemoryObserver."""

    cluster_id_combination_to_saving_symbolics_map: dict[str, object]
    symbolic_dim_collecting_completed: bool
    _is_enabled: bool


class Inspector(Protocol):
    """ORT's RuntimeInspector."""

    memory_ob: MemoryObserver


class Logging(Protocol):
    """ORT's _LoggingOptions."""

    log_level: int


class DebugOptions(Protocol):
    """ORT's DebugOptions."""

    logging: Logging


class FallbackManager(Protocol):
    """ORT's _FallbackManager."""

    def is_pending(self) -> bool: ...


class BuiltGraph(Protocol):
    """ORT's GraphInfo of a training graph."""

    output_grad_indices_non_differentiable: list[int]


class Manager(Protocol):
    """ORT's GraphExecutionManager, of training or of inference."""

    _debug_options: DebugOptions
    _device: torch.device
    _export_mode: torch.onnx.TrainingMode
    _exception: Exception | None
    _execution_agent: Agent  # None before the first pass
    _fallback_manager: FallbackManager
    _flattened_module: nn.Module
    _graph_info: BuiltGraph  # of a training graph, once it is built
    _graph_transition_manager: GraphTransitionManager
    _logger: logging.Logger
    _onnx_models: OnnxModels
    _original_module: nn.Module
    _runtime_inspector: Inspector
    _runtime_options: RuntimeOptions

    def forward(self, *args: object, **kwargs: object) -> Any: ...
    def _initialize_graph_builder(self, info: GraphInfo) -> None: ...
    def _build_graph(self, config: object) -> None: ...
    def _get_graph_transformer_config(self) -> Any: ...
    def _get_session_config(self) -> Any: ...


class TorchModule(Protocol):
    """ORT's TorchModuleORT."""

    forward: Any
    _flattened_module: nn.Module
    _original_module: nn.Module

    def is_training(self) -> bool: ...
    def _execution_manager(self, training: bool) -> Manager: ...


class OrtModule(Protocol):
    """ORT's ORTModule."""

    module: nn.Module
    _torch_module: TorchModule


class ShapeInference(Protocol):
    """ORT's SymbolicShapeInference."""

    aten_op_dispatcher_: dict[str, Callable[[onnx.NodeProto], None]]
    known_vi_: dict[str, onnx.ValueInfoProto]
    out_mp_: onnx.ModelProto
    prefix_: str
    run_: bool
    symbolic_dims_: dict[str, Any]  # sympy's
    sympy_data_: dict[str, Any]

    def _try_get_value(self, node: onnx.NodeProto, index: int) -> Any: ...
    def _get_shape(self, node: onnx.NodeProto, index: int) -> list[Any]: ...
    def _update_computed_dims(self, dims: Sequence[object]) -> None: ...
    def _new_symbolic_dim_from_output(
        self, node: onnx.NodeProto, output: int = 0, dim: int = 0
    ) -> Any: ...
    def _new_symbolic_shape(
        self, rank: int, node: onnx.NodeProto, output: int = 0
    ) -> list[Any]: ...
    def _broadcast_shapes(
        self, first_shape: Sequence[object], second_shape: Sequence[object]
    ) -> list[Any]: ...
