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
from ortlaunch.ortmodule.base.differentiable import SILENTLY_WRONG, GradientPaths, is_valid_onnx
from ortlaunch.ortmodule.base.export import Export
from ortlaunch.ortmodule.base.graph import ShapeInferenceError
from ortlaunch.ortmodule.base.patching import wrap_method
from ortlaunch.ortmodule.base.settings import attached_settings
from ortlaunch.ortmodule.base.source_guard import EVALUATION, TRAINING, TRANSITION, function_owner
from ortlaunch.ortmodule.build import extensions
from ortlaunch.ortmodule.torch_in_graph import (
    attention,
    attention_choice,
    operator_calls,
    pass_errors,
)
from ortlaunch.ortmodule.torch_in_graph.operator_table import (
    DRAWING_OPERATORS,
    is_computed_by_torch,
)
from ortlaunch.ortmodule.torch_in_graph.value_sizes import ValueSizes

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

    from ortlaunch.ortmodule.base.ort_types import AnyFunction, Manager

# Never torch calls: `detach` has an exact form, and the others give sizes and Python numbers.
_NEVER_TORCH = {
    "aten::detach",
    "aten::size",
    "aten::ScalarImplicit",
    "aten::Int",
    "aten::IntImplicit",
    "aten::Bool",
}
# The attribute of ORT's options and execution agents that has the model's lines.
_LINES_ATTRIBUTE = "_ortlaunch_lines"
# The most retries of an export; each one may detect further operators to keep as torch calls.
_MAX_RETRIES = 8
# The most source locations in an error message.
_MAX_LOCATIONS = 3
# ORT's error messages that name the ONNX operator whose gradient could not be built.
_FAILED_PATTERNS = (
    r"gradient builder has not been registered: ?(\w+)",
    r"Could not find an implementation for (\w+?)(?:Grad)?\(",
    r"training::Get(\w+)Gradient::GetGradientDefsImpl",
    r"Node \(\S*?/([A-Za-z]+)(?:_\d+)?_Grad/",
)


def install_translation_retries() -> None:
    """Wrap ORT's methods so that a failed gradient build is retried with torch's operator."""
    for method_name in ("_build_graph", "_create_execution_agent"):
        # ORT's own wrapper around the method has another name.
        wrap_method(
            function_owner(TRAINING), method_name, functools.partial(_retry_build, method_name)
        )
    wrap_method(function_owner(EVALUATION), "_create_execution_agent", _create_agent_and_free_batch)
    wrap_method(function_owner(TRANSITION), "get_post_processed_model", _rebuild_keeping_arguments)
    for agent, method_name in (
        ("Training", "forward"),
        ("Training", "backward"),
        ("Inference", "forward"),
    ):
        wrap_method(
            function_owner(f"_execution_agent:{agent}Agent"),
            f"run_{method_name}",
            _run_with_readable_errors,
        )


@contextlib.contextmanager
def keep_torch_operators(export: Export) -> Iterator[None]:
    """Keep operators as torch calls in exports, as the settings require."""
    requested_operators = attached_settings(export.options).torch_operators
    can_call_torch = requested_operators != "off" and not extensions.interop_refusal_reason()
    listed_names = requested_operators if can_call_torch and requested_operators != "auto" else ()
    operator_names = tuple(name if "::" in name else f"aten::{name}" for name in listed_names)
    translator = _Translator(
        export, operator_names, can_call_torch, can_call_torch and requested_operators == "auto"
    )
    exporter = _exporter_module()
    with contextlib.ExitStack() as patches:
        for name, wrapper in (
            ("_run_symbolic_function", translator.translate_node),
            ("_optimize_graph", translator.record_schemas),
        ):
            patches.enter_context(
                mock.patch.object(
                    exporter, name, functools.partial(wrapper, getattr(exporter, name))
                )
            )
        yield


def _exporter_module() -> Any:
    moved_package = "torch.onnx._internal.torchscript_exporter"
    return importlib.import_module(
        f"{moved_package}.utils" if importlib.util.find_spec(moved_package) else "torch.onnx.utils"
    )


