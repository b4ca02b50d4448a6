"""Spans of time of a profiled step, from torch's profiler and from ONNX Runtime's.

The layer and the source line that called an operator of torch are marks in torch's profile. Its own
recording of Python stacks costs more, and has no line for an operator such as `a @ b`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._C._profiler import _EventType, _RecordFunctionFast, _TensorMetadata
from torch.overrides import TorchFunctionMode

from ortlaunch.run_folder.profile_record import PYTHON

# Positions of the two factors among an operator's inputs, and operations for each pair of elements.
_FACTOR_POSITIONS = {
    "aten::mm": (0, 1, 2),
    "aten::bmm": (0, 1, 2),
    "aten::addmm": (1, 2, 2),
    "aten::baddbmm": (1, 2, 2),
    "aten::mkldnn_linear": (0, 1, 2),
    "mkldnn::_linear_pointwise": (0, 1, 2),
    "mkl::_mkl_linear": (0, 1, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 1, 4),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, 2, 10),
}
# The track of ONNX Runtime's nodes, whose times are whole microseconds.
ORT = "ONNX Runtime"
_HERE = Path(__file__).parents[2]
_LIBRARIES = (
    # Code that is generated at run time, such as torch.fx's.
    "<",
    contextlib.__file__,
    f"{_HERE}/",
    *(
        f"{Path(torch.__file__).parents[1] / name}/"
        for name in ("torch", "onnxruntime", "deepspeed")
    ),
)


@dataclass(eq=False)
class Span:
    """An operator, or a part of a step; times in nanoseconds since 1970."""

    start: int
    end: int
    name: str
    """The operator, or READING or PYTHON."""
    phase: str = ""
    """forward, backward or optimizer; empty: that of the span around it, as the next two."""
    module: str = ""
    source: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    """Bytes that it reads and writes, as far as its profile shows them."""
    sequence: int = -1
    """torch's number, by which it links an operator to its derivative."""
    cost_kind: str = ""
    own_ns: int = 0
    """Nanoseconds in which no span inside it runs."""
    track: str = ""
    """The row of the timeline: its spans are apart or inside each other."""


