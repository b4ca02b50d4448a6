"""Models that an export cannot use: compiled layers run uncompiled, others raise an error.

The module has the texts for errors of torch and ONNX Runtime that do not name their cause.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.repair_registry import EVALUATION, TRAINING, replace_ort_function
from ortmodule._internal.native import extensions
from ortmodule._internal.torch_in_graph.pass_errors import ORT_TEXT_ATTRIBUTE

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction, Manager

_PACKAGE_FOLDER = str(Path(__file__).parents[2])
_HALF = "ONNX Runtime computes float32 on a CPU (and float16 and bfloat16 on CUDA)"
_EAGER = "use the model without ORTModule"
_TORCH = f"let the layer run as torch (torch_modules=['PATH OF THE LAYER']), or {_EAGER}"
# A pattern in an error's text, and the text that replaces it; {0} is the pattern's first group.
_SENTENCES = (
    (
        r"ORTModule does not support input type (<class '.*?'> for input \w+)",
        "the forward pass is given {0}: an ORTModule takes tensors, Python's numbers, strings, "
        "lists, tuples and dictionaries; give it the tensors of the object as arguments, and "
        "float(value) for a NumPy number",
    ),
    (
        r"Unsupported flatten data type: (<class '.*?'>)",
        "the model returns {0}: an ORTModule returns tensors, and lists, tuples and dictionaries "
        "of them; for a cache of transformers set model.config.use_cache = False",
    ),
    (
        # The last two are of transforms, whose tensors no trace can hold.
        "does not require grad and does not have a grad_fn"
        "|Unsupported value kind: Tensor|basic_string: construction from null",
        "the forward pass calls torch.autograd.grad, backward or a derivative of torch.func, and "
        f"ONNX Runtime's graph has no derivative of a derivative: {_TORCH}",
    ),
    (
        r"\(type 'Generator'\)",
        "the forward pass draws numbers with a generator of its own, and ONNX Runtime's graph has "
        "torch's: leave out generator=, give the numbers to the forward pass as arguments, or "
        f"{_TORCH}",
    ),
    (
        r"We don't have an op for aten::(\w+) but it isn't a special case.*[\s\S]*bool",
        "{0} is called with a Python bool where TorchScript takes a number or a tensor: write 1 "
        "or 0, or torch.tensor(True)",
    ),
    (
        r"gradient builder has not been registered: ?(\w+)",
        "ONNX Runtime has no gradient of {0}: let torch compute it "
        "(torch_operators='auto', which takes ONNX "
        f"Runtime's extension {extensions.INTEROP}), or {_EAGER}",
    ),
    (
        r"kDLInt && dlpack->dl_tensor.dtype.bits == 64 INTERNAL ASSERT",
        'a size that is computed, as in interpolate(scale_factor=..., mode="area"), reaches '
        "torch's operator as a "
        f"float: give the size itself (size=...), or {_TORCH}",
    ),
    (
        r"SqueezeBase::ComputeOutputShape",
        "squeeze is given a dimension that had the size 1 in the first batch and has another one "
        "here, and ONNX Runtime's graph removes it: keep the dimension where its size varies, or "
        f"{_EAGER}",
    ),
    (
        r"Cannot split using values in 'split'|Invalid value in 'split'|_ortmodule_0_filled",
        "split, chunk or unbind gives another number of parts than in the first batch, and ONNX "
        "Runtime's graph has that many: split a dimension of one size, compute with the whole "
        f"tensor, or {_TORCH}",
    ),
)
_UNSUPPORTED_DTYPES = {
    torch.bfloat16: f"{_HALF}, not bfloat16",
    torch.float64: f"{_HALF}, not float64",
    torch.float16: f"{_HALF}, not float16 there",
}


def install_cause_messages_for_pass_errors() -> None:
    """Let errors of ONNX Runtime's passes name their cause."""
    for manager in (TRAINING, EVALUATION):
        replace_ort_function(f"{manager}.forward", _run_pass_and_name_error_cause)