class _Translator:
    """The translation of one traced graph by the exporter."""

    def __init__(
        self,
        export: Export,
        operator_names: Sequence[str],
        can_call_torch: bool,
        follows_table: bool,
    ) -> None:
        self._training = export.training
        self._can_call_torch = can_call_torch
        self._follows_table = follows_table
        # torch's kernel for CPUs needs no extension.
        self._auto = attached_settings(export.options).torch_operators == "auto"
        self._torch_names = {*operator_names, *_blamed_operators(export.options)}
        self._schemas: dict[str, Any] = {}
        self._empty_positions = [
            input_index
            for input_index, input_value in enumerate(export.inputs)
            if _is_empty(input_value)
        ]
        self._device = export.device.type
        # The latest random values in the graph. The next ones depend on them, so that the order
        # of the draws is that of eager PyTorch.
        self._latest_drawn: Any = None
        # By ONNX operator: the torch operators translated to it, with their source locations.
        # Stored in the options, which outlive the export: `_mark_torch_operators` reads it when a build fails.
        self._origins_by_operator: dict[str, dict[str, str]] = vars(export.options).setdefault(
            "_ortlaunch_makers", {}
        )
        # The same for the lines of a layer's nodes, for `pass_errors`.
        self._lines: dict[tuple[str, str], dict[str, None]] = {}
        vars(export.options)[_LINES_ATTRIBUTE] = self._lines
        self._layers = [name for name, _ in export.module.named_modules()]
        parameters = {name: p.requires_grad for name, p in export.module.named_parameters()}
        buffers = {name for name, _ in export.module.named_buffers()}
        inputs = set(export.info.onnx_graph_input_names_require_grad)
        plain_inputs = set(export.info.onnx_graph_input_names) - inputs - parameters.keys()
        self._gradients = GradientPaths(
            lambda name: parameters.get(name, name not in buffers | plain_inputs),
            export.device.type,
        )

    def record_schemas(
        self, original: AnyFunction, graph: Any, *args: object, **kwargs: object
    ) -> Any:
        """Record each operator's schema, which the exporter's passes over the graph drop."""
        for node in _all_nodes(graph):
            schema = node.schema()
            if "!" in schema and not node.kind().startswith("aten::"):
                # The exporter would leave it out.
                call = operator_calls.OperatorCall(node, (), self._schemas)
                raise self._not_callable_error(call, f"{call.name} changes a tensor in place")
            if schema != "(no schema)" and node.outputsSize():
                self._schemas[next(node.outputs()).debugName()] = schema
        inputs = list(graph.inputs())
        self._sizes = ValueSizes(inputs[position] for position in self._empty_positions)
        return original(graph, *args, **kwargs)

    def translate_node(self, original: AnyFunction, *symbolic_arguments: Any) -> Any:
        """Translate one node; a replacement for the exporter's `_run_symbolic_function`."""
        graph, block, node, inputs, env, env_values, new_nodes = symbolic_arguments[:7]

        def translate_plainly() -> Any:
            return original(*symbolic_arguments)

        name = node.kind()
        context = importlib.import_module(_JIT).GraphContext(
            graph, block, _export_opset(), node, {}, env, env_values, new_nodes
        )
        if operator_calls.is_complex_constant(node):
            return context.op(
                "Constant", value_t=torch.view_as_real(node.t("value").resolve_conj())
            )
        # Others are torch's, and those that packages and models register.
        if name.startswith(("prim::", "onnx::")):
            return translate_plainly()
        if attention.is_shape_keeping_reshape(node):
            return inputs[0]
        call = operator_calls.OperatorCall(node, inputs, self._schemas)
        if name.rstrip("_") in _NEVER_TORCH and not call.has_complex_tensor():
            return translate_plainly()
        if self._can_call_torch and self._follows_table and name.rstrip("_") in DRAWING_OPERATORS:
            with contextlib.suppress(operator_calls.NotCallable):
                self._latest_drawn = call.write(
                    context, self._gradients, draws_numbers=True, earlier_value=self._latest_drawn
                )
                return self._latest_drawn
        stays_torch = name.rstrip("_") in self._torch_names or call.has_complex_tensor()
        if name == attention.OPERATOR_NAME and self._should_stay_fused(
            call.traced_inputs(), inputs, stays_torch
        ):
            if self._device == "cpu":
                return attention.write_fused_attention(context, call.traced_inputs(), inputs)
            # The kernels for GPUs are called with torch's derivative (docs/gpu.md).
            stays_torch = True
        if self._follows_table:
            stays_torch = stays_torch or is_computed_by_torch(
                name.rstrip("_"), call.traced_inputs()
            )
        if self._can_call_torch and stays_torch:
            return self._write_torch_call(call, context, None)
        new_count_before = len(new_nodes)
        if not self._follows_table:
            outputs = translate_plainly()
            self._refuse_silent_difference(call, new_nodes[new_count_before:], outputs)
            return outputs
        try:
            outputs = translate_plainly()
        except Exception as error:
            return self._write_torch_call(call, context, error)
        written_nodes = new_nodes[new_count_before:]
        self._record_lines(node, written_nodes, call.source_line())
        if (
            not all(map(is_valid_onnx, written_nodes))
            or self._blocking_operator(written_nodes, outputs)
            or self._sizes.reads_possibly_empty(node)
        ):
            return self._write_torch_call(call, context, None, outputs)
        return outputs

    def _record_lines(
        self, node: torch.Node, written_nodes: Sequence[torch.Node], line: str
    ) -> None:
        scope = node.scopeName().rpartition("::")[2].removeprefix("_original_module")
        for written_node in written_nodes:
            self._origins_by_operator.setdefault(_onnx_operator(written_node), {})[node.kind()] = (
                line
            )
            if line:
                self._lines.setdefault((scope, written_node.kind().rpartition("::")[2]), {})[
                    line
                ] = None

    def _should_stay_fused(
        self, traced_inputs: Sequence[Any], graph_inputs: Sequence[Any], is_listed: bool
    ) -> bool:
        learns_mask = self._gradients.reaches_trained_input(graph_inputs[3])
        return (is_listed or self._auto) and attention_choice.should_stay_fused(
            traced_inputs, self._device, learns_mask, is_listed
        )

    def _blocking_operator(self, written_nodes: Sequence[Any], outputs: Any) -> str:
        values = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        return (
            self._gradients.first_blocking_operator(written_nodes, values) if self._training else ""
        )

    def _refuse_silent_difference(
        self, call: Any, written_nodes: Sequence[Any], outputs: Any
    ) -> None:
        """Refuse a translation that would be wrong without an error.

        This applies where the settings do not let the operator stay torch's.
        """
        if (
            is_computed_by_torch(call.name.rstrip("_"), call.traced_inputs())
            or self._blocking_operator(written_nodes, outputs) in SILENTLY_WRONG
        ):
            raise RuntimeError(
                f"{call.name} or its gradient is another one in ONNX Runtime than in torch; "
                "it can stay torch's: Settings.torch_operators='auto', or a list with it. "
                f"{extensions.interop_refusal_reason()}".rstrip()
            )

    def _write_torch_call(
        self,
        call: Any,
        context: GraphContext,
        translation_error: Exception | None,
        plain_outputs: Any = None,
    ) -> Any:
        try:
            return call.write(context, self._gradients)
        except operator_calls.NotCallable as reason:
            if plain_outputs is not None:
                # If this value needs a gradient, ORT raises an error of its own later.
                return plain_outputs
            earlier_message = (
                f"{' '.join(str(translation_error).split()) or type(translation_error).__name__}; "
                if translation_error
                else ""
            )
            raise self._not_callable_error(call, reason, earlier_message) from translation_error

    def _not_callable_error(
        self, call: operator_calls.OperatorCall, reason: object, earlier_message: str = ""
    ) -> RuntimeError:
        layer = call.calling_layer(self._layers)
        setting_text = f"Settings.torch_modules{f'=[{layer!r}]' if layer else ''}"
        return RuntimeError(
            f"{earlier_message}torch cannot compute {call.name}{call.source_line()} inside ONNX Runtime's graph: "
            f"{reason}. Write it with other operators, or let the layer run as torch ({setting_text})"
        )


