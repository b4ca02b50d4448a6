"""Errors of a pass of ORT's graph as one sentence: torch's exception, the layer, the model's line.

ORT's own text has the node's name, C++ functions and stack frames, and no type.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from ortlaunch.ortmodule.base import torch_calls

TEXT = "ortlaunch_text"
"""The attribute of an exception that has ORT's own text, for state/unsupported.py."""
Lines = Mapping[tuple[str, str], Mapping[str, None]]
"""Lines of the model, as ` at FILE:LINE`, by the end of a layer's path and the ONNX operator."""
_FAILED = re.compile(r"while running (\w+) node\. Name:'(.*?)' Status Message: (.*)", re.DOTALL)
# A node's name: the layer's path, the operator, and what gradients and kernels add.
_NAME = re.compile(r"/_original_module((?:/[^/]+)*?)/([A-Za-z]+)(?:_\d+)?(?:_Grad/.*|_output_.*)?")
# An error of torch as ATen's executor gives it (build/extension_sources.py), or of a Python function.
_OF_TORCH = re.compile(r"(?:torch's )?(\w+Error): (.*?)\s*(?:At:\s.*)?", re.DOTALL)
# Source file, function and condition of ORT's errors.
_SOURCE = re.compile(
    r"/onnxruntime_src/\S+:\d+ [^()]*\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])? "
    r"(?:.*? was false\.? ?)?"
)
_KINDS = {kind.__name__: kind for kind in (IndexError, NotImplementedError, TypeError, ValueError)}
_OUTSIDE = re.compile(r"out of (data )?bounds|invalid indice")


@contextlib.contextmanager
def errors_in_words(lines: Lines) -> Iterator[None]:
    """Raise torch's own exception in place of ORT's error of a pass of its graph.

    lines: of the graph's model.
    """
    torch_calls.errors.clear()
    try:
        yield
    except Exception as error:
        # Of a call of Python ORT reports that it failed, without the reason.
        if torch_calls.errors:
            raise torch_calls.errors[0] from None
        failed = _FAILED.search(str(error))
        if failed is None:
            raise
        operator, name, text = failed.groups()
        where = _where(name, lines)
        if by_torch := _OF_TORCH.fullmatch(text):
            kind, text = by_torch.groups()
            raise _KINDS.get(kind, RuntimeError)(f"{text.rstrip('.')}{where}") from None
        text = " ".join(_SOURCE.sub("", text).split())
        is_index = _OUTSIDE.search(text) is not None
        raised = (IndexError if is_index else RuntimeError)(
            f"ONNX Runtime cannot compute {operator}{where}: {text}"
        )
        vars(raised)[TEXT] = str(error)
        raise raised from None
    finally:
        torch_calls.errors.clear()


def _where(name: str, lines: Lines) -> str:
    """Return `, in layer PATH at FILE:LINE`, as far as a node's name shows them."""
    found = _NAME.fullmatch(name)
    if found is None:
        return ""
    path: list[str] = []
    for part in found[1].split("/")[1:]:
        # A layer of a container has the container's path in its own.
        if path and part.startswith(f"{path[-1]}."):
            path.pop()
        path.append(part)
    known = list(lines.get((path[-1] if path else "", found[2]), ()))
    layer = f", in layer {'.'.join(path)}" if path else ""
    return (
        layer + ("," if not layer and known else "") + (" or".join(known) if len(known) < 4 else "")
    )