class TorchCallMarker(TorchFunctionMode):
    """Marks each call of a torch function with the innermost layer and line of the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._layers = {id(layer): name or "(model)" for name, layer in model.named_modules()}

    @contextlib.contextmanager
    def mark_torch_calls_with_layer_and_line(self) -> Iterator[None]:
        """Mark calls of torch functions, and of the model's own torch.autograd.Functions."""
        apply: Any = torch.autograd.Function.apply

        # A Function is no torch function, so the mode does not see its calls.
        def call_with_mark(function_class: Any, *args: Any, **kwargs: Any) -> Any:
            return self.__torch_function__(apply.__func__, (), (function_class, *args), kwargs)

        with mock.patch.object(torch.autograd.Function, "apply", classmethod(call_with_mark)), self:
            yield

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # torch.profiler.record_function: a mark around its begin would end inside its span.
        if getattr(func, "__name__", "").startswith("_record_function_"):
            return func(*args, **(kwargs or {}))
        layer = line = ""
        frame: Any = sys._getframe(1)
        while frame and not (layer and line):
            layer = layer or self._layers.get(id(frame.f_locals.get("self")), "")
            line = line or _model_source_location_or_empty(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        with _RecordFunctionFast(f"{PYTHON}|{layer}|{line}"):
            return func(*args, **(kwargs or {}))


def _model_source_location_or_empty(source_path: str, line_number: int) -> str:
    """Return FILE:LINE, or nothing for a file of torch, ONNX Runtime, DeepSpeed or ortlaunch."""
    name = _short_model_file_name_or_empty(source_path)
    return name and f"{name}:{line_number}"


# Each mark reads the files of all frames.
@functools.cache
def _short_model_file_name_or_empty(source_path: str) -> str:
    """Return the short name of a file of the model's code, and nothing for others.

    ortlaunch's parts of a model (worker/model) count as the model's code.
    """
    if source_path.startswith(_LIBRARIES) and not source_path.startswith(
        str(_HERE / "worker" / "model")
    ):
        return ""
    return source_path.rpartition("/site-packages/")[2].removeprefix(f"{Path.cwd()}/")


def spans_of_torch_events(profiler_events: Iterable[Any]) -> Iterator[Span]:
    """Yield the spans of operators and marks in a tree of torch's profiler."""
    for event in (entry for entry in profiler_events if entry.tag == _EventType.TorchOp):
        inputs = event.extra_fields.inputs
        # The bytes of inputs, some of which are in lists, and of memory that it writes.
        sizes = [
            math.prod(entry.sizes) * entry.dtype.itemsize
            for input_value in inputs
            for entry in (input_value if isinstance(input_value, list) else [input_value])
            if isinstance(entry, _TensorMetadata)
        ]
        # An operator that changes its first input allocates nothing.
        sizes += sizes[: event.name.endswith("_")] + [
            max(0, inside.extra_fields.alloc_size)
            for inside in event.children
            if inside.tag == _EventType.Allocation
        ]
        # Marks have a layer and a line after their name.
        name, module, source = [*event.name.split("|", 2), "", ""][:3]
        span = Span(
            event.start_time_ns, event.end_time_ns, name, "", module, source,
            bytes=sum(sizes), sequence=event.extra_fields.sequence_number,
            track=f"torch, thread {event.start_tid}",
        )  # fmt: skip
        if name in _FACTOR_POSITIONS:
            first_factor, second_factor, entry = _FACTOR_POSITIONS[name]
            a, b = inputs[first_factor].sizes, inputs[second_factor].sizes
            span.flops = entry * math.prod(a) * math.prod(b) / max(1, a[-1] * math.prod(b[:-2]))
        yield span
        yield from spans_of_torch_events(event.children)


def keep_python_stacks_in_exports(is_enabled: bool) -> contextlib.AbstractContextManager[object]:
    """Return a context in which exported graphs keep the Python stack of each node, or do not."""
    graph: Any = torch._C.Graph
    # The sixth argument is strip_doc_string.
    return (
        mock.patch.object(
            graph,
            "_export_onnx",
            lambda graph, *a, export=graph._export_onnx: export(graph, *a[:5], False, *a[6:]),
        )
        if is_enabled
        else contextlib.nullcontext()
    )


@dataclass
class ProfiledOrtSessions:
    """Sessions of an ORTModule's training graphs that profile their nodes.

    ONNX Runtime profiles a session from its first run to its end. Profiled steps therefore run in
    sessions of their own, which are built of the same graphs.
    """

    module: Any
    exclude_from_counts: Callable[[], contextlib.AbstractContextManager[None]]
    """Returns a context that leaves new sessions out of the run's counters."""
    agents: dict[Any, Any] = field(default_factory=dict)
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)

    def use_profiled_sessions(self) -> contextlib.ExitStack:
        """Return a context in which the graphs run in the profiled sessions."""
        context = contextlib.ExitStack()
        for manager in self.module._torch_module._ortlaunch_graphs._cached_managers:
            if manager._export_mode == torch.onnx.TrainingMode.TRAINING:
                agent = self.agents.get(manager) or self._build_profiled_session(manager)
                context.enter_context(mock.patch.object(manager, "_execution_agent", agent))
        return context

    def _build_profiled_session(self, graph_manager: Any) -> Any:
        """Return a new session of a manager's graph, which profiles its nodes."""
        plain_agent = graph_manager._execution_agent

        def with_profile(configure: Any = graph_manager._get_session_config) -> Any:
            config = configure()
            config[0].enable_profiling = True
            config[0].profile_file_prefix = f"{self.folder.name}/{len(self.agents)}"
            return config

        with (
            mock.patch.object(graph_manager, "_get_session_config", with_profile),
            mock.patch.object(graph_manager, "_execution_agent", plain_agent),
            self.exclude_from_counts(),
        ):
            graph_manager._create_execution_agent()
            agent = self.agents[graph_manager] = graph_manager._execution_agent
        # Its passes count as those of the plain session's graph.
        vars(agent).update(_ortlaunch_graph=vars(plain_agent).get("_ortlaunch_graph"))
        return agent

    def end_profiles_and_read_node_spans(self) -> Iterator[Span]:
        """End the profiles, and yield the spans of all nodes that ran."""
        for manager, agent in self.agents.items():
            session = agent._inference_session
            model = manager._graph_transition_manager._post_export_processed_model_info
            nodes = model._post_export_processed_model.graph.node
            origins = {node.name: _layer_and_source_line_of_node(node) for node in nodes}
            for key, origin in (
                (f"{name}_grad", _layer_and_source_line_of_node(n))
                for n in nodes
                for name in n.input
            ):
                # A node that is named after a gradient belongs to the tensor's readers, if they
                # are of one layer and line.
                origins[key] = origin if origins.get(key, origin) == origin else ("", "")
            for event in json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")):
                if event["name"].endswith("_kernel_time"):
                    start = session.get_profiling_start_time_ns() + 1000 * event["ts"]
                    yield _span_of_ort_node(start, event, origins)
        self.agents.clear()


