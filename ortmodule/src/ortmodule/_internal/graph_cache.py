"""Choose the graph of each pass by grad mode, the model's modes and the call; keep the last few.

ORT has two managers with one graph each, chosen by the wrapper's mode. Here every graph has its own
manager, with a `_GraphValidity` of everything that the graph depends on. A pass runs in the first of the last
`KEPT_GRAPHS` graphs whose key matches, or in a new one. Gradients are computed wherever PyTorch would
compute them, in evaluation mode too.
"""

from __future__ import annotations

import copy
import functools
import gc
import sys
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ortmodule._internal.base.attached import AttachedRecord, GraphManagerRecord, OptionsRecord
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.ort_types import AnyFunction
from ortmodule._internal.base.repair_registry import (
    EVALUATION,
    MANAGER,
    TRAINING,
    TRANSITION,
    repair,
    replace_ort_function,
)
from ortmodule._internal.base.source_guard import owning_class_or_module
from ortmodule._internal.graph_repairs import broadcasts
from ortmodule._internal.state.model_state import GraphModelState
from ortmodule._internal.state.python_values import (
    buffer_versions_without_batch_norm_or_none,
    note_export_for_other_sizes_or_buffers,
    sizes_graph_depends_on_or_none,
)
from ortmodule._internal.tracing import grad_mode, kept_tensors
from ortmodule._internal.tracing.grad_mode import tensors_inside_nested_values

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import Args, Kwargs, Manager, OrtModule, TorchModule

