"""Makes `onnxruntime.training.ortmodule` 1.19.2 importable and right on the installed torch.

Owns every repair that importing ORTModule takes, each one applied only where it is needed. Nothing is edited on disk,
and torch as the user's code sees it stays as it is. Must not import the rest of the worker.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import types
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ortlaunch.errors import MissingDependency
from ortlaunch.ortmodule import custom_functions, extensions
from ortlaunch.ortmodule.patching import Seen, applied, environment, leave_out, record, wrap_ort_export

_ORTMODULE = "onnxruntime.training.ortmodule"


@functools.cache
def import_ortmodule() -> ModuleType:
    """The module `onnxruntime.training.ortmodule`, repaired; the first call imports it, later calls return it.

    On torch 2.6 and older call it before transformers is imported: ORT replaces `torch.utils.checkpoint.checkpoint`
    when it is imported, and transformers keeps the one it saw (its gradient checkpointing then ends the export).
    Raises MissingDependency, saying what to type.
    """
    _require_extensions()
    for repair in _BEFORE_IMPORT:
        _apply(repair)
    ortmodule = _import()
    for repair in _AFTER_IMPORT:
        _apply(repair)
    return ortmodule


# --------------------------------------------------------------------------------- repairs before the import


def alias_moved_exporter_modules() -> bool:
    """Torch 2.9 and later moved the private modules of the TorchScript exporter that ORT 1.19 imports."""
    moved = [name for name in _MOVED if importlib.util.find_spec(name) is None]
    for name in moved:
        module = importlib.import_module(_MOVED[name])
        parent, _, leaf = name.rpartition(".")
        sys.modules[name] = module
        setattr(importlib.import_module(parent), leaf, module)
    return bool(moved)


_MOVED = {
    "torch.onnx._internal.jit_utils": "torch.onnx._internal.torchscript_exporter.jit_utils",
    "torch.onnx._globals": "torch.onnx._internal.torchscript_exporter._globals",
    "torch.onnx._type_utils": "torch.onnx._internal.torchscript_exporter._type_utils",
}


# ---------------------------------------------------------------------------------- repairs after the import


def load_cached_extensions() -> bool:
    """Every torch: ORT looks for its C++ extensions inside site-packages only; ours lie in the cache."""
    ortmodule: Any = importlib.import_module(_ORTMODULE)
    package = importlib.import_module(f"{_ORTMODULE}.torch_cpp_extensions")
    package.__path__.insert(0, str(extensions.cache_dir()))
    for name in extensions.wanted():
        if not (name == extensions.INTEROP and extensions.interop_refusal()):
            _load(f"{package.__name__}.{name}")
    if "extensions were not detected" in str(ortmodule._FALLBACK_INIT_EXCEPTION):
        ortmodule._FALLBACK_INIT_EXCEPTION = None
    return True


def stand_in_for_interop() -> bool:
    """A torch for which torch_interop_utils could not be built: custom autograd functions are off.

    The stand-in has the names ORT uses and no others: one that answered every attribute would be taken by
    transformers' lazy imports for anything.
    """
    if not extensions.interop_refusal():
        return False
    package = importlib.import_module(f"{_ORTMODULE}.torch_cpp_extensions")
    stand_in: Any = ModuleType(f"{package.__name__}.torch_interop_utils")
    stand_in.get_custom_function_forward_runner = custom_functions.refuse
    stand_in.get_custom_function_backward_runner = custom_functions.refuse
    stand_in.clear_all_grad_fns = lambda: None
    sys.modules[stand_in.__name__] = package.torch_interop_utils = stand_in  # type: ignore[attr-defined]
    with environment(ORTMODULE_ENABLE_CUSTOM_AUTOGRAD="0"):
        importlib.import_module(f"{_ORTMODULE}._custom_autograd_function")
    return True


def export_with_torchscript() -> bool:
    """Torch 2.9 and later: `torch.onnx.export` defaults to the dynamo exporter, whose graphs ORT cannot read."""
    import torch

    if inspect.signature(torch.onnx.export).parameters["dynamo"].default is not True:
        return False
    wrap_ort_export(lambda export: functools.partial(export, dynamo=False))
    return True


def refuse_custom_backward() -> bool:
    """Without torch_interop_utils ORT lets the exporter inline custom autograd functions.

    ORT would then differentiate their forward and never call their backward: silently wrong gradients. Not inlined,
    they end the export with an error.
    """
    if not extensions.interop_refusal():
        return False
    wrap_ort_export(custom_functions.without_inlining)
    return True


def skip_padding_hook() -> bool:
    """On CUDA ORT marks padding with a Python operator, which takes torch_interop_utils."""
    if not extensions.interop_refusal():
        return False
    manager = importlib.import_module(f"{_ORTMODULE}._graph_transition_manager").GraphTransitionManager
    manager._add_check_embedding_sparsity_hook = staticmethod(lambda *args: [])
    return True


def keep_boolean_arguments() -> bool:
    """Every torch: custom autograd functions get booleans as uint8, and cannot return any."""
    return not extensions.interop_refusal() and custom_functions.keep_booleans()


def export_multihead_attention() -> bool:
    """Every torch: ORT's shape inference ends at torch's form of unflatten, which nn.MultiheadAttention takes."""
    wrap_ort_export(_symbolics().unflattening)
    return True


def export_attention_dropout() -> bool:
    """Every torch: scaled_dot_product_attention with dropout, written so that ORT can train it.

    Where torch's source is unknown such attention ends the export, and so the run before step 1, with what to do.
    """
    import torch

    if _symbolics().with_attention_dropout(torch.onnx.export) is None:
        wrap_ort_export(_symbolics().refusing_attention_dropout)
        leave_out("export_attention_dropout", f"torch {torch.__version__} exports attention in a way not known here")
        return False
    wrap_ort_export(_symbolics().with_attention_dropout)
    return True


def add_up_at_indices() -> bool:
    """Every torch: exported `index_add` and accumulating `index_put` keep one value where an index comes twice."""
    wrap_ort_export(_symbolics().accumulating)
    return True


def draw_what_is_likely() -> bool:
    """Every torch: `bernoulli` in ORT's graph drew ones with the probability of zeros."""
    wrap_ort_export(_symbolics().drawing)
    return True


