"""Chooses the graph of each pass, by grad mode, by the model's own flags and by the call, and keeps the last few.

ORT has two managers with one graph each: of the wrapper's mode. Here every graph has a manager of its own, with the
`_Key` that holds what the graph depends on; a pass runs in the graph, of the last `KEPT`, whose key matches, or in a
new one. Gradients are computed where PyTorch would compute them, in evaluation mode too.
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
from ortlaunch.ortmodule.base.export import seen_of
from ortlaunch.ortmodule.base.ort_types import AnyFunction
from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.settings import settings_of
from ortlaunch.ortmodule.base.source_guard import TRAINING, owner
from ortlaunch.ortmodule.graph_repairs import broadcasts
from ortlaunch.ortmodule.state.model_state import TracedState
from ortlaunch.ortmodule.state.python_values import fixed_buffers, fixed_sizes, tell_again
from ortlaunch.ortmodule.tracing import escapes, grad_mode
from ortlaunch.ortmodule.tracing.grad_mode import tensors

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import Args, Kwargs, Manager, OrtModule, TorchModule

KEPT = 4
"""Graphs of one ORTModule; one more, and the least recently used is freed."""
_OFTEN = 2 * KEPT
_DRAWING = {"Dropout", "BitmaskDropout", "BiasDropout", "BitmaskBiasDropout", "Bernoulli", "Multinomial",
            "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}  # fmt: skip
TWICE = (
    "Trying to backward through the graph a second time. ONNX Runtime frees its intermediate values in the first "
    "backward pass, also with retain_graph=True. Call the module again for the second pass, or add the losses and "
    "call backward once"
)


def choose_graphs() -> None:
    """ORT took the wrapper's mode for the model's, evaluation for no_grad, and every call for one like the first."""
    wrap_method(owner("_utils:"), "patch_torch_module_ort_forward_method", _choosing)
    wrap_method(owner("_torch_module_ort:TorchModuleORT"), "is_training", _is_training)
    wrap_method(owner(TRAINING), "_create_autofunction_class", _once)
    _follow_flag(owner("ortmodule:ORTModule"))


def _follow_flag(wrapper: Any) -> None:
    """`training` of an ORTModule is its model's, whichever of both is set."""

    def read(wrapped: OrtModule) -> bool:
        inside = vars(wrapped).get("_torch_module")
        return bool(inside._original_module.training if inside else vars(wrapped)["training"])

    def write(wrapped: OrtModule, mode: bool) -> None:
        inside = vars(wrapped).get("_torch_module")
        if inside:
            inside._original_module.training = mode
        else:
            vars(wrapped)["training"] = mode

    def setting(original: Callable[..., None], wrapped: OrtModule, name: str, value: bool) -> None:
        (write(wrapped, value) if name == "training" else original(wrapped, name, value))

    wrapper.training = property(read, write)
    wrap_method(wrapper, "__setattr__", setting)


def _choosing(original: Callable[..., None], module: TorchModule) -> None:
    """Give ORT's module inside an ORTModule a forward method that chooses a manager for each call."""
    original(module)
    vars(module).setdefault("_ortlaunch_graphs", Graphs())

    @functools.wraps(module.forward.__func__)  # pickle finds it by its name
    def forward(self: TorchModule, *args: object, **kwargs: object) -> object:
        return _runner("torch._dynamo" in sys.modules)(
            module._ortlaunch_graphs, module, args, kwargs
        )

    module.forward = types.MethodType(forward, module)


@functools.cache
def _runner(compiles: bool) -> AnyFunction:
    """`Graphs.run`, which torch.compile is not to trace."""
    return cast(AnyFunction, torch._dynamo.disable(Graphs.run)) if compiles else Graphs.run


def _is_training(original: Callable[..., bool], module: TorchModule) -> bool:
    """For ORT's own callers: which manager a pass would take if no input had a gradient."""
    return _trains(module._original_module, ())


def _once(original: AnyFunction, manager: Manager) -> object:
    """ORT's second backward pass ended in an AttributeError of its own."""
    function = original(manager)

    class _BackwardOnce(function):  # type: ignore[misc,valid-type]
        @staticmethod
        def backward(ctx: Any, *gradients: object) -> Any:
            if not hasattr(ctx.run_info, "state"):
                raise RuntimeError(TWICE)
            return function.backward(ctx, *gradients)

    return _BackwardOnce


class _Call(NamedTuple):
    """What of a pass decides on its graph, whatever the graphs are."""

    trains: bool
    """Whether it takes a training graph: a layer is in training mode, or gradients are computed."""
    mode: bool
    """The mode of the whole model."""
    gradients: bool
    """Whether gradients are on."""
    form: object
    args: Args
    kwargs: Kwargs


