"""Errors of a pass of ORT's graph as one sentence: torch's exception, the layer, the model's line.

ORT's own text has the node's name, C++ functions and stack frames, and no type.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from ortmodule._internal.base import torch_calls

ORT_TEXT_ATTRIBUTE = "ortmodule_text"
"""The attribute of an exception that has ORT's own text, for state/unsupported.py."""
SourceLines = Mapping[tuple[str, str], Mapping[str, None]]
"""Lines of the model, as ` at FILE:LINE`, by the end of a layer's path and the ONNX operator."""
_FAILED_NODE = re.compile(
    r"while running (\w+) node\. Name:'(.*?)' Status Message: (.*)", re.DOTALL
)
# A node's name: the layer's path, the operator, and what gradients and kernels add.
_NODE_NAME = re.compile(
    r"/_original_module((?:/[^/]+)*?)/([A-Za-z]+)(?:_\d+)?(?:_Grad/.*|_output_.*)?"
)
# An error of torch as ATen's executor gives it (build/extension_sources.py), or of a Python function.
_TORCH_ERROR = re.compile(r"(?:torch's )?(\w+Error): (.*?)\s*(?:At:\s.*)?", re.DOTALL)
# Source file, function and condition of ORT's errors.
_SOURCE_TEXT = re.compile(
    r"/onnxruntime_src/\S+:\d+ [^()]*\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])? "
    r"(?:.*? was false\.? ?)?"
)
_ERROR_BY_NAME = {
    error.__name__: error for error in (IndexError, NotImplementedError, TypeError, ValueError)
}
_OUT_OF_BOUNDS = re.compile(r"out of (data )?bounds|invalid indice")


@contextlib.contextmanager
def raise_torch_or_readable_pass_error(
    source_lines_by_layer_and_operator: SourceLines,
) -> Iterator[None]:
    """Raise torch's own exception in place of ORT's error of a pass of its graph.

    source_lines_by_layer_and_operator: of the graph's model.
    """
    torch_calls.recorded_errors.clear()
    try:
        yield
    except Exception as error:
        # Of a call of Python ORT reports that it failed, without the reason.
        if torch_calls.recorded_errors:
            raise torch_calls.recorded_errors[0] from None
        failed_node = _FAILED_NODE.search(str(error))
        if failed_node is None:
            raise
        operator, node_name, text = failed_node.groups()
        location = _layer_and_line_text_or_empty(node_name, source_lines_by_layer_and_operator)
        if torch_match := _TORCH_ERROR.fullmatch(text):
            type_name, text = torch_match.groups()
            raise _ERROR_BY_NAME.get(type_name, RuntimeError)(
                f"{text.rstrip('.')}{location}"
            ) from None
        text = " ".join(_SOURCE_TEXT.sub("", text).split())
        is_index = _OUT_OF_BOUNDS.search(text) is not None
        readable_error = (IndexError if is_index else RuntimeError)(
            f"ONNX Runtime cannot compute {operator}{location}: {text}"
        )
        vars(readable_error)[ORT_TEXT_ATTRIBUTE] = str(error)
        raise readable_error from None
    finally:
        torch_calls.recorded_errors.clear()


def _layer_and_line_text_or_empty(
    graph_node_name: str, source_lines_by_layer_and_operator: SourceLines
) -> str:
    """Return `, in layer PATH at FILE:LINE`, as far as a node's name shows them."""
    name_match = _NODE_NAME.fullmatch(graph_node_name)
    if name_match is None:
        return ""
    path: list[str] = []
    for part in name_match[1].split("/")[1:]:
        # A layer of a container has the container's path in its own.
        if path and part.startswith(f"{path[-1]}."):
            path.pop()
        path.append(part)
    known_lines = list(
        source_lines_by_layer_and_operator.get((path[-1] if path else "", name_match[2]), ())
    )
    layer = f", in layer {'.'.join(path)}" if path else ""
    return (
        layer
        + ("," if not layer and known_lines else "")
        + (" or".join(known_lines) if len(known_lines) < 4 else "")
    )
