"""Choose the graph of each pass by grad mode, the model's modes and the call; keep the last few.

ORT has two managers with one graph each, chosen by the wrapper's mode. Here every graph has its own
manager, with a `_Key` of everything that the graph depends on. A pass runs in the first of the last
`KEPT` graphs whose key matches, or in a new one. Gradients are computed wherever PyTorch would
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
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.export import traced_facts
from ortlaunch.ortmodule.base.ort_types import AnyFunction
from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.settings import settings_of
from ortlaunch.ortmodule.base.source_guard import TRAINING, owner
from ortlaunch.ortmodule.graph_repairs import broadcasts
from ortlaunch.ortmodule.state.model_state import TracedState
from ortlaunch.ortmodule.state.python_values import fixed_buffers, fixed_sizes, report_again
from ortlaunch.ortmodule.tracing import escapes, grad_mode
from ortlaunch.ortmodule.tracing.grad_mode import tensors

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import Args, Kwargs, Manager, OrtModule, TorchModule

KEPT = 4
"""The number of graphs of one ORTModule. With one more, the least recently used is freed."""
# Exports of one model after which the run notes that the graphs keep changing.
_OFTEN = 2 * KEPT
# ONNX operators that draw random numbers with ORT's generator.
_DRAWING = {"Dropout", "BitmaskDropout", "BiasDropout", "BitmaskBiasDropout", "Bernoulli", "Multinomial",
            "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}  # fmt: skip
TWICE = (
    "Trying to backward through the graph a second time. ONNX Runtime frees its intermediate "
    "values in the first backward pass, also with retain_graph=True. Call the module again for the "
    "second pass, or add the losses and call backward once"
)


def choose_graphs() -> None:
    """Replace ORT's choice of a graph.

    ORT used the wrapper's mode as the model's, and evaluation mode as no_grad. It also assumed that
    every call is like the first one.
    """
    wrap_method(owner("_utils:"), "patch_torch_module_ort_forward_method", _choosing)
    wrap_method(owner("_torch_module_ort:TorchModuleORT"), "is_training", _is_training)
    wrap_method(owner(TRAINING), "_create_autofunction_class", _once)
    _follow_flag(owner("ortmodule:ORTModule"))


def _follow_flag(wrapper: Any) -> None:
    """Make an ORTModule's `training` and its model's the same flag."""

    def read(wrapped: OrtModule) -> bool:
        inside = vars(wrapped).get("_torch_module")
        return bool(inside._original_module.training if inside else vars(wrapped)["training"])

    def write(wrapped: OrtModule, mode: bool) -> None:
        if inside := vars(wrapped).get("_torch_module"):
            inside._original_module.training = mode
        else:
            vars(wrapped)["training"] = mode

    def setting(original: Callable[..., None], wrapped: OrtModule, name: str, value: bool) -> None:
        (write(wrapped, value) if name == "training" else original(wrapped, name, value))

    wrapper.training = property(read, write)
    wrap_method(wrapper, "__setattr__", setting)


def _choosing(original: Callable[..., None], module: TorchModule) -> None:
    """Give the module inside an ORTModule a forward method that chooses a manager for each call."""
    original(module)
    vars(module).setdefault("_ortlaunch_graphs", Graphs())

    # wraps copies the name, by which pickle finds the method.
    @functools.wraps(module.forward.__func__)
    def forward(self: TorchModule, *args: object, **kwargs: object) -> object:
        return _runner("torch._dynamo" in sys.modules)(
            module._ortlaunch_graphs, module, args, kwargs
        )

    module.forward = types.MethodType(forward, module)


@functools.cache
def _runner(compiles: bool) -> AnyFunction:
    """Return `Graphs.run`, hidden from torch.compile if that is in use."""
    return cast(AnyFunction, torch._dynamo.disable(Graphs.run)) if compiles else Graphs.run


def _is_training(original: Callable[..., bool], module: TorchModule) -> bool:
    """Return whether a pass without input gradients would use the training manager.

    ORT's own code calls this.
    """
    return _trains(module._original_module, ())


def _once(original: AnyFunction, manager: Manager) -> object:
    """Let a second backward pass raise a clear error; ORT's own was an AttributeError."""
    function = original(manager)

    class _BackwardOnce(function):  # type: ignore[misc,valid-type]
        @staticmethod
        def backward(ctx: Any, *gradients: object) -> Any:
            # ORT deletes the state in the first backward pass.
            if not hasattr(ctx.run_info, "state"):
                raise RuntimeError(TWICE)
            return function.backward(ctx, *gradients)

    return _BackwardOnce


