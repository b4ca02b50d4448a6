"""Layers that run whole as torch inside ORT's graph.

Examples are layers with data-dependent control flow, with buffers of their own, or with packed
sequences. In an export such a layer is one call (a PythonOp). The trace, and the code that watches
the trace, see nothing of the layer's own code. In training the layer itself runs, with its buffers,
random numbers and modes.
"""

from __future__ import annotations

import contextlib
import fnmatch
import random
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ortmodule._internal.base.attached import OptionsRecord
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.export import ExportContext, path_in_model
from ortmodule._internal.base.patching import replace_attribute_temporarily
from ortmodule._internal.base.settings import SettingError
from ortmodule._internal.base.torch_calls import (
    create_counted_torch_function_class_for_ort,
    pause_tracing_and_torch_function,
)
from ortmodule._internal.errors import ORTModuleError
from ortmodule._internal.native import extensions
from ortmodule._internal.tracing import grad_mode, python_state

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction, Args, Kwargs
    from ortmodule._internal.base.settings import Settings

# Layers of torch.nn that cannot be traced: sizes or checks that depend on values, or in-place
# changes of a buffer at which the exporter fails.
_UNTRACEABLE_LAYERS = (
    nn.AdaptiveLogSoftmaxWithLoss,
    nn.MaxUnpool1d,
    nn.MaxUnpool2d,
    nn.MaxUnpool3d,
    parametrizations._SpectralNorm,
)
_PATH_ATTRIBUTE = "_ortmodule_torch"


def paths_of_outermost_torch_layers_or_refuse(export_context: ExportContext) -> list[str]:
    """Return the paths of the layers that run as torch, without layers inside them.

    The layers are those requested or detected; the paths are those of the flattened module.
    """
    layer_paths = set(OptionsRecord.attached_to(export_context.options).torch_layer_paths)
    if _detects_torch_layers_automatically(export_context.settings):
        layer_paths.update(
            path
            for path, layer in export_context.module.named_modules()
            if type(layer) in _UNTRACEABLE_LAYERS
        )
    layers = [path for path, _ in export_context.module.named_modules() if path]
    for pattern in export_context.settings.torch_modules:
        matching_paths = [path for path in layers if _layer_matches_pattern(path, pattern)]
        if not matching_paths:
            example_paths = ", ".join(path_in_model(path) for path in layers[1:7])
            raise SettingError(
                "torch_modules",
                f"{pattern} names no layer of the model; it has {example_paths}, ...",
            )
        layer_paths.update(matching_paths)
    return sorted(
        path
        for path in layer_paths
        if not any(path.startswith(f"{outer}.") for outer in layer_paths)
    )


class RepeatExportWithTorchLayer(Exception):
    """Raised when an export has detected a layer that must run as torch; the export is repeated."""


def mark_layer_for_torch_if_auto_and_create_exception(
    export_context: ExportContext, layer_path: str, fault_text: str
) -> Exception:
    """Return the exception to raise for a layer that is wrong in ORT's graph.

    Args:
        export_context: the current export.
        layer_path: the layer's path in the flattened module.
        fault_text: the reason, for the note or the error.

    Returns:
        RepeatExportWithTorchLayer if the layer can run as torch in a further export, else an ORTModuleError with the
            reason.
    """
    if not _detects_torch_layers_automatically(export_context.settings) or "." not in layer_path:
        return ORTModuleError(fault_text)
    OptionsRecord.attached_to(export_context.options).torch_layer_paths.add(layer_path)
    tally.add_end_note_once(
        f"{layer_path.partition('.')[2]} runs as torch inside ONNX Runtime's graph: {fault_text}"
    )
    return RepeatExportWithTorchLayer(layer_path)


def _detects_torch_layers_automatically(settings: Settings) -> bool:
    return (
        settings.torch_operators == "auto"
        and not extensions.reason_interop_is_unbuildable_or_empty()
    )


def _layer_matches_pattern(layer_path: str, path_pattern: str) -> bool:
    plain = path_in_model(layer_path)
    return fnmatch.fnmatchcase(plain, path_pattern) or fnmatch.fnmatchcase(
        plain, f"*.{path_pattern}"
    )


def is_inside_layers(layer_or_buffer_path: str, layer_paths: Sequence[str]) -> bool:
    """Return whether a layer or buffer is one of the layers `layer_paths`, or inside one."""
    return any(
        layer_or_buffer_path == path or layer_or_buffer_path.startswith(f"{path}.")
        for path in layer_paths
    )