def leave_out_casts() -> bool:
    """Every torch: `h.float().square()` of a tensor that is float already ended ORT's build of the graph."""
    wrap_ort_export(_symbolics().casting)
    return True


def count_documents() -> bool:
    """Every torch: `diff` and `cumsum` of truths ended an export, and so a Llama that is given no attention mask."""
    wrap_ort_export(_symbolics().counting)
    return True


def stop_gradient_at_detach() -> bool:
    """Every torch: the exporter leaves `detach` out, and ORT's gradient went through it."""
    wrap_ort_export(_symbolics().stopping_at_detach)
    return True


def change_what_shares_memory() -> bool:
    """Every torch: the exporter shows a change in place in that tensor, not in those that it shares memory with."""
    wrap_ort_export(importlib.import_module("ortlaunch.ortmodule.aliases").following_changes)
    return True


def stop_gradient_under_no_grad() -> bool:
    """Every torch: an export is made with gradients off, and does not see where a model turns them off."""
    wrap_ort_export(importlib.import_module("ortlaunch.ortmodule.grad_mode").following_grad_mode)
    return True


def call_chunked_loss() -> bool:
    """Every torch: the operator of `engine.chunked_loss` has no ONNX form; ORT's graph calls it."""
    wrap_ort_export(importlib.import_module("ortlaunch.ortmodule.head_loss").calling_chunked_loss)
    return True


def train_recurrent() -> bool:
    """Every torch: ORT has no gradient of RNN, so that `nn.RNN` ended the build of the graph."""
    wrap_ort_export(importlib.import_module("ortlaunch.ortmodule.recurrent").training_recurrent)
    return True


def infer_shapes_without_weights() -> bool:
    """Every torch: the exporter copies every weight twice to infer shapes, half of an export's time with large ones."""
    wrap_ort_export(importlib.import_module("ortlaunch.ortmodule.pipeline").without_weights)
    return True