def _span_of_ort_node(
    start_ns: int, profile_event: Any, origin_by_name: Mapping[str, tuple[str, str]]
) -> Span:
    """Return the span of a node's run, with its layer and line as far as its name shows them.

    ONNX Runtime names a node that it makes after a node of the export (`LAYER/MatMul_Grad/Gemm_5`)
    or after the gradient that it computes (`LAYER/Gemm_output_0_grad_gelu_backward`).
    """
    name = profile_event["name"].removesuffix("_kernel_time").removeprefix("AccumulateGrad_")
    # The longest name first: Add_1_Grad is a node of Add_1, not of Add.
    ends = (item.start() for item in reversed([*re.finditer(r"[/_]|$", name)]))
    origin = next(
        (origin_by_name[name[:end]] for end in ends if name[:end] in origin_by_name), ("", "")
    )
    args = profile_event["args"]
    span = Span(
        start_ns, start_ns + 1000 * profile_event["dur"], args["op_name"], "", *origin, track=ORT
    )
    span.bytes = sum(
        int(args.get(f"{item}_size", 0)) for item in ("activation", "parameter", "output")
    )
    if span.name in ("MatMul", "FusedMatMul", "Gemm"):
        shapes = [*args["input_type_shape"][:2], args["output_type_shape"][0]]
        a, b, c = (next(iter(shape.values())) for shape in shapes)
        # The elements are m x k, k x n and m x n, each times the batch, in any order.
        span.flops = 2 * math.sqrt(math.prod([*a, *b, *c]) / max(1, math.prod(b[:-2])))
    return span


def _layer_and_source_line_of_node(graph_node: Any) -> tuple[str, str]:
    """Return the layer in the name of a node's result, and the innermost line of the model."""
    # Of the result, because ORT's own names of calls of Python have no scope. The exporter's name
    # of the model is that of the `model` of a LossModule.
    scope = f"{graph_node.output[0].rpartition('/')[0]}/"
    _, inside, path = scope.partition("/_original_module/model/")
    frames = (re.match(r"(.+)\((\d+)\): ", line) for line in graph_node.doc_string.splitlines())
    lines = (_model_source_location_or_empty(frame[1], int(frame[2])) for frame in frames if frame)
    # The exporter names the layers of a Sequential after it: layers/layers.0.
    path = re.sub(r"(?<![^/])([^/]+)/(?=\1\.)", "", path[:-1])
    return inside and (path.replace("/", ".") or "(model)"), next(filter(None, lines), "")