@contextlib.contextmanager
def record_torch_layers_as_single_calls(export_context: ExportContext) -> Iterator[None]:
    """Turn each such layer into one call in exports."""
    marked_layers = [
        (path, export_context.module.get_submodule(path))
        for path in paths_of_outermost_torch_layers_or_refuse(export_context)
    ]
    original_call = nn.Module.__call__
    # For layers with buffers: an output of the layer's previous call.
    previous_outputs: dict[str, torch.Tensor] = {}

    def call_or_record(layer: nn.Module, *args: object, **kwargs: object) -> object:
        path = vars(layer).get(_PATH_ATTRIBUTE)
        if path is None or _running:
            return original_call(layer, *args, **kwargs)
        # An export itself runs with gradients off.
        gradients_enabled = grad_mode.starting_grad_mode_or_default(export_context.training)
        if torch.jit.is_tracing():
            result, tensor = _call_layer_as_one_node_and_get_result_and_tensor(
                path,
                layer,
                original_call,
                (args, kwargs),
                previous_outputs.get(path),
                gradients_enabled,
            )
            if next(layer.buffers(), None) is not None:
                previous_outputs[path] = tensor
            return result
        without_gradients = not torch.is_grad_enabled()
        with (
            _hide_from_trace_and_restore_random_states(),
            torch.set_grad_enabled(gradients_enabled or torch.is_grad_enabled()),
        ):
            if gradients_enabled and without_gradients:
                # What the layers before have made requires no gradient here.
                args, kwargs = tree_map_only(
                    torch.Tensor, lambda tensor: _trained_leaf(tensor).clone(), (args, kwargs)
                )
            return original_call(layer, *args, **kwargs)

    for path, layer in marked_layers:
        # An attribute, because copies of the layer keep it.
        vars(layer)[_PATH_ATTRIBUTE] = path_in_model(path)
    try:
        with (
            replace_attribute_temporarily(nn.Module, "__call__", call_or_record)
            if marked_layers
            else contextlib.nullcontext()
        ):
            yield
    finally:
        for _, layer in marked_layers:
            vars(layer).pop(_PATH_ATTRIBUTE, None)