def quiet_ort_export() -> bool:
    """Every torch: warnings of the export that a user cannot act on.

    They are the exporter's about tracing and deprecation, and ORT's that its ZeRO 3 hooks do not know DeepSpeed 0.16.
    """
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DeepSpeed import error")
        importlib.import_module("onnxruntime.training.utils.hooks")

    def quiet(export: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(export)
        def export_quietly(*args: Any, **kwargs: Any) -> Any:
            with warnings.catch_warnings():
                for category in (torch.jit.TracerWarning, DeprecationWarning, FutureWarning):
                    warnings.simplefilter("ignore", category)
                warnings.filterwarnings("ignore", module=r"torch\.onnx")
                return export(*args, **kwargs)

        return export_quietly

    wrap_ort_export(quiet)
    return True


def restore_convolution_symbolics() -> bool:
    """Torch 2.9 and later: the name under which ORT's export of a convolution finds the exporter's is gone."""
    public: Any = importlib.import_module("torch.onnx.symbolic_opset9")
    lost = [name for name in ("_convolution", "_convolution_mode") if not hasattr(public, name)]
    for name in lost:
        moved = importlib.import_module("torch.onnx._internal.torchscript_exporter.symbolic_opset9")
        setattr(public, name, getattr(moved, name))
    return bool(lost)


def skip_nvtx_without_cuda() -> bool:
    """CPU-only torch builds whose `torch.cuda.nvtx` raises; ORT marks ranges in every forward."""
    import torch

    if torch.cuda.is_available() or _nvtx_works():
        return False
    # ORT asks hasattr(torch.cuda.nvtx, "range_push") first, so an nvtx without names is one it skips.
    helpers: Any = importlib.import_module("onnxruntime.training.utils.torch_profile_utils")
    helpers.torch = Seen(torch, cuda=Seen(torch.cuda, nvtx=types.SimpleNamespace()))
    return True


_BEFORE_IMPORT: tuple[Callable[[], bool], ...] = (alias_moved_exporter_modules,)
_AFTER_IMPORT: tuple[Callable[[], bool], ...] = (
    load_cached_extensions,
    stand_in_for_interop,
    export_with_torchscript,
    refuse_custom_backward,
    skip_padding_hook,
    keep_boolean_arguments,
    export_multihead_attention,
    export_attention_dropout,
    add_up_at_indices,
    draw_what_is_likely,
    leave_out_casts,
    count_documents,
    call_chunked_loss,
    train_recurrent,
    stop_gradient_at_detach,
    change_what_shares_memory,  # first, so that the next one sees what it computes
    stop_gradient_under_no_grad,
    infer_shapes_without_weights,
    quiet_ort_export,
    restore_convolution_symbolics,
    skip_nvtx_without_cuda,
)


# ------------------------------------------------------------------------------------------------ their parts


def _symbolics() -> Any:
    return importlib.import_module("ortlaunch.ortmodule.symbolics")  # it imports torch, which is late here


def _apply(repair: Callable[[], bool]) -> None:
    if repair.__name__ not in applied() and repair():
        record(repair.__name__)


def _import() -> ModuleType:
    try:
        return importlib.import_module(_ORTMODULE)
    except ImportError as error:
        extra = extensions.EXTRA_OF[extensions.ort_package()]
        raise MissingDependency(
            f'ONNX Runtime Training does not import: {error}. Type: pip install "ortlaunch[{extra}]"'
        ) from error


def _load(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        folder = extensions.cache_dir()
        raise MissingDependency(
            f"the built extension does not load: {error}. Type: rm -r {str(folder)!r} && ortlaunch setup"
        ) from error


def _require_extensions() -> None:
    missing = extensions.missing()
    if missing:
        why = "; ".join([f"{', '.join(missing)} not in {extensions.cache_dir()}", *extensions.damage()])
        raise MissingDependency(f"ORT's torch extensions are not built for this stack ({why}). Type: ortlaunch setup")


def _nvtx_works() -> bool:
    import torch

    try:
        torch.cuda.nvtx.range_push("ortlaunch")
        torch.cuda.nvtx.range_pop()
    except RuntimeError:
        return False
    return True
