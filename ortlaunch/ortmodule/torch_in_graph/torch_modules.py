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
from unittest import mock

import numpy
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_flatten, tree_unflatten

from ortlaunch.errors import EngineError
from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.export import Export, own_path
from ortlaunch.ortmodule.base.settings import SettingError, settings_of
from ortlaunch.ortmodule.base.torch_calls import as_function, untraced
from ortlaunch.ortmodule.build import extensions
from ortlaunch.ortmodule.tracing import grad_mode, python_state

if TYPE_CHECKING:
    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Args, Kwargs, RuntimeOptions

# Layers of torch.nn that cannot be traced: sizes or checks that depend on values, or in-place
# changes of a buffer at which the exporter fails.
_NO_TRACE = (
    nn.AdaptiveLogSoftmaxWithLoss,
    nn.MaxUnpool1d,
    nn.MaxUnpool2d,
    nn.MaxUnpool3d,
    parametrizations._SpectralNorm,
)
_MARK = "_ortlaunch_torch"


def paths(export: Export) -> list[str]:
    """Return the paths of the layers that run as torch, without layers inside them.

    The layers are those requested or detected; the paths are those of the flattened module.
    """
    found: set[str] = set(chosen(export.options))
    if _by_rule(export.options):
        found.update(
            path for path, layer in export.module.named_modules() if type(layer) in _NO_TRACE
        )
    layers = [path for path, _ in export.module.named_modules() if path]
    for pattern in settings_of(export.options).torch_modules:
        named = [path for path in layers if _is_named(path, pattern)]
        if not named:
            some = ", ".join(own_path(path) for path in layers[1:7])
            raise SettingError(
                "torch_modules", f"{pattern} names no layer of the model; it has {some}, ..."
            )
        found.update(named)
    return sorted(
        path for path in found if not any(path.startswith(f"{outer}.") for outer in found)
    )


def chosen(options: RuntimeOptions) -> set[str]:
    """Return the layers for which earlier exports of this module detected that they need torch."""
    known: set[str] = vars(options).setdefault("_ortlaunch_layers", set())
    return known


class OnceMore(Exception):
    """Raised when an export has detected a layer that must run as torch; the export is repeated."""


def instead(export: Export, path: str, why: str) -> Exception:
    """Return the exception to raise for a layer that is wrong in ORT's graph.

    Args:
        export: the current export.
        path: the layer's path in the flattened module.
        why: the reason, for the note or the error.

    Returns:
        OnceMore if the layer can run as torch in a further export, else an EngineError with the
            reason.
    """
    if not _by_rule(export.options) or "." not in path:
        return EngineError(why)
    chosen(export.options).add(path)
    tally.note(f"{path.partition('.')[2]} runs as torch inside ONNX Runtime's graph: {why}")
    return OnceMore(path)


def _by_rule(options: RuntimeOptions) -> bool:
    return settings_of(options).torch_operators == "auto" and not extensions.interop_refusal()


def _is_named(path: str, pattern: str) -> bool:
    plain = own_path(path)
    return fnmatch.fnmatchcase(plain, pattern) or fnmatch.fnmatchcase(plain, f"*.{pattern}")


def inside(name: str, outer: Sequence[str]) -> bool:
    """Return whether a layer or buffer is one of the layers `outer`, or inside one."""
    return any(name == path or name.startswith(f"{path}.") for path in outer)


@contextlib.contextmanager
def called(export: Export) -> Iterator[None]:
    """Turn each such layer into one call in exports."""
    marked = [(path, export.module.get_submodule(path)) for path in paths(export)]
    plain = nn.Module.__call__
    # For layers with buffers: an output of the layer's previous call.
    before: dict[str, torch.Tensor] = {}

    def call(layer: nn.Module, *args: object, **kwargs: object) -> object:
        path = vars(layer).get(_MARK)
        if path is None or _running:
            return plain(layer, *args, **kwargs)
        # An export itself runs with gradients off.
        derives = grad_mode.at_start(export.training)
        if torch.jit.is_tracing():
            result, tensor = _as_node(path, layer, plain, (args, kwargs), before.get(path), derives)
            if next(layer.buffers(), None) is not None:
                before[path] = tensor
            return result
        with _unseen(), torch.set_grad_enabled(derives or torch.is_grad_enabled()):
            return plain(layer, *args, **kwargs)

    for path, layer in marked:
        # An attribute, because copies of the layer keep it.
        vars(layer)[_MARK] = own_path(path)
    try:
        with mock.patch.object(nn.Module, "__call__", call) if marked else contextlib.nullcontext():
            yield
    finally:
        for _, layer in marked:
            vars(layer).pop(_MARK, None)


_running: list[None] = []