def _trained_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as one that requires a gradient, if its type can have one."""
    is_differentiable = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_() if is_differentiable else tensor


_running: list[None] = []


def is_torch_layer_running() -> bool:
    """Return whether one of these layers is running as torch, hidden from the export."""
    return bool(_running)


@contextlib.contextmanager
def _hide_from_trace_and_restore_random_states() -> Iterator[None]:
    """Hide the layer's code from the trace and from the code that watches it.

    The states of Python's and NumPy's random generators are restored afterwards.
    """
    python_random_state = random.getstate()
    numpy_random_state = numpy.random.get_state()
    _running.append(None)
    try:
        with pause_tracing_and_torch_function(), python_state.pause_state_recording():
            yield
    finally:
        _running.pop()
        random.setstate(python_random_state)
        numpy.random.set_state(numpy_random_state)


def _call_layer_as_one_node_and_get_result_and_tensor(
    layer_path: str,
    called_layer: nn.Module,
    original_call: AnyFunction,
    args_and_kwargs: tuple[Args, Kwargs],
    previous_output: torch.Tensor | None,
    gradients_enabled: bool,
) -> tuple[object, torch.Tensor]:
    """Call a layer as a custom autograd function, which a trace records as one node.

    Args:
        layer_path: the layer's path.
        called_layer: the layer.
        original_call: the original nn.Module.__call__.
        args_and_kwargs: the positional and keyword arguments of the call.
        previous_output: an output of the layer's previous call. Without this dependency ORT might run the
            later call first, which changes the layer's buffers.
        gradients_enabled: whether gradients are on where the layer runs, as it may compute with some itself.

    Returns:
        The layer's result, and a tensor of it.
    """
    flat_arguments, argument_structure = tree_flatten(args_and_kwargs)
    tensor_positions = [
        i for i, value in enumerate(flat_arguments) if isinstance(value, torch.Tensor)
    ]
    other_values = [
        None if i in tensor_positions else value for i, value in enumerate(flat_arguments)
    ]
    weights = [weight for weight in called_layer.parameters() if weight.requires_grad]
    layer_reference = weakref.ref(called_layer)
    result_structure = _LayerResultStructure(layer_path)
    # ORT calls the layer outside the user's autocast context, so that of the export is restored.
    autocast_state = _autocast_device_dtype_and_flag()

    def refuse_outside_gradient(leaf: torch.Tensor) -> None:
        raise RuntimeError(
            f"a loss was computed with a tensor that {layer_path}, which runs as torch, keeps outside "
            "its result: its gradient would not reach the layers before. Return the tensor from "
            "the layer's and the model's forward"
        )

    def run_layer(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = list(other_values)
        if gradients_enabled and _running:
            # An export's own tensors require no gradient, as those of its sample pass.
            tensors = tuple(map(_trained_leaf, tensors))
        gradients = gradients_enabled or torch.is_grad_enabled()
        for position, tensor in zip(tensor_positions, tensors):
            # A clone, because the layer may change its inputs in place, and torch may save them.
            with torch.set_grad_enabled(gradients):
                values[position] = tensor.clone() if gradients else tensor
            if tensor.requires_grad:
                # The graph's own backward pass does not call this hook.
                tensor.register_post_accumulate_grad_hook(refuse_outside_gradient)
        inner_args, inner_kwargs = tree_unflatten(values, argument_structure)
        module = layer_reference()
        assert module is not None, f"{layer_path} is gone"
        # _version counts the in-place changes of a tensor.
        versions_before = [value._version for value in values if isinstance(value, torch.Tensor)]
        with torch.autocast(*autocast_state), torch.set_grad_enabled(gradients):
            outputs = result_structure.record_or_check_structure_and_list_tensors(
                original_call(module, *inner_args, **inner_kwargs)
            )
        if versions_before != [
            value._version for value in values if isinstance(value, torch.Tensor)
        ]:
            raise RuntimeError(
                f"{layer_path} changes a tensor that it is given, which ONNX Runtime's graph would not "
                "see"
            )
        return outputs

    tensors = [
        *(flat_arguments[position] for position in tensor_positions),
        *([] if previous_output is None else [previous_output.detach()]),
    ]
    title = f"module {layer_path}".replace(" ", ".")
    function = create_counted_torch_function_class_for_ort(
        title,
        run_layer,
        frozenset(),
        unlisted_weights=weights,
        open_forward_context=_hide_layer_and_its_random_draws_if_tracing,
        saves_only_copies=True,
    )
    outputs = function.apply(*tensors, *weights)
    return result_structure.rebuild_layer_result(outputs), outputs[0] if isinstance(
        outputs, tuple
    ) else outputs


def _autocast_device_dtype_and_flag() -> tuple[str, torch.dtype, bool]:
    device_type = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return (
        device_type,
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_enabled(device_type),
    )


@contextlib.contextmanager
def _hide_layer_and_its_random_draws_if_tracing() -> Iterator[None]:
    """Hide the layer's code in an export; do nothing when ORT's graph runs."""
    with (
        _hide_from_trace_and_restore_random_states()
        if torch.jit.is_tracing()
        else contextlib.nullcontext()
    ):
        yield


class _LayerResultStructure:
    """The structure of a layer's result.

    The tensors go through the graph. All other values must stay as in the export.
    """

    def __init__(self, layer_path: str) -> None:
        self._path = layer_path
        self._structure: Any = None
        self._other_values: list[object] = []
        self._tensor_types: list[Any] = []

    def record_or_check_structure_and_list_tensors(
        self, layer_result: object
    ) -> list[torch.Tensor]:
        values, structure = tree_flatten(layer_result)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        other_values = [None if isinstance(value, torch.Tensor) else value for value in values]
        tensor_types = [(tensor.dtype, tensor.dim()) for tensor in tensors]
        if self._structure is None:
            self._structure = structure
            self._other_values = other_values
            self._tensor_types = tensor_types
            self._tensor_positions = [
                i for i, value in enumerate(values) if isinstance(value, torch.Tensor)
            ]
        if (
            structure != self._structure
            or tensor_types != self._tensor_types
            or repr(other_values) != repr(self._other_values)
        ):
            raise RuntimeError(
                f"{self._path} runs as torch, and returns tensors of other types or dimensions, or "
                f"other values beside tensors, than when the graph was made{self._outer_layer_remedy_text_or_empty()}"
            )
        if not tensors:
            raise RuntimeError(
                f"{self._path} returns no tensor, so that it cannot run as torch in ONNX "
                "Runtime's graph"
            )
        return tensors

    def _outer_layer_remedy_text_or_empty(self) -> str:
        outer = self._path.rpartition(".")[0]
        return f": name the layer around it, torch_modules=['{outer}']" if outer else ""

    def rebuild_layer_result(self, output_tensors: object) -> object:
        tensors = output_tensors if isinstance(output_tensors, tuple) else (output_tensors,)
        values = list(self._other_values)
        for position, tensor in zip(self._tensor_positions, tensors):
            values[position] = tensor
        return tree_unflatten(values, self._structure)
