"""Repairs of what ORTModule 1.19.2 does: gradients, changed calls, buffers, gradient checkpointing.

Owns the list of repairs; each is made only where all of ORT's functions that it replaces or relies on have the known
source (known.py), and is told as not applied elsewhere. What importing ORTModule takes is compat.py's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint

from ortlaunch.ortmodule import patching
from ortlaunch.ortmodule.buffers import keep_buffers_exact
from ortlaunch.ortmodule.convolutions import convolve_in_two_dimensions
from ortlaunch.ortmodule.copies import copy_built_modules
from ortlaunch.ortmodule.cross_entropy import export_every_cross_entropy, leave_out_ignored_labels
from ortlaunch.ortmodule.exports import export_every_time
from ortlaunch.ortmodule.extensions import ORT_VERSION
from ortlaunch.ortmodule.known import EVALUATION, KNOWN, MANAGER, PROCESSED, TRAINING, TRANSITION, digest, owner
from ortlaunch.ortmodule.model_state import follow_model_state, forget_graph
from ortlaunch.ortmodule.outputs import return_the_models_types
from ortlaunch.ortmodule.python_values import fixed_buffers, fixed_sizes, tell_again, watch_python_values
from ortlaunch.ortmodule.tally import tally, traced
from ortlaunch.ortmodule.torch_kernels import call_torch_kernels


class Repair(NamedTuple):
    """A change of ORTModule's behaviour, and ORT's functions that it replaces or whose inner working it relies on."""

    apply: Callable[[], None]
    functions: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.apply.__name__


def apply_repairs(*left_out: str) -> None:
    """Make every repair, once in a process; `left_out` names those a test wants to miss."""
    for repair in REPAIRS:
        if repair.name in (*patching.applied(), *patching.not_applied()):
            continue
        why = "left out" if repair.name in left_out else _unknown(repair)
        if why:
            patching.leave_out(repair.name, why)
        else:
            repair.apply()
            patching.record(repair.name)


def _unknown(repair: Repair) -> str:
    """Why a repair does not fit what is installed; empty where it does."""
    import onnxruntime

    if onnxruntime.__version__.partition("+")[0] != ORT_VERSION:
        return f"it is written for ONNX Runtime {ORT_VERSION}, and {onnxruntime.__version__} is installed"
    strange = [name for name in repair.functions if digest(name) != KNOWN[name]]
    return f"the source of {', '.join(strange)} is not that of {ORT_VERSION}" if strange else ""


# -------------------------------------------------------------------------------------------------- gradients


def skip_frozen_gradients() -> None:
    """ORT computes a gradient for every frozen parameter in every step, and throws it away.

    A parameter that is unfrozen later has no gradient in a graph built while it was frozen: build another.
    """
    patching.wrap_method(owner(TRANSITION), "_export_model", _without_frozen)
    patching.wrap_method(owner(TRAINING), "forward", _rebuilding_when_unfrozen)


def _without_frozen(export_model: Callable[..., Any], **kwargs: Any) -> Any:
    model, schema, names, differentiable = export_model(**kwargs)
    frozen = {name for name, parameter in kwargs["flattened_module"].named_parameters() if not parameter.requires_grad}
    return model, schema, names, [name for name in differentiable if name not in frozen]


def _rebuilding_when_unfrozen(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    frozen = getattr(manager, "_ortlaunch_frozen", None)
    if frozen is None or any(parameter.requires_grad for parameter in frozen):
        forget_graph(manager)
        parameters = manager._flattened_module.parameters()
        manager._ortlaunch_frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    return original(manager, *args, **kwargs)


def skip_unreached_weights() -> None:
    """ORT ended where a weight is used and has no gradient: under no_grad, before an argmax, behind detach."""
    patching.wrap_method(owner(TRANSITION), "_export_model", _without_unreached)


def _without_unreached(export_model: Callable[..., Any], **kwargs: Any) -> Any:
    model, schema, names, differentiable = export_model(**kwargs)
    reached = _reached(model.graph)
    used = {name for node in model.graph.node for name in node.input}
    return model, schema, names, [name for name in differentiable if name in reached or name not in used]


def _reached(graph: Any) -> set[str]:
    """Names of a graph through which a gradient of its outputs may come."""
    makers = {name: node for node in graph.node for name in node.output}
    reached: set[str] = set()
    pending = [output.name for output in graph.output]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            if name in makers and not _ends_gradients(makers[name]):
                pending += makers[name].input
    return reached


_NUMBERS = {"ArgMax", "ArgMin", "NonZero", "Shape", "Size", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
_OPERATORS = {b"argmax", b"bitwise_or", b"clone"}


def _ends_gradients(node: Any) -> bool:
    """Whether a node makes whole numbers or truths, or is what `detach` is exported to (ATen's clone: symbolics.py)."""
    return node.op_type in _NUMBERS or any(a.name == "operator" and a.s in _OPERATORS for a in node.attribute)


# ---------------------------------------------------------------------------------------------- changed calls


def export_for_changed_calls() -> None:
    """ORT takes every call for one like the first: a new argument is ignored, a changed number stays as it was.

    Shapes may change freely; everything else about a call that an export depends on makes another graph.
    """
    for manager in (TRAINING, EVALUATION):
        patching.wrap_method(owner(manager), "forward", _exporting_when_changed)


def _exporting_when_changed(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    call, before = _call(manager, args, kwargs), getattr(manager, "_ortlaunch_call", None)
    if call != before:
        if before and call[:-2] == before[:-2]:
            tell_again(manager._graph_transition_manager)
        forget_graph(manager)
    output = original(manager, *args, **kwargs)
    manager._ortlaunch_call = _call(manager, args, kwargs)  # now that a trace has shown whether sizes are part of it
    return output


def _call(manager: Any, args: Any, kwargs: Any) -> tuple[object, ...]:
    return _form(args), _form(kwargs), _autocast(manager), fixed_buffers(manager), fixed_sizes(manager, (args, kwargs))


def _form(value: Any) -> object:
    """What of an argument an exported graph depends on; cheap, because every forward asks."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.device, value.requires_grad
    if isinstance(value, Mapping):
        return type(value), tuple((name, _form(inner)) for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_form(inner) for inner in value)
    return type(value), repr(value)  # repr, because True == 1 == 1.0 and nan is not nan


def _autocast(manager: Any) -> object:
    """The casts that an export would put into the graph."""
    device = manager._device.type if manager._device else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


_GRAPH = ("_execution_agent", "_graph_info", "_gradient_map")


def keep_graphs_for_backward() -> None:
    """ORT runs every backward pass in the newest graph, also that of a forward pass in an earlier one."""
    patching.wrap_method(owner(TRAINING), "_create_autofunction_class", _with_own_graph)


def _with_own_graph(original: Callable[..., Any], manager: Any) -> Any:
    function = original(manager)

    class _ORTModuleFunction(function):  # type: ignore[misc,valid-type]
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            outputs = function.forward(ctx, *inputs)
            ctx.ortlaunch_graph = tuple(getattr(manager, name) for name in _GRAPH)
            return outputs

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with _graph(manager, ctx.ortlaunch_graph):
                return function.backward(ctx, *gradients)

    return _ORTModuleFunction


@contextlib.contextmanager
def _graph(manager: Any, graph: tuple[Any, ...]) -> Iterator[None]:
    newest = tuple(getattr(manager, name) for name in _GRAPH)
    vars(manager).update(zip(_GRAPH, graph))
    try:
        yield
    finally:
        vars(manager).update(zip(_GRAPH, newest))


# ------------------------------------------------------------------------------------------ gradient checkpointing


def map_gradient_checkpointing() -> None:
    """Gradient checkpointing ended the export (reentrant) or was lost in it: ORT's recomputation takes its place."""
    ortmodule: Any = owner("__init__:")
    ortmodule._defined_from_envvar = functools.partial(_level, ortmodule._defined_from_envvar)
    patching.wrap_method(owner(TRANSITION), "_get_exported_model", _seeing_checkpoints)
    patching.wrap_method(owner(TRANSITION), "_export_model", _recomputing)


_checkpoints: list[None] = []


def _level(original: Callable[..., Any], name: str, *default: Any) -> Any:
    """ORT's stand-in for torch.utils.checkpoint asks for the level last, and only in an export; 1: call it plainly."""
    if name != "ORTMODULE_MEMORY_OPT_LEVEL":
        return original(name, *default)
    _checkpoints.append(None)
    return 1


def _seeing_checkpoints(original: Callable[..., Any], **kwargs: Any) -> Any:
    _checkpoints.clear()
    with _plain_checkpoints():
        exported = original(**kwargs)
    traced(kwargs["stage3_param_handle"])["checkpointed"] = bool(_checkpoints)
    return exported


@contextlib.contextmanager
def _plain_checkpoints() -> Iterator[None]:
    """Call what is checkpointed plainly, also where `checkpoint` was imported before ORT replaced it."""

    def unrecorded(*args: Any, **kwargs: Any) -> Iterator[None]:
        _checkpoints.append(None)
        yield  # torch calls the function between this and the end

    class Unrecorded:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            _checkpoints.append(None)
            return function(*args)

    parts: Any = torch.utils.checkpoint
    before = parts.CheckpointFunction, parts._checkpoint_without_reentrant_generator
    parts.CheckpointFunction, parts._checkpoint_without_reentrant_generator = Unrecorded, unrecorded
    try:
        yield
    finally:
        parts.CheckpointFunction, parts._checkpoint_without_reentrant_generator = before


def _recomputing(original: Callable[..., Any], **kwargs: Any) -> Any:
    exported = original(**kwargs)
    transition = kwargs["stage3_param_handle"]
    options, training = transition._runtime_options, transition._export_mode == torch.onnx.TrainingMode.TRAINING
    if training and traced(transition).get("checkpointed") and not options.memory_optimizer_is_enabled():
        options.memory_optimization_level, options.recompute_probe_config = 1, "1:1"
        tally.note("the model's gradient checkpointing became ONNX Runtime's recomputation: memory_optimization: 1")
    return exported


# ------------------------------------------------------------------------------------------------------- settings


def manage_gradients_on_device() -> None:
    """memory_efficient_grad_management ended in `zeros() ... device=dict`: it was given parameters for a device."""
    patching.wrap_method(owner(_MANAGEMENT), _ENABLE, _on_device)


_MANAGEMENT, _ENABLE = "_mem_efficient_grad_mgmt:", "post_processing_enable_mem_efficient_training"


def _on_device(enable: Callable[..., Any], model: Any, named_parameters: Any, parameters: Any) -> Any:
    return enable(model, named_parameters, next(iter(parameters.values())).device)


# ------------------------------------------------------------------------------------------------ the table


_EXPORT = (f"{TRANSITION}._export_model", f"{TRANSITION}._get_exported_model")
# The later ones stand around the earlier ones.
REPAIRS = (
    Repair(skip_frozen_gradients, (f"{TRANSITION}._export_model", f"{TRAINING}.forward")),
    Repair(skip_unreached_weights, (f"{TRANSITION}._export_model",)),
    Repair(
        export_for_changed_calls,
        (f"{TRAINING}.forward", f"{EVALUATION}.forward", f"{TRANSITION}.get_post_processed_model"),
    ),
    Repair(keep_graphs_for_backward, (f"{TRAINING}._create_autofunction_class", f"{TRAINING}.forward")),
    Repair(
        keep_buffers_exact,
        (
            *_EXPORT,
            f"{PROCESSED}.restore_outputs",
            f"{TRAINING}.forward",
            "_io:parse_outputs_for_onnx_export_and_extract_schema",
        ),
    ),
    Repair(return_the_models_types, (f"{PROCESSED}.restore_outputs",)),
    Repair(copy_built_modules, (f"{MANAGER}.__getstate__",)),
    Repair(
        follow_model_state,
        (*_EXPORT, f"{TRAINING}.forward", f"{EVALUATION}.forward", f"{TRANSITION}.get_post_processed_model"),
    ),
    Repair(
        map_gradient_checkpointing,
        (
            *_EXPORT,
            f"{TRAINING}._create_execution_agent",
            "__init__:_override_gradient_checkpoint",
            "options:_RuntimeOptions.memory_optimizer_is_enabled",
        ),
    ),
    Repair(manage_gradients_on_device, (f"{_MANAGEMENT}{_ENABLE}", f"{TRANSITION}.get_post_processed_model")),
    Repair(
        leave_out_ignored_labels,
        (*_EXPORT, f"{TRANSITION}._add_check_label_sparsity_hook", f"{TRANSITION}.get_post_processed_model"),
    ),
    Repair(export_every_cross_entropy, (f"{TRANSITION}._get_exported_model",)),
    Repair(watch_python_values, _EXPORT),
    Repair(convolve_in_two_dimensions, _EXPORT),
    Repair(call_torch_kernels, (f"{TRAINING}._build_graph", f"{TRAINING}._create_execution_agent")),
    Repair(export_every_time, _EXPORT),  # last: it stands around the others, and counts their time
)