def model_inside_torch_compile_or_itself(possibly_compiled_model: nn.Module) -> nn.Module:
    """Return the model inside the result of `torch.compile(model)`, or the model itself."""
    inner: nn.Module = (
        vars(possibly_compiled_model)["_modules"]["_orig_mod"]
        if type(possibly_compiled_model).__name__ == "OptimizedModule"
        else possibly_compiled_model
    )
    return inner


@contextlib.contextmanager
def run_compiled_layers_uncompiled(model: nn.Module) -> Iterator[None]:
    """Run layers that torch.compile has compiled as they are written, while open."""
    compiled_layers = [
        layer for layer in model.modules() if vars(layer).get("_compiled_call_impl") is not None
    ]
    wrapped_layers = [
        layer for layer in model.modules() if type(layer).__name__ == "OptimizedModule"
    ]
    if compiled_layers or wrapped_layers:
        tally.add_end_note_once(
            "layers compiled by torch.compile run in ONNX Runtime's graph, uncompiled"
        )
    with contextlib.ExitStack() as restorations:
        for layer, name, replacement in (
            # `layer.compile()` sets this attribute; `torch.compile(layer)` wraps the layer instead.
            *((layer, "_compiled_call_impl", None) for layer in compiled_layers),
            *((layer, "forward", layer._orig_mod) for layer in wrapped_layers),
        ):
            restorations.callback(vars(layer).__setitem__, name, vars(layer)[name])
            vars(layer)[name] = replacement
        yield


def refuse_sparse_gradients_and_complex_weights(model: nn.Module) -> None:
    """Raise RuntimeError where a weight is complex or its gradient sparse; ORT has neither."""
    for path, layer in model.named_modules():
        if getattr(layer, "sparse", False) is True and isinstance(
            layer, (nn.Embedding, nn.EmbeddingBag)
        ):
            raise RuntimeError(
                f"{path.partition('.')[2]} has a sparse gradient, and ONNX Runtime's are dense: "
                f"write sparse=False, with an optimizer for dense gradients, or {_EAGER}"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_complex():
            raise RuntimeError(
                f"{name.partition('.')[2]} is complex, and ONNX Runtime takes real weights and "
                "buffers: keep its real and imaginary part, torch.view_as_real(weight), and "
                "write torch.view_as_complex in the forward pass"
            )


def _run_pass_and_name_error_cause(
    original_forward: AnyFunction, manager: Manager, *args: object, **kwargs: object
) -> object:
    try:
        return original_forward(manager, *args, **kwargs)
    except Exception as error:
        error_text = vars(error).get(ORT_TEXT_ATTRIBUTE, str(error))
        sentence = _error_cause_sentence_or_empty(manager, error_text)
        if not sentence:
            raise
        raise RuntimeError(sentence + _innermost_user_location_text_or_empty(error_text)) from error


def _error_cause_sentence_or_empty(manager: Manager, error_text: str) -> str:
    for pattern, sentence in _SENTENCES:
        if match := re.search(pattern, error_text):
            return sentence.format(*match.groups())
    if re.search(r"NOT_IMPLEMENTED|Type Error|Could not find an implementation", error_text):
        device_type = manager._device.type if manager._device else "cpu"
        dtypes = {tensor.dtype for tensor in manager._flattened_module.parameters()}
        if torch.is_autocast_enabled(device_type):
            dtypes.add(torch.get_autocast_dtype(device_type))
        reason = next(
            (
                _UNSUPPORTED_DTYPES[dtype]
                for dtype in dtypes
                if dtype in _UNSUPPORTED_DTYPES and device_type == "cpu"
            ),
            None,
        )
        return (
            f"{reason}: train in float32 without autocast (bf16=False), or {_EAGER}"
            if reason
            else ""
        )
    return ""


def _innermost_user_location_text_or_empty(traceback_text: str) -> str:
    """Return the innermost line of the user's code in a traceback."""
    frame_locations = re.findall(r'File "(.+?)", line (\d+)', traceback_text)
    user_locations = [
        (file, line)
        for file, line in frame_locations
        if not file.startswith(_PACKAGE_FOLDER) and "site-packages" not in file
    ]
    return f" (at {user_locations[-1][0]}:{user_locations[-1][1]})" if user_locations else ""
