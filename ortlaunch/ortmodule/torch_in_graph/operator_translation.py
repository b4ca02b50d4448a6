"""Keep operators as torch calls in ORT's graph if ONNX has no form, or ORT no gradient, for them.

The exporter translates the traced graph operator by operator. Each translation is checked here. If
it fails, or if it puts an ONNX operator without a gradient in ORT on the path of a gradient, a call
of the torch operator replaces it (torch_calls.py). If the failure appears only when ORT builds the
gradient, the model is exported again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from ortlaunch.ortmodule.base.counters import tally
from ortlaunch.ortmodule.base.differentiable import SILENT, Gradients, is_valid
from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.base.graph import ShapeInferenceError
from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.settings import settings_of
from ortlaunch.ortmodule.base.source_guard import EVALUATION, TRAINING, TRANSITION, owner
from ortlaunch.ortmodule.build import extensions
from ortlaunch.ortmodule.torch_in_graph import (
    attention,
    attention_choice,
    operator_calls,
    pass_errors,
)
from ortlaunch.ortmodule.torch_in_graph.operator_table import DRAWING, is_torchs
from ortlaunch.ortmodule.torch_in_graph.value_sizes import ValueSizes

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Manager

# Never torch calls: `detach` has an exact form, and the others give sizes and Python numbers.
_NEVER = {
    "aten::detach",
    "aten::size",
    "aten::ScalarImplicit",
    "aten::Int",
    "aten::IntImplicit",
    "aten::Bool",
}
# The attribute of ORT's options and execution agents that has the model's lines.
_LINES = "_ortlaunch_lines"
# The most retries of an export; each one may detect further operators to keep as torch calls.
_ROUNDS = 8
# The most source locations in an error message.
_FEW = 3
# ORT's error messages that name the ONNX operator whose gradient could not be built.
_FAILED = (
    r"gradient builder has not been registered: ?(\w+)",
    r"Could not find an implementation for (\w+?)(?:Grad)?\(",
    r"training::Get(\w+)Gradient::GetGradientDefsImpl",
    r"Node \(\S*?/([A-Za-z]+)(?:_\d+)?_Grad/",
)


def install() -> None:
    """Wrap ORT's methods so that a failed gradient build is retried with torch's operator."""
    for step in ("_build_graph", "_create_execution_agent"):
        # ORT's own wrapper around the method has another name.
        wrap_method(owner(TRAINING), step, functools.partial(_trying_again, step))
    wrap_method(owner(EVALUATION), "_create_execution_agent", _forgetting_call)
    wrap_method(owner(TRANSITION), "get_post_processed_model", _noting_call)
    for agent, step in (
        ("Training", "forward"),
        ("Training", "backward"),
        ("Inference", "forward"),
    ):
        wrap_method(owner(f"_execution_agent:{agent}Agent"), f"run_{step}", _with_errors_in_words)


@contextlib.contextmanager
def operators_as_torch(export: Export) -> Iterator[None]:
    """Keep operators as torch calls in exports, as the settings require."""
    asked = settings_of(export.options).torch_operators
    able = asked != "off" and not extensions.interop_refusal()
    named = asked if able and asked != "auto" else ()
    names = tuple(name if "::" in name else f"aten::{name}" for name in named)
    translator = _Translator(export, names, able, able and asked == "auto")
    exporter = _exporter()
    with contextlib.ExitStack() as patches:
        for name, around in (
            ("_run_symbolic_function", translator.translate),
            ("_optimize_graph", translator.noting),
        ):
            patches.enter_context(
                mock.patch.object(
                    exporter, name, functools.partial(around, getattr(exporter, name))
                )
            )
        yield


def _exporter() -> Any:
    moved = "torch.onnx._internal.torchscript_exporter"
    return importlib.import_module(
        f"{moved}.utils" if importlib.util.find_spec(moved) else "torch.onnx.utils"
    )


class _Translator:
    """The translation of one traced graph by the exporter."""

    def __init__(self, export: Export, names: Sequence[str], able: bool, by_rule: bool) -> None:
        self._training = export.training
        self._able = able
        self._by_rule = by_rule
        # torch's kernel for CPUs needs no extension.
        self._auto = settings_of(export.options).torch_operators == "auto"
        self._names = {*names, *_blamed_so_far(export.options)}
        self._schemas: dict[str, Any] = {}
        self._empty = [place for place, given in enumerate(export.inputs) if _is_empty(given)]
        self._device = export.device.type
        # The latest random values in the graph. The next ones depend on them, so that the order
        # of the draws is that of eager PyTorch.
        self._drawn: Any = None
        # By ONNX operator: the torch operators translated to it, with their source locations.
        # Stored in the options, which outlive the export: `_blame` reads it when a build fails.
        self._makers: dict[str, dict[str, str]] = vars(export.options).setdefault(
            "_ortlaunch_makers", {}
        )
        # The same for the lines of a layer's nodes, for `pass_errors`.
        self._lines: dict[tuple[str, str], dict[str, None]] = {}
        vars(export.options)[_LINES] = self._lines
        self._layers = [name for name, _ in export.module.named_modules()]
        parameters = {name: p.requires_grad for name, p in export.module.named_parameters()}
        buffers = {name for name, _ in export.module.named_buffers()}
        inputs = set(export.info.onnx_graph_input_names_require_grad)
        plain = set(export.info.onnx_graph_input_names) - inputs - parameters.keys()
        self._gradients = Gradients(
            lambda name: parameters.get(name, name not in buffers | plain), export.device.type
        )

    def noting(self, original: AnyFunction, graph: Any, *args: object, **kwargs: object) -> Any:
        """Record each operator's schema, which the exporter's passes over the graph drop."""
        for node in _nodes(graph):
            schema = node.schema()
            if "!" in schema and not node.kind().startswith("aten::"):
                # The exporter would leave it out.
                call = operator_calls.Call(node, (), self._schemas)
                raise self._cannot(call, f"{call.name} changes a tensor in place")
            if schema != "(no schema)" and node.outputsSize():
                self._schemas[next(node.outputs()).debugName()] = schema
        inputs = list(graph.inputs())
        self._sizes = ValueSizes(inputs[place] for place in self._empty)
        return original(graph, *args, **kwargs)

    def translate(self, original: AnyFunction, *given: Any) -> Any:
        """Translate one node; a replacement for the exporter's `_run_symbolic_function`."""
        graph, block, node, inputs, env, known, new = given[:7]

        def plainly() -> Any:
            return original(*given)

        name = node.kind()
        context = importlib.import_module(_JIT).GraphContext(
            graph, block, _opset(), node, {}, env, known, new
        )
        if operator_calls.is_complex_constant(node):
            return context.op(
                "Constant", value_t=torch.view_as_real(node.t("value").resolve_conj())
            )
        # Others are torch's, and those that packages and models register.
        if name.startswith(("prim::", "onnx::")):
            return plainly()
        if attention.keeps_shape(node):
            return inputs[0]
        call = operator_calls.Call(node, inputs, self._schemas)
        if name.rstrip("_") in _NEVER and not call.is_complex():
            return plainly()
        if self._able and self._by_rule and name.rstrip("_") in DRAWING:
            with contextlib.suppress(operator_calls.NotCallable):
                self._drawn = call.write(context, self._gradients, draws=True, before=self._drawn)
                return self._drawn
        asked = name.rstrip("_") in self._names or call.is_complex()
        if name == attention.NAME and self._is_fused(call.given(), inputs, asked):
            if self._device == "cpu":
                return attention.written(context, call.given(), inputs)
            # The kernels for GPUs are called with torch's derivative (docs/gpu.md).
            asked = True
        if self._by_rule:
            asked = asked or is_torchs(name.rstrip("_"), call.given())
        if self._able and asked:
            return self._instead(call, context, None)
        before = len(new)
        if not self._by_rule:
            outputs = plainly()
            self._check(call, new[before:], outputs)
            return outputs
        try:
            outputs = plainly()
        except Exception as error:
            return self._instead(call, context, error)
        written = new[before:]
        self._note_lines(node, written, call.line())
        if (
            not all(map(is_valid, written))
            or self._lost(written, outputs)
            or self._sizes.reach(node)
        ):
            return self._instead(call, context, None, outputs)
        return outputs

    def _note_lines(self, node: torch.Node, written: Sequence[torch.Node], line: str) -> None:
        scope = node.scopeName().rpartition("::")[2].removeprefix("_original_module")
        for one in written:
            self._makers.setdefault(_operator(one), {})[node.kind()] = line
            if line:
                self._lines.setdefault((scope, one.kind().rpartition("::")[2]), {})[line] = None

    def _is_fused(self, given: Sequence[Any], inputs: Sequence[Any], listed: bool) -> bool:
        learns_mask = self._gradients.reach(inputs[3])
        return (listed or self._auto) and attention_choice.is_fused(
            given, self._device, learns_mask, listed
        )

    def _lost(self, written: Sequence[Any], outputs: Any) -> str:
        values = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        return self._gradients.lost(written, values) if self._training else ""

    def _check(self, call: Any, written: Sequence[Any], outputs: Any) -> None:
        """Refuse a translation that would be wrong without an error.

        This applies where the settings do not let the operator stay torch's.
        """
        if is_torchs(call.name.rstrip("_"), call.given()) or self._lost(written, outputs) in SILENT:
            raise RuntimeError(
                f"{call.name} or its gradient is another one in ONNX Runtime than in torch; "
                "it can stay torch's: Settings.torch_operators='auto', or a list with it. "
                f"{extensions.interop_refusal()}".rstrip()
            )

    def _instead(
        self, call: Any, context: GraphContext, error: Exception | None, outputs: Any = None
    ) -> Any:
        try:
            return call.write(context, self._gradients)
        except operator_calls.NotCallable as why:
            if outputs is not None:
                # If this value needs a gradient, ORT raises an error of its own later.
                return outputs
            before = f"{' '.join(str(error).split()) or type(error).__name__}; " if error else ""
            raise self._cannot(call, why, before) from error

    def _cannot(self, call: operator_calls.Call, why: object, before: str = "") -> RuntimeError:
        layer = call.layer(self._layers)
        setting = f"Settings.torch_modules{f'=[{layer!r}]' if layer else ''}"
        return RuntimeError(
            f"{before}torch cannot compute {call.name}{call.line()} inside ONNX Runtime's graph: "
            f"{why}. Write it with other operators, or let the layer run as torch ({setting})"
        )