class _Call(NamedTuple):
    """The properties of a pass that select its graph, independent of the existing graphs."""

    trains: bool
    """Whether the pass needs a training graph, see `_trains`."""
    mode: bool
    """Whether the whole model is in training mode."""
    gradients: bool
    """Whether the grad mode is on."""
    form: object
    """The types and structure of the arguments, the autocast type, and determinism; see `_call`."""
    args: Args
    kwargs: Kwargs


class _Key:
    """The conditions under which a manager's graph is valid; made after its first pass."""

    def __init__(self, manager: Manager, call: _Call) -> None:
        module = manager._flattened_module
        traced = traced_facts(manager._graph_transition_manager)
        self._trains, self._mode, self._gradients, self._form = call[:4]
        # A graph is valid for one grad mode only if the model reads the mode, or if the graph calls
        # Python code, which saves tensors for a backward pass only with gradients on.
        called = any(
            node.op_type == "PythonOp" for node in manager._onnx_models.optimized_model.graph.node
        )
        self._one_mode = called or traced.get("grad_mode", False)
        self._sizes = fixed_sizes(manager, (call.args, call.kwargs))
        self._buffers = fixed_buffers(manager)
        self._frozen = [
            parameter for parameter in module.parameters() if not parameter.requires_grad
        ]
        self._seen = (
            TracedState(module, traced) if settings_of(manager).follow_model_state else None
        )

    def stale(self) -> bool:
        """Return whether weights, buffers, layers or hooks are other objects than the graph's.

        Such a graph is never used again.
        """
        return self._seen is not None and self._seen.replaced()

    def difference(self, manager: Manager, call: _Call) -> str:
        """Return why the graph is not valid for `call`; empty if it is."""
        if (self._trains, self._form) != (call.trains, call.form):
            return "the call"
        if self._gradients != call.gradients and (self._one_mode or not self._gradients):
            return "the grad mode"
        if call.gradients and any(parameter.requires_grad for parameter in self._frozen):
            return "a frozen weight"
        if self._sizes != fixed_sizes(
            manager, (call.args, call.kwargs)
        ) or self._buffers != fixed_buffers(manager):
            report_again(manager._graph_transition_manager)
            return "a size or buffer"
        if broadcasts.apart(manager, call.args, call.kwargs):
            return "a size that is now 1"
        if self._seen is None:
            return "" if self._mode == call.mode else "the model's mode"
        return self._seen.changed()