def is_running() -> bool:
    """Return whether one of these layers is running as torch, hidden from the export."""
    return bool(_running)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Hide the layer's code from the trace and from the code that watches it.

    The states of Python's and NumPy's random generators are restored afterwards.
    """
    python = random.getstate()
    array = numpy.random.get_state()
    _running.append(None)
    try:
        with untraced(), python_state.unnoted():
            yield
    finally:
        _running.pop()
        random.setstate(python)
        numpy.random.set_state(array)


def _as_node(
    path: str,
    layer: nn.Module,
    plain: AnyFunction,
    arguments: tuple[Args, Kwargs],
    before: torch.Tensor | None,
    derives: bool,
) -> tuple[object, torch.Tensor]:
    """Call a layer as a custom autograd function, which a trace records as one node.

    Args:
        path: the layer's path.
        layer: the layer.
        plain: the original nn.Module.__call__.
        arguments: the positional and keyword arguments of the call.
        before: an output of the layer's previous call. Without this dependency ORT might run the
            later call first, which changes the layer's buffers.
        derives: whether gradients are on where the layer runs, as it may compute with some itself.

    Returns:
        The layer's result, and a tensor of it.
    """
    given, form = tree_flatten(arguments)
    places = [i for i, value in enumerate(given) if isinstance(value, torch.Tensor)]
    rest = [None if i in places else value for i, value in enumerate(given)]
    weights = [weight for weight in layer.parameters() if weight.requires_grad]
    held = weakref.ref(layer)
    result = _Result(path)
    # ORT calls the layer outside the user's autocast context, so that of the export is restored.
    casts = _autocast()

    def outside(leaf: torch.Tensor) -> None:
        raise RuntimeError(
            f"a loss was computed with a tensor that {path}, which runs as torch, keeps outside "
            "its result: its gradient would not reach the layers before. Return the tensor from "
            "the layer's and the model's forward"
        )

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = list(rest)
        for place, tensor in zip(places, tensors):
            # A clone, because the layer may change its inputs in place.
            values[place] = tensor.clone() if tensor.requires_grad else tensor
            if tensor.requires_grad:
                # The graph's own backward pass does not call this hook.
                tensor.register_post_accumulate_grad_hook(outside)
        inner_args, inner_kwargs = tree_unflatten(values, form)
        module = held()
        assert module is not None, f"{path} is gone"
        # _version counts the in-place changes of a tensor.
        before = [value._version for value in values if isinstance(value, torch.Tensor)]
        with torch.autocast(*casts), torch.set_grad_enabled(derives or torch.is_grad_enabled()):
            outputs = result.flatten(plain(module, *inner_args, **inner_kwargs))
        if before != [value._version for value in values if isinstance(value, torch.Tensor)]:
            raise RuntimeError(
                f"{path} changes a tensor that it is given, which ONNX Runtime's graph would not "
                "see"
            )
        return outputs

    tensors = [*(given[place] for place in places), *([] if before is None else [before.detach()])]
    kept = frozenset(range(len(tensors), len(tensors) + len(weights)))
    function = as_function(
        f"module {path}".replace(" ", "."), run, kept, own=weights, around=_quiet
    )
    outputs = function.apply(*tensors, *weights)
    return result.restored(outputs), outputs[0] if isinstance(outputs, tuple) else outputs


def _autocast() -> tuple[str, torch.dtype, bool]:
    device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the layer's code in an export; do nothing when ORT's graph runs."""
    with _unseen() if torch.jit.is_tracing() else contextlib.nullcontext():
        yield


class _Result:
    """The structure of a layer's result.

    The tensors go through the graph. All other values must stay as in the export.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._form: Any = None
        self._rest: list[object] = []
        self._kinds: list[Any] = []

    def flatten(self, result: object) -> list[torch.Tensor]:
        values, form = tree_flatten(result)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        rest = [None if isinstance(value, torch.Tensor) else value for value in values]
        kinds = [(tensor.dtype, tensor.dim()) for tensor in tensors]
        if self._form is None:
            self._form = form
            self._rest = rest
            self._kinds = kinds
            self._places = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        if form != self._form or kinds != self._kinds or repr(rest) != repr(self._rest):
            raise RuntimeError(
                f"{self._path} runs as torch, and returns tensors of other types or dimensions, or "
                f"other values beside tensors, than when the graph was made{self._mend()}"
            )
        if not tensors:
            raise RuntimeError(
                f"{self._path} returns no tensor, so that it cannot run as torch in ONNX "
                "Runtime's graph"
            )
        return tensors

    def _mend(self) -> str:
        outer = self._path.rpartition(".")[0]
        return f": name the layer around it, Settings.torch_modules=['{outer}']" if outer else ""

    def restored(self, outputs: object) -> object:
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        values = list(self._rest)
        for place, tensor in zip(self._places, tensors):
            values[place] = tensor
        return tree_unflatten(values, self._form)