def _is_empty(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.numel()


def _operator(node: torch.Node) -> str:
    """Return a node's operator in ONNX; for an ATen node, torch's operator."""
    name = str(node.kind()).rpartition("::")[2]
    return (
        str(node.s("operator")) if name == "ATen" and "operator" in node.attributeNames() else name
    )


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


_MOVED = "torch.onnx._internal.torchscript_exporter.jit_utils"
# compat.py makes this name importable on every torch.
_JIT = "torch.onnx._internal.jit_utils"


def _opset() -> int:
    return int(importlib.import_module("torch.onnx._globals").GLOBALS.export_onnx_opset_version)


# ------------------------------------------------------------------- failures after the translation


def _blamed_so_far(options: Any) -> set[str]:
    found: set[str] = vars(options).setdefault("_ortlaunch_blamed", set())
    return found


def _noting_call(original: AnyFunction, transition: Any, inputs: Any, kwargs: Any) -> Any:
    # For `_export_anew`, if the build that follows fails.
    transition._ortlaunch_given = inputs, kwargs
    changed, info = _with_known_shapes(original, transition, inputs, kwargs)
    # No build follows, so the batch is freed.
    if not changed:
        del transition._ortlaunch_given
    return changed, info


def _with_known_shapes(original: AnyFunction, transition: Any, inputs: Any, kwargs: Any) -> Any:
    for _ in range(_ROUNDS):
        try:
            return original(transition, inputs, kwargs)
        except ShapeInferenceError as error:
            options = transition._runtime_options
            if not _blame(options, {error.operator}, str(error)):
                makers = vars(options).get("_ortlaunch_makers", {}).get(error.operator, {})
                lines = ", ".join(f"{name}{line}" for name, line in sorted(makers.items())[:_FEW])
                raise RuntimeError(
                    f"{error}, which is exported for {lines or 'the model'}: write it with other "
                    "operators, or let the layer run as torch (Settings.torch_modules)"
                ) from error
            transition._exported_model_info = None
    return original(transition, inputs, kwargs)


def _forgetting_call(original: AnyFunction, manager: Manager) -> Any:
    original(manager)
    _built(manager, "_create_execution_agent")


def _with_errors_in_words(original: AnyFunction, agent: Any, *args: Any) -> Any:
    with pass_errors.errors_in_words(vars(agent).get(_LINES, {})):
        return original(agent, *args)


def _trying_again(step: str, original: AnyFunction, manager: Manager, *args: Any) -> Any:
    for _ in range(_ROUNDS):
        try:
            original(manager, *args)
            return _built(manager, step)
        except Exception as error:
            named = {found for pattern in _FAILED for found in re.findall(pattern, str(error))}
            blamed = _leave_optimizer(manager, str(error), *args) or _blame(
                manager._runtime_options, named, str(error)
            )
            if not blamed:
                raise
            _export_anew(manager, step)
    return original(manager, *args)


def _leave_optimizer(manager: Manager, message: str, *configs: Any) -> bool:
    """Turn ORT's compute optimizer off if it failed at an unknown shape; return whether it did."""
    if "compute_optimizer" not in message or not manager._runtime_options.enable_compute_optimizer:
        return False
    tally.note(
        "compute_optimizer is off: ONNX Runtime's ends at a shape of this model that is known in a "
        "pass only"
    )
    for one in (manager._runtime_options, *configs):
        one.enable_compute_optimizer = False
    return True


def _built(manager: Manager, step: str) -> None:
    if step == "_create_execution_agent":
        lines = vars(manager._runtime_options).get(_LINES, {})
        vars(manager._execution_agent)[_LINES] = dict(lines)
        vars(manager._graph_transition_manager).pop("_ortlaunch_given", None)


def _blame(options: Any, named: set[str], message: str) -> set[str]:
    """Mark the torch operators that were translated to the ONNX operators in ORT's error.

    Returns:
        The newly marked operators; the next export keeps them as torch calls.
    """
    if settings_of(options).torch_operators != "auto" or extensions.interop_refusal():
        return set()
    makers: dict[str, dict[str, str]] = vars(options).get("_ortlaunch_makers", {})
    new = {maker for name in named for maker in makers.get(name, ())} - _blamed_so_far(options)
    if new:
        tally.note(
            f"exported once more with {', '.join(sorted(new))} as torch's: "
            f"{message.splitlines()[-1][:200]}"
        )
    _blamed_so_far(options).update(new)
    return new


def _export_anew(manager: Manager, step: str) -> None:
    transition = manager._graph_transition_manager
    transition._exported_model_info = None
    _, info = transition.get_post_processed_model(*transition._ortlaunch_given)
    manager._initialize_graph_builder(info)
    # The execution agent is created from a built graph, so the new export is built first.
    if step != "_build_graph":
        manager._build_graph(manager._get_graph_transformer_config())