class Graphs:
    """The managers of one ORTModule that have a graph, the most recently used first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kept: list[Manager] = []
        self._groups: list[tuple[bool, bool]] = []

    def __reduce__(self) -> tuple[type[Graphs], tuple[()]]:
        # A copy of an ORTModule exports its own graphs.
        return Graphs, ()

    def run(self, module: TorchModule, args: Args, kwargs: Kwargs) -> object:
        """Run the forward pass of a TorchModuleORT."""
        managers = module._execution_manager
        # ORT has fallen back to PyTorch, so its own manager runs the pass.
        if managers(True)._fallback_manager.is_pending():
            return managers(module.is_training()).forward(*args, **kwargs)
        module._flattened_module.training = module._original_module.training
        call = _call(managers(True), args, kwargs)
        # Threads share the graphs, and ORT's attribute of the manager in use.
        with self._lock:
            kept, why = self._find(managers, call)
            if kept is None:
                output = self._run_new(managers, call, why)
            else:
                _use(managers, call.trains, kept)
            manager = managers(call.trains)
        if kept is not None:
            output = kept.forward(*args, **kwargs)
        escapes.put_back(manager)
        _refuse_other_numbers(manager)
        return output

    def _find(self, managers: Callable[[bool], Manager], call: _Call) -> tuple[Manager | None, str]:
        """Return the manager whose graph is valid for this call, and move it to the front.

        If there is none, return None and the reason why the last checked graph is not valid.
        """
        why = "a weight, buffer, layer or hook of the model"
        for transition in (managers(mode)._graph_transition_manager for mode in (True, False)):
            # ORT sets this flag when an attribute of the ORTModule is set.
            if transition._original_model_has_changed:
                transition._original_model_has_changed = False
                self._kept = []
                why = "an attribute of the ORTModule"
        self._kept = [manager for manager in self._kept if not manager._ortlaunch_key.stale()]
        for place, manager in enumerate(self._kept):
            why = manager._ortlaunch_key.difference(manager, call)
            if not why:
                self._kept.insert(0, self._kept.pop(place))
                return manager, ""
        return None, why

    def _run_new(self, managers: Callable[[bool], Manager], call: _Call, why: str) -> object:
        """Export, build and run the first pass of a new graph."""
        group = call.trains, call.mode
        if group in self._groups:
            tally.re_exports += 1
            tally.note(f"exported again, because {why} had changed")
        if len(self._groups) == _OFTEN:
            tally.note(
                f"{_OFTEN} graphs were exported of one model, the last because {why} had changed; "
                f"the last {KEPT} are kept, and every other call, flag or value of the model takes "
                "an export"
            )
        # Before the export, so that the old and the new graph do not need memory together.
        del self._kept[KEPT - 1 :]
        # A manager and its autograd function refer to each other, so only a collection frees them.
        # Before the first export there is none.
        if self._groups:
            gc.collect()
        manager = managers(call.trains)
        if manager._graph_transition_manager._exported_model_info is not None:
            manager = _another(manager)
        _use(managers, call.trains, manager)
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(call.gradients),
            grad_mode.begins(call.gradients),
        ):
            args = call.args
            kwargs = call.kwargs
            if any(tensor.is_inference() for tensor in tensors((args, kwargs))):
                # An export needs version counters, which tensors of inference mode do not have.
                args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.clone, (args, kwargs))
            output = manager.forward(*args, **kwargs)
        if manager._execution_agent is not None:
            manager._ortlaunch_key = _Key(manager, call)
            self._kept.insert(0, manager)
            self._groups.append(group)
            _refuse_other_numbers(manager)
        return output


def _call(manager: Manager, args: Args, kwargs: Kwargs) -> _Call:
    gradients = torch.is_grad_enabled()
    model = manager._original_module
    trains = _trains(model, (args, kwargs))
    form = (
        _form(args, trains),
        _form(kwargs, trains),
        _autocast(manager),
        torch.are_deterministic_algorithms_enabled(),
    )
    return _Call(trains, model.training, gradients, form, args, kwargs)


def _trains(model: nn.Module, values: object) -> bool:
    """Return whether a layer is in training mode, or gradients are computed."""
    return any(layer.training for layer in model.modules()) or (
        torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in (*tensors(values), *model.parameters()))
    )


def _form(value: object, trains: bool) -> object:
    """Return the properties of an argument that an exported graph depends on.

    The function runs in every forward pass, so it must be fast.
    """
    if isinstance(value, torch.Tensor):
        empty = value.numel() == 0
        return value.dtype, value.dim(), value.device, trains and value.requires_grad, empty
    if isinstance(value, Mapping):
        return type(value), tuple((name, _form(inner, trains)) for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_form(inner, trains) for inner in value)
    # repr, because True == 1 == 1.0, and nan != nan.
    return type(value), repr(value)


def _autocast(manager: Manager) -> object:
    """Return the autocast type that an export would use for its casts; None without autocast."""
    device = manager._device.type if manager._device else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _another(manager: Manager) -> Manager:
    """Return a manager with the settings of this one, without a graph."""
    manager = copy.copy(manager)
    # Otherwise memory optimization levels 1 and 2 would choose from the old graph's subgraphs.
    observer = manager._runtime_inspector.memory_ob
    observer.cluster_id_combination_to_saving_symbolics_map.clear()
    observer.symbolic_dim_collecting_completed = False
    return manager


def _use(managers: Callable[[bool], Manager], trains: bool, manager: Manager) -> None:
    """Set ORT's own attribute to the manager in use."""
    setattr(managers, "_training_manager" if trains else "_inference_manager", manager)


def _refuse_other_numbers(manager: Manager) -> None:
    """Raise an error if a checkpoint recomputes a graph that draws random numbers.

    A forward pass inside a backward pass is a checkpoint's. It would have to draw the numbers of
    the first pass again.
    """
    # -1: no backward pass is running on this thread.
    if torch._C._current_graph_task_id() == -1:
        return
    drawing = _DRAWING.intersection(
        node.op_type for node in manager._onnx_models.optimized_model.graph.node
    )
    if drawing:
        raise RuntimeError(
            f"the module is recomputed by torch.utils.checkpoint, and its {sorted(drawing)[0]} "
            "would draw other random numbers than in the first pass, because ONNX Runtime's "
            "generator cannot repeat them; call the module without checkpoint and set "
            "Settings.memory_optimization, or set its dropout to 0"
        )