class _Key:
    """What the graph of a manager was made for; made after its first pass."""

    def __init__(self, manager: Manager, call: _Call) -> None:
        module = manager._flattened_module
        traced = seen_of(manager._graph_transition_manager)
        self._trains, self._mode, self._gradients, self._form = call[:4]
        # A graph whose code reads the grad mode, or that calls Python, which then saves tensors for a backward pass.
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
        """Whether weights, buffers, layers or hooks are other objects than the graph's: it will not be used again."""
        return self._seen is not None and self._seen.replaced()

    def difference(self, manager: Manager, call: _Call) -> str:
        """Why the graph is not one for `call`; empty where it is."""
        if (self._trains, self._form) != (call.trains, call.form):
            return "the call"
        if self._gradients != call.gradients and (self._one_mode or not self._gradients):
            return "the grad mode"
        if call.gradients and any(parameter.requires_grad for parameter in self._frozen):
            return "a frozen weight"
        if self._sizes != fixed_sizes(
            manager, (call.args, call.kwargs)
        ) or self._buffers != fixed_buffers(manager):
            tell_again(manager._graph_transition_manager)
            return "a size or buffer"
        if broadcasts.apart(manager, call.args, call.kwargs):
            return "a size that is now 1"
        if self._seen is None:
            return "" if self._mode == call.mode else "the model's mode"
        return self._seen.changed()


class Graphs:
    """The managers of one ORTModule that have a graph, the last used first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kept: list[Manager] = []
        self._groups: list[tuple[bool, bool]] = []

    def __reduce__(self) -> tuple[type[Graphs], tuple[()]]:
        return Graphs, ()  # a copy of an ORTModule exports its own

    def run(self, module: TorchModule, args: Args, kwargs: Kwargs) -> object:
        """The forward pass of a TorchModuleORT."""
        managers = module._execution_manager
        model = module._original_module
        if managers(True)._fallback_manager.is_pending():
            return managers(module.is_training()).forward(*args, **kwargs)
        module._flattened_module.training = model.training
        call = _call(managers(True), args, kwargs)
        with self._lock:  # threads share the graphs
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
        """The manager whose graph is one for this call, first now; else None, and why the last used is none."""
        why = "a weight, buffer, layer or hook of the model"
        for transition in (managers(mode)._graph_transition_manager for mode in (True, False)):
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
        """Export, build and run the first pass of another graph."""
        group = call.trains, call.mode
        if group in self._groups:
            tally.re_exports += 1
            tally.note(f"exported again, because {why} had changed")
        if len(self._groups) == _OFTEN:
            tally.note(
                f"{_OFTEN} graphs were exported of one model, the last because {why} had changed; the last {KEPT} "
                "are kept, and every other call, flag or value of the model takes an export"
            )
        del self._kept[KEPT - 1 :]
        gc.collect()  # a manager and its autograd function refer to each other
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
                # An export needs version counters, which a tensor of inference mode has not.
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
    """Whether a layer is in training mode, or gradients are computed."""
    return any(layer.training for layer in model.modules()) or (
        torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in (*tensors(values), *model.parameters()))
    )


def _form(value: object, trains: bool) -> object:
    """What of an argument an exported graph depends on; cheap, because every forward pass needs it."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.device, trains and value.requires_grad
    if isinstance(value, Mapping):
        return type(value), tuple((name, _form(inner, trains)) for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_form(inner, trains) for inner in value)
    return type(value), repr(value)  # repr, because True == 1 == 1.0 and nan is not nan


def _autocast(manager: Manager) -> object:
    """The casts that an export would put into the graph."""
    device = manager._device.type if manager._device else "cpu"
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _another(manager: Manager) -> Manager:
    """A manager with the settings of this one, without a graph."""
    manager = copy.copy(manager)
    # Levels 1 and 2 of memory optimization would choose from those of the old graph.
    observer = manager._runtime_inspector.memory_ob
    observer.cluster_id_combination_to_saving_symbolics_map.clear()
    observer.symbolic_dim_collecting_completed = False
    return manager


def _use(managers: Callable[[bool], Manager], trains: bool, manager: Manager) -> None:
    """Let ORT's own attribute be the manager in use."""
    setattr(managers, "_training_manager" if trains else "_inference_manager", manager)


def _refuse_other_numbers(manager: Manager) -> None:
    """A forward pass inside a backward pass is a checkpoint's: it has to draw the first pass's random numbers."""
    if torch._C._current_graph_task_id() == -1:
        return
    drawing = _DRAWING.intersection(
        node.op_type for node in manager._onnx_models.optimized_model.graph.node
    )
    if drawing:
        raise RuntimeError(
            f"the module is recomputed by torch.utils.checkpoint, and its {sorted(drawing)[0]} would draw other random "
            "numbers than in the first pass, because ONNX Runtime's generator cannot repeat them; call the module "
            "without checkpoint and set memory_optimization, or set its dropout to 0"
        )