KEPT_GRAPHS = 4
"""The number of graphs of one ORTModule. With one more, the least recently used is freed."""
# Exports of one model after which the run notes that the graphs keep changing.
_MANY_EXPORTS = 2 * KEPT_GRAPHS
_SIZE_OR_BUFFER = "a size or buffer"
# ONNX operators that draw random numbers with ORT's generator.
_DRAWING_OPERATORS = {"Dropout", "BitmaskDropout", "BiasDropout", "BitmaskBiasDropout", "Bernoulli", "Multinomial",
            "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}  # fmt: skip
SECOND_BACKWARD_MESSAGE = (
    "Trying to backward through the graph a second time. ONNX Runtime frees its intermediate "
    "values in the first backward pass, also with retain_graph=True. Call the module again for the "
    "second pass, or add the losses and call backward once"
)


@repair(
    "choose_graph_per_pass",
    "install",
    20,
    fault="Every call runs in the graph of the first one: another argument or number gives a "
    "loss of 1.4941 instead of 3.0947, and `train()` under `no_grad`, `eval()` with gradients, "
    "a backward pass after another forward pass and a checkpoint around the module give other "
    "values or no gradients.",
    example="test_repairs.py::test_a_changed_call_is_exported_again[another number]",
    sources={
        "_utils:patch_torch_module_ort_forward_method": "1367e8c025932ee9",
        f"{TRAINING}._create_autofunction_class": "0028d11175495ec4",
        f"{TRAINING}.forward": "e4a9f9b107877f89",
        f"{EVALUATION}.forward": "1f8e3538efd4c23d",
        f"{TRANSITION}.get_post_processed_model": "a766fd8849dbdd15",
        f"{MANAGER}.__getstate__": "8c59e5cbc2348a1c",
    },
)
def _share_training_flag_with_model() -> None:
    """Make an ORTModule's `training` and its model's the same flag."""

    def read_flag(ort_module: OrtModule) -> bool:
        torch_module = vars(ort_module).get("_torch_module")
        return bool(
            torch_module._original_module.training if torch_module else vars(ort_module)["training"]
        )

    def write_flag(ort_module: OrtModule, is_training: bool) -> None:
        if torch_module := vars(ort_module).get("_torch_module"):
            torch_module._original_module.training = is_training
        else:
            vars(ort_module)["training"] = is_training

    def set_attribute(
        original: Callable[..., None], ort_module: OrtModule, name: str, value: bool
    ) -> None:
        if name == "training":
            write_flag(ort_module, value)
        else:
            original(ort_module, name, value)

    owning_class_or_module("ortmodule:ORTModule").training = property(read_flag, write_flag)
    replace_ort_function("ortmodule:ORTModule.__setattr__", set_attribute)


@repair(
    "choose_graph_per_pass",
    "install",
    20,
    replaces="_utils:patch_torch_module_ort_forward_method",
)
def _install_forward_that_chooses_graph(
    original_patch: Callable[..., None], ort_torch_module: TorchModule
) -> None:
    """Give the module inside an ORTModule a forward method that chooses a manager for each call."""
    original_patch(ort_torch_module)
    graphs = TorchModuleRecord.attached_to(ort_torch_module).graphs

    # wraps copies the name, by which pickle finds the method.
    @functools.wraps(ort_torch_module.forward.__func__)
    def forward(self: TorchModule, *args: object, **kwargs: object) -> object:
        return _graph_choosing_forward_hidden_from_compile("torch._dynamo" in sys.modules)(
            graphs, ort_torch_module, args, kwargs
        )

    ort_torch_module.forward = types.MethodType(forward, ort_torch_module)


@functools.cache
def _graph_choosing_forward_hidden_from_compile(is_torch_compile_used: bool) -> AnyFunction:
    """Return GraphManagerCache's forward function, hidden from torch.compile if that is in use."""
    return (
        cast(
            AnyFunction,
            torch._dynamo.disable(GraphManagerCache.choose_or_export_graph_and_run_forward),
        )
        if is_torch_compile_used
        else GraphManagerCache.choose_or_export_graph_and_run_forward
    )


@repair(
    "choose_graph_per_pass",
    "install",
    20,
    replaces="_torch_module_ort:TorchModuleORT.is_training",
)
def _needs_training_graph_without_inputs(
    original_is_training: Callable[..., bool], ort_torch_module: TorchModule
) -> bool:
    """Return whether a pass without input gradients would use the training manager.

    ORT's own code calls this.
    """
    return _has_training_layer_or_gradient(ort_torch_module._original_module, ())


@repair(
    "choose_graph_per_pass",
    "install",
    20,
    replaces=f"{TRAINING}._create_autofunction_class",
)
def _subclass_function_to_refuse_second_backward(
    original_create_class: AnyFunction, manager: Manager
) -> object:
    """Let a second backward pass raise a clear error; ORT's own was an AttributeError."""
    ort_function = original_create_class(manager)

    class _BackwardOnce(ort_function):  # type: ignore[misc,valid-type]
        @staticmethod
        def backward(ctx: Any, *gradients: object) -> Any:
            # ORT deletes the state in the first backward pass.
            if not hasattr(ctx.run_info, "state"):
                raise RuntimeError(SECOND_BACKWARD_MESSAGE)
            return ort_function.backward(ctx, *gradients)

    return _BackwardOnce


class _PassProperties(NamedTuple):
    """The properties of a pass that select its graph, independent of the existing graphs."""

    needs_training_graph: bool
    """Whether the pass needs a training graph, see `_needs_training_graph`."""
    is_training_mode: bool
    """Whether the whole model is in training mode."""
    gradients_enabled: bool
    """Whether the grad mode is on."""
    argument_form: object
    """The types and structure of the arguments, the autocast type, and determinism; see `_collect_pass_properties`."""
    args: Args
    kwargs: Kwargs


class _GraphValidity:
    """The conditions under which a manager's graph is valid; made after its first pass."""

    def __init__(self, manager: Manager, first_pass_properties: _PassProperties) -> None:
        module = manager._flattened_module
        facts = GraphManagerRecord.attached_to(manager._graph_transition_manager).trace_facts
        (
            self._needs_training_graph,
            self._is_training_mode,
            self._gradients_enabled,
            self._argument_form,
        ) = first_pass_properties[:4]
        # A graph is valid for one grad mode only if the model reads the mode, or if the graph calls
        # Python code, which saves tensors for a backward pass only with gradients on.
        calls_python = any(
            node.op_type == "PythonOp" for node in manager._onnx_models.optimized_model.graph.node
        )
        self._is_one_mode_only = calls_python or facts.reads_grad_mode
        self._sizes = sizes_graph_depends_on_or_none(
            manager, (first_pass_properties.args, first_pass_properties.kwargs)
        )
        self._buffers = buffer_versions_without_batch_norm_or_none(manager)
        self._frozen_parameters = [
            parameter for parameter in module.parameters() if not parameter.requires_grad
        ]
        self._traced_state = (
            GraphModelState(module, facts)
            if OptionsRecord.attached_to(manager._runtime_options).settings.follow_model_state
            else None
        )

    def has_replaced_model_parts(self) -> bool:
        """Return whether weights, buffers, layers or hooks are other objects than the graph's.

        Such a graph is never used again.
        """
        return (
            self._traced_state is not None
            and self._traced_state.has_replaced_weight_layer_or_hook()
        )

    def difference_from_pass_or_empty(
        self, manager: Manager, pass_properties: _PassProperties
    ) -> str:
        """Return why the graph is not valid for `pass_properties`; empty if it is."""
        if (self._needs_training_graph, self._argument_form) != (
            pass_properties.needs_training_graph,
            pass_properties.argument_form,
        ):
            return "the call"
        if self._gradients_enabled != pass_properties.gradients_enabled and (
            self._is_one_mode_only or not self._gradients_enabled
        ):
            return "the grad mode"
        if pass_properties.gradients_enabled and any(
            parameter.requires_grad for parameter in self._frozen_parameters
        ):
            return "a frozen weight"
        if self._sizes != sizes_graph_depends_on_or_none(
            manager, (pass_properties.args, pass_properties.kwargs)
        ) or self._buffers != buffer_versions_without_batch_norm_or_none(manager):
            return _SIZE_OR_BUFFER
        if broadcasts.batch_has_one_where_graph_assumes_equal_sizes(
            manager, pass_properties.args, pass_properties.kwargs
        ):
            return "a size that is now 1"
        if self._traced_state is None:
            return (
                ""
                if self._is_training_mode == pass_properties.is_training_mode
                else "the model's mode"
            )
        return self._traced_state.first_changed_value_name_or_empty()


class GraphManagerCache:
    """The managers of one ORTModule that have a graph, the most recently used first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.cached_graphs: list[tuple[Manager, _GraphValidity]] = []
        self._exported_groups: list[tuple[bool, bool]] = []

    def __reduce__(self) -> tuple[type[GraphManagerCache], tuple[()]]:
        # A copy of an ORTModule exports its own graphs.
        return GraphManagerCache, ()

    def choose_or_export_graph_and_run_forward(
        self, ort_torch_module: TorchModule, forward_args: Args, forward_kwargs: Kwargs
    ) -> object:
        """Run the forward pass of a TorchModuleORT."""
        manager_for_mode = ort_torch_module._execution_manager
        # ORT has fallen back to PyTorch, so its own manager runs the pass.
        if manager_for_mode(True)._fallback_manager.is_pending():
            return manager_for_mode(ort_torch_module.is_training()).forward(
                *forward_args, **forward_kwargs
            )
        ort_torch_module._flattened_module.training = ort_torch_module._original_module.training
        properties = _collect_pass_properties(manager_for_mode(True), forward_args, forward_kwargs)
        # Threads share the graphs, and ORT's attribute of the manager in use.
        with self._lock:
            cached_manager, export_reason = self._drop_stale_and_take_valid_manager_or_reason(
                manager_for_mode, properties
            )
            if cached_manager is None:
                output = self._export_new_graph_run_first_pass_and_cache_it(
                    manager_for_mode, properties, export_reason
                )
            else:
                _set_ort_manager_in_use(
                    manager_for_mode, properties.needs_training_graph, cached_manager
                )
            manager = manager_for_mode(properties.needs_training_graph)
        if cached_manager is not None:
            output = cached_manager.forward(*forward_args, **forward_kwargs)
        kept_tensors.put_tensors_kept_by_trace_back_into_python_containers(manager)
        _refuse_random_draws_in_recomputation(manager)
        return output

    def reason_for_another_export_or_empty(
        self, ort_torch_module: TorchModule, forward_args: Args, forward_kwargs: Kwargs
    ) -> str:
        """Return what makes none of the graphs valid for a call; empty if one is."""
        manager = ort_torch_module._execution_manager(True)
        if manager._fallback_manager.is_pending():
            return ""
        properties = _collect_pass_properties(manager, forward_args, forward_kwargs)
        reason = "no graph exists"
        for graph_manager, validity in self.cached_graphs:
            reason = validity.difference_from_pass_or_empty(graph_manager, properties)
            if not reason:
                break
        return reason

    def _drop_stale_and_take_valid_manager_or_reason(
        self, get_manager_for_mode: Callable[[bool], Manager], pass_properties: _PassProperties
    ) -> tuple[Manager | None, str]:
        """Return the manager whose graph is valid for this call, and move it to the front.

        If there is none, return None and the reason why the last checked graph is not valid.
        """
        reason = "a weight, buffer, layer or hook of the model"
        for graph_manager in (
            get_manager_for_mode(mode)._graph_transition_manager for mode in (True, False)
        ):
            # ORT sets this flag when an attribute of the ORTModule is set.
            if graph_manager._original_model_has_changed:
                graph_manager._original_model_has_changed = False
                self.cached_graphs = []
                reason = "an attribute of the ORTModule"
        self.cached_graphs = [
            (manager, validity)
            for manager, validity in self.cached_graphs
            if not validity.has_replaced_model_parts()
        ]
        for index, (manager, validity) in enumerate(self.cached_graphs):
            reason = validity.difference_from_pass_or_empty(manager, pass_properties)
            if reason == _SIZE_OR_BUFFER:
                note_export_for_other_sizes_or_buffers(manager._graph_transition_manager)
            if not reason:
                self.cached_graphs.insert(0, self.cached_graphs.pop(index))
                return manager, ""
        return None, reason

    def _export_new_graph_run_first_pass_and_cache_it(
        self,
        get_manager_for_mode: Callable[[bool], Manager],
        pass_properties: _PassProperties,
        export_reason: str,
    ) -> object:
        exported_group = pass_properties.needs_training_graph, pass_properties.is_training_mode
        if exported_group in self._exported_groups:
            tally.re_exports += 1
            tally.add_end_note_once(f"exported again, because {export_reason} had changed")
        if len(self._exported_groups) == _MANY_EXPORTS:
            tally.add_end_note_once(
                f"{_MANY_EXPORTS} graphs were exported of one model, the last because {export_reason} had changed; "
                f"the last {KEPT_GRAPHS} are kept, and every other call, flag or value of the model takes "
                "an export"
            )
        # Before the export, so that the old and the new graph do not need memory together.
        del self.cached_graphs[KEPT_GRAPHS - 1 :]
        # A manager and its autograd function refer to each other, so only a collection frees them.
        # Before the first export there is none.
        if self._exported_groups:
            gc.collect()
        manager = get_manager_for_mode(pass_properties.needs_training_graph)
        if manager._graph_transition_manager._exported_model_info is not None:
            manager = _copy_manager_without_graph_and_clear_observer(manager)
        _set_ort_manager_in_use(get_manager_for_mode, pass_properties.needs_training_graph, manager)
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(pass_properties.gradients_enabled),
            grad_mode.set_starting_grad_mode_temporarily(pass_properties.gradients_enabled),
        ):
            args = pass_properties.args
            kwargs = pass_properties.kwargs
            if any(
                tensor.is_inference() for tensor in tensors_inside_nested_values((args, kwargs))
            ):
                # An export needs version counters, which tensors of inference mode do not have.
                args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.clone, (args, kwargs))
            output = manager.forward(*args, **kwargs)
        if manager._execution_agent is not None:
            validity = _GraphValidity(manager, pass_properties)
            self.cached_graphs.insert(0, (manager, validity))
            self._exported_groups.append(exported_group)
            _refuse_random_draws_in_recomputation(manager)
        return output


@dataclass
class TorchModuleRecord(AttachedRecord["TorchModule"]):
    """Of a TorchModuleORT."""

    graphs: GraphManagerCache = field(default_factory=GraphManagerCache)


def _collect_pass_properties(
    manager: Manager, forward_args: Args, forward_kwargs: Kwargs
) -> _PassProperties:
    gradients_enabled = torch.is_grad_enabled()
    model = manager._original_module
    needs_training_graph = _has_training_layer_or_gradient(model, (forward_args, forward_kwargs))
    argument_form = (
        _comparable_types_and_structure_of_argument(forward_args, needs_training_graph),
        _comparable_types_and_structure_of_argument(forward_kwargs, needs_training_graph),
        _autocast_dtype_or_none(manager),
        torch.are_deterministic_algorithms_enabled(),
    )
    return _PassProperties(
        needs_training_graph,
        model.training,
        gradients_enabled,
        argument_form,
        forward_args,
        forward_kwargs,
    )


def _has_training_layer_or_gradient(model: nn.Module, forward_arguments: object) -> bool:
    """Return whether a layer is in training mode, or gradients are computed."""
    return any(layer.training for layer in model.modules()) or (
        torch.is_grad_enabled()
        and any(
            tensor.requires_grad
            for tensor in (*tensors_inside_nested_values(forward_arguments), *model.parameters())
        )
    )


def _comparable_types_and_structure_of_argument(
    argument: object, has_training_graph: bool
) -> object:
    """Return the properties of an argument that an exported graph depends on.

    The function runs in every forward pass, so it must be fast.
    """
    if isinstance(argument, torch.Tensor):
        is_empty = argument.numel() == 0
        return (
            argument.dtype,
            argument.dim(),
            argument.device,
            has_training_graph and argument.requires_grad,
            is_empty,
        )
    if isinstance(argument, Mapping):
        return type(argument), tuple(
            (name, _comparable_types_and_structure_of_argument(inner_value, has_training_graph))
            for name, inner_value in argument.items()
        )
    if isinstance(argument, (list, tuple)):
        return type(argument), tuple(
            _comparable_types_and_structure_of_argument(inner_value, has_training_graph)
            for inner_value in argument
        )
    # repr, because True == 1 == 1.0, and nan != nan.
    return type(argument), repr(argument)


def _autocast_dtype_or_none(manager: Manager) -> object:
    """Return the autocast type that an export would use for its casts; None without autocast."""
    device = manager._device.type if manager._device else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _copy_manager_without_graph_and_clear_observer(manager: Manager) -> Manager:
    """Return a manager with the settings of this one, without a graph."""
    manager = copy.copy(manager)
    # Otherwise memory optimization levels 1 and 2 would choose from the old graph's subgraphs.
    observer = manager._runtime_inspector.memory_ob
    observer.cluster_id_combination_to_saving_symbolics_map.clear()
    observer.symbolic_dim_collecting_completed = False
    return manager


def _set_ort_manager_in_use(
    get_manager_for_mode: Callable[[bool], Manager], needs_training_graph: bool, manager: Manager
) -> None:
    """Set ORT's own attribute to the manager in use."""
    setattr(
        get_manager_for_mode,
        "_training_manager" if needs_training_graph else "_inference_manager",
        manager,
    )


def _refuse_random_draws_in_recomputation(manager: Manager) -> None:
    """Raise an error if a checkpoint recomputes a graph that draws random numbers.

    A forward pass inside a backward pass is a checkpoint's. It would have to draw the numbers of
    the first pass again.
    """
    # -1: no backward pass is running on this thread.
    if torch._C._current_graph_task_id() == -1:
        return
    drawing_operators = _DRAWING_OPERATORS.intersection(
        node.op_type for node in manager._onnx_models.optimized_model.graph.node
    )
    if drawing_operators:
        raise RuntimeError(
            f"the module is recomputed by torch.utils.checkpoint, and its {sorted(drawing_operators)[0]} "
            "would draw other random numbers than in the first pass, because ONNX Runtime's "
            "generator cannot repeat them; call the module without checkpoint and set "
            "setting memory_optimization, or set its dropout to 0"
        )