def _is_empty(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not value.numel()


def _onnx_operator(node: torch.Node) -> str:
    """Return a node's operator in ONNX; for an ATen node, torch's operator."""
    name = str(node.kind()).rpartition("::")[2]
    return (
        str(node.s("operator")) if name == "ATen" and "operator" in node.attributeNames() else name
    )


def _all_nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner_block in node.blocks():
            yield from _all_nodes(inner_block)


_MOVED = "torch.onnx._internal.torchscript_exporter.jit_utils"
# compat.py makes this name importable on every torch.
_JIT = "torch.onnx._internal.jit_utils"


def _export_opset() -> int:
    return int(importlib.import_module("torch.onnx._globals").GLOBALS.export_onnx_opset_version)


# ------------------------------------------------------------------- failures after the translation


def _blamed_operators(options: Any) -> set[str]:
    blamed: set[str] = vars(options).setdefault("_ortlaunch_blamed", set())
    return blamed


def _rebuild_keeping_arguments(
    original: AnyFunction, graph_manager: Any, inputs: Any, kwargs: Any
) -> Any:
    # For `_export_again`, if the build that follows fails.
    graph_manager._ortlaunch_given = inputs, kwargs
    was_changed, info = _retry_without_blamed(original, graph_manager, inputs, kwargs)
    # No build follows, so the batch is freed.
    if not was_changed:
        del graph_manager._ortlaunch_given
    return was_changed, info


def _retry_without_blamed(
    original: AnyFunction, graph_manager: Any, inputs: Any, kwargs: Any
) -> Any:
    for _ in range(_MAX_RETRIES):
        try:
            return original(graph_manager, inputs, kwargs)
        except ShapeInferenceError as error:
            options = graph_manager._runtime_options
            if not _mark_torch_operators(options, {error.operator}, str(error)):
                origins = vars(options).get("_ortlaunch_makers", {}).get(error.operator, {})
                lines = ", ".join(
                    f"{name}{line}" for name, line in sorted(origins.items())[:_MAX_LOCATIONS]
                )
                raise RuntimeError(
                    f"{error}, which is exported for {lines or 'the model'}: write it with other "
                    "operators, or let the layer run as torch (Settings.torch_modules)"
                ) from error
            graph_manager._exported_model_info = None
    return original(graph_manager, inputs, kwargs)


def _create_agent_and_free_batch(original: AnyFunction, manager: Manager) -> Any:
    original(manager)
    _keep_lines_and_free_batch(manager, "_create_execution_agent")


def _run_with_readable_errors(original: AnyFunction, agent: Any, *args: Any) -> Any:
    with pass_errors.raise_readable_errors(vars(agent).get(_LINES_ATTRIBUTE, {})):
        return original(agent, *args)


def _retry_build(method_name: str, original: AnyFunction, manager: Manager, *args: Any) -> Any:
    for _ in range(_MAX_RETRIES):
        try:
            original(manager, *args)
            return _keep_lines_and_free_batch(manager, method_name)
        except Exception as error:
            onnx_operators = {
                operator_name
                for pattern in _FAILED_PATTERNS
                for operator_name in re.findall(pattern, str(error))
            }
            can_retry = _disable_failed_optimizer(
                manager, str(error), *args
            ) or _mark_torch_operators(manager._runtime_options, onnx_operators, str(error))
            if not can_retry:
                raise
            _export_again(manager, method_name)
    return original(manager, *args)


def _disable_failed_optimizer(manager: Manager, message: str, *configs: Any) -> bool:
    """Turn ORT's compute optimizer off if it failed at an unknown shape; return whether it did."""
    if "compute_optimizer" not in message or not manager._runtime_options.enable_compute_optimizer:
        return False
    tally.add_note_once(
        "compute_optimizer is off: ONNX Runtime's ends at a shape of this model that is known in a "
        "pass only"
    )
    for options in (manager._runtime_options, *configs):
        options.enable_compute_optimizer = False
    return True


def _keep_lines_and_free_batch(manager: Manager, method_name: str) -> None:
    if method_name == "_create_execution_agent":
        lines = vars(manager._runtime_options).get(_LINES_ATTRIBUTE, {})
        vars(manager._execution_agent)[_LINES_ATTRIBUTE] = dict(lines)
        vars(manager._graph_transition_manager).pop("_ortlaunch_given", None)


def _mark_torch_operators(options: Any, onnx_operators: set[str], message: str) -> set[str]:
    """Mark the torch operators that were translated to the ONNX operators in ORT's error.

    Returns:
        The newly marked operators; the next export keeps them as torch calls.
    """
    if attached_settings(options).torch_operators != "auto" or extensions.interop_refusal_reason():
        return set()
    origins: dict[str, dict[str, str]] = vars(options).get("_ortlaunch_makers", {})
    new_operators = {
        torch_operator for name in onnx_operators for torch_operator in origins.get(name, ())
    } - _blamed_operators(options)
    if new_operators:
        tally.add_note_once(
            f"exported once more with {', '.join(sorted(new_operators))} as torch's: "
            f"{message.splitlines()[-1][:200]}"
        )
    _blamed_operators(options).update(new_operators)
    return new_operators


def _export_again(manager: Manager, method_name: str) -> None:
    graph_manager = manager._graph_transition_manager
    graph_manager._exported_model_info = None
    _, info = graph_manager.get_post_processed_model(*graph_manager._ortlaunch_given)
    manager._initialize_graph_builder(info)
    # The execution agent is created from a built graph, so the new export is built first.
    if method_name != "_build_graph":
        manager._build_graph(manager._get_graph_transformer_config())
