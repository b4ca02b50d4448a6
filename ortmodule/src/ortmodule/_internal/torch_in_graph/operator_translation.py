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

import torch

from ortmodule._internal.base.attached import AgentRecord, GraphManagerRecord, OptionsRecord
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.gradient_paths import (
    SILENTLY_WRONG,
    GradientPaths,
    is_valid_if_transpose_or_layer_norm,
)
from ortmodule._internal.base.graph import ShapeInferenceError
from ortmodule._internal.base.patching import replace_attribute_temporarily
from ortmodule._internal.base.repair_registry import (
    EVALUATION,
    TRAINING,
    TRANSITION,
    replace_ort_function,
)
from ortmodule._internal.native import extensions
from ortmodule._internal.torch_in_graph import (
    attention,
    attention_choice,
    operator_calls,
    pass_errors,
)
from ortmodule._internal.torch_in_graph.operator_table import (
    DRAWING_OPERATORS,
    table_lets_torch_compute_call,
)
from ortmodule._internal.torch_in_graph.value_sizes import ValueDependentSizes

if TYPE_CHECKING:
    from torch.onnx._internal.torchscript_exporter.jit_utils import GraphContext

    from ortmodule._internal.base.ort_types import AnyFunction, Manager

# Never torch calls: `detach` has an exact form, and the others give sizes and Python numbers.
_NEVER_TORCH = {
    "aten::detach",
    "aten::size",
    "aten::ScalarImplicit",
    "aten::Int",
    "aten::IntImplicit",
    "aten::Bool",
}
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


def install_build_retries_and_readable_errors() -> None:
    """Wrap ORT's methods so that a failed gradient build is retried with torch's operator."""
    for method_name in ("_build_graph", "_create_execution_agent"):
        # ORT's own wrapper around the method has another name.
        replace_ort_function(
            f"{TRAINING}.{method_name}",
            functools.partial(_build_and_retry_with_blamed_operators_as_torch, method_name),
        )
    replace_ort_function(f"{EVALUATION}._create_execution_agent", _create_agent_and_free_batch)
    replace_ort_function(
        f"{TRANSITION}.get_post_processed_model", _post_process_and_keep_batch_if_graph_changed
    )
    for method in (
        "TrainingAgent.run_forward",
        "TrainingAgent.run_backward",
        "InferenceAgent.run_forward",
    ):
        replace_ort_function(f"_execution_agent:{method}", _run_agent_with_readable_errors)


@contextlib.contextmanager
def keep_torch_operators_while_exporting(export_context: ExportContext) -> Iterator[None]:
    """Keep operators as torch calls in exports, as the settings require."""
    requested_operators = export_context.settings.torch_operators
    can_call_torch = (
        requested_operators != "off" and not extensions.reason_interop_is_unbuildable_or_empty()
    )
    listed_names = requested_operators if can_call_torch and requested_operators != "auto" else ()
    operator_names = tuple(name if "::" in name else f"aten::{name}" for name in listed_names)
    translator = _TracedGraphTranslator(
        export_context,
        operator_names,
        can_call_torch,
        can_call_torch and requested_operators == "auto",
    )
    exporter = _torch_exporter_utils_module()
    with contextlib.ExitStack() as patches:
        for name, wrapper in (
            ("_run_symbolic_function", translator.translate_node_or_write_torch_call),
            ("_optimize_graph", translator.record_schemas_and_sizes_then_optimize_graph),
        ):
            patches.enter_context(
                replace_attribute_temporarily(
                    exporter, name, functools.partial(wrapper, getattr(exporter, name))
                )
            )
        yield


def _torch_exporter_utils_module() -> Any:
    moved_package = "torch.onnx._internal.torchscript_exporter"
    return importlib.import_module(
        f"{moved_package}.utils" if importlib.util.find_spec(moved_package) else "torch.onnx.utils"
    )


class _TracedGraphTranslator:
    """The translation of one traced graph by the exporter."""

    def __init__(
        self,
        export_context: ExportContext,
        listed_operator_names: Sequence[str],
        can_call_torch: bool,
        follows_operator_table: bool,
    ) -> None:
        self._training = export_context.training
        self._can_call_torch = can_call_torch
        self._follows_table = follows_operator_table
        # torch's kernel for CPUs needs no extension.
        self._auto = export_context.settings.torch_operators == "auto"
        options_record = OptionsRecord.attached_to(export_context.options)
        self._torch_names = {*listed_operator_names, *options_record.blamed_operators}
        self._schemas: dict[str, Any] = {}
        self._empty_positions = [
            input_index
            for input_index, input_value in enumerate(export_context.inputs)
            if _is_empty_tensor(input_value)
        ]
        self._device = export_context.device.type
        # The latest random values in the graph. The next ones depend on them, so that the order
        # of the draws is that of eager PyTorch.
        self._latest_drawn: Any = None
        # Kept with the options, which outlive the export: `_mark_and_note_new_operators_for_torch`
        # reads the operators when a build fails, and `pass_errors` the lines when a pass does.
        self._origins_by_operator = options_record.lines_by_torch_by_onnx_operator
        self._lines = options_record.lines_by_node = {}
        self._layers = [name for name, _ in export_context.module.named_modules()]
        parameters = {name: p.requires_grad for name, p in export_context.module.named_parameters()}
        buffers = {name for name, _ in export_context.module.named_buffers()}
        inputs = set(export_context.info.onnx_graph_input_names_require_grad)
        plain_inputs = set(export_context.info.onnx_graph_input_names) - inputs - parameters.keys()
        self._gradients = GradientPaths(
            lambda name: parameters.get(name, name not in buffers | plain_inputs),
            export_context.device.type,
        )

    def record_schemas_and_sizes_then_optimize_graph(
        self, original_optimize: AnyFunction, traced_graph: Any, *args: object, **kwargs: object
    ) -> Any:
        """Record each operator's schema, which the exporter's passes over the graph drop."""
        for node in _nodes_with_inner_blocks(traced_graph):
            schema = node.schema()
            if "!" in schema and not node.kind().startswith("aten::"):
                # The exporter would leave it out.
                call = operator_calls.TorchOperatorCall(node, (), self._schemas)
                raise self._create_not_callable_error(
                    call, f"{call.name} changes a tensor in place"
                )
            if schema != "(no schema)" and node.outputsSize():
                self._schemas[next(node.outputs()).debugName()] = schema
        inputs = list(traced_graph.inputs())
        self._sizes = ValueDependentSizes(inputs[position] for position in self._empty_positions)
        return original_optimize(traced_graph, *args, **kwargs)

    def translate_node_or_write_torch_call(
        self, original_translate: AnyFunction, *symbolic_arguments: Any
    ) -> Any:
        """Translate one node; a replacement for the exporter's `_run_symbolic_function`."""
        graph, block, node, inputs, env, env_values, new_nodes = symbolic_arguments[:7]

        def translate_plainly() -> Any:
            return original_translate(*symbolic_arguments)

        name = node.kind()
        context = importlib.import_module(_JIT).GraphContext(
            graph, block, _export_opset(), node, {}, env, env_values, new_nodes
        )
        if operator_calls.is_complex_constant_node(node):
            return context.op(
                "Constant", value_t=torch.view_as_real(node.t("value").resolve_conj())
            )
        # Others are torch's, and those that packages and models register.
        if name.startswith(("prim::", "onnx::")):
            return translate_plainly()
        if attention.is_reshape_of_attention_to_same_shape(node):
            return inputs[0]
        call = operator_calls.TorchOperatorCall(node, inputs, self._schemas)
        if name.rstrip("_") in _NEVER_TORCH and not call.has_complex_input_or_output():
            return translate_plainly()
        if self._can_call_torch and self._follows_table and name.rstrip("_") in DRAWING_OPERATORS:
            with contextlib.suppress(operator_calls.OperatorNotCallable):
                self._latest_drawn = call.write(
                    context,
                    self._gradients,
                    draws_random_numbers=True,
                    earlier_graph_value=self._latest_drawn,
                )
                return self._latest_drawn
        stays_torch = name.rstrip("_") in self._torch_names or call.has_complex_input_or_output()
        if name == attention.OPERATOR_NAME and self._attention_stays_fused_or_note_why_not(
            call.traced_input_values(), inputs, stays_torch
        ):
            if self._device == "cpu":
                return attention.write_fused_cpu_attention_call(
                    context, call.traced_input_values(), inputs
                )
            # The kernels for GPUs are called with torch's derivative (docs/evidence/gpu.md).
            stays_torch = True
        if self._follows_table:
            stays_torch = stays_torch or table_lets_torch_compute_call(
                name.rstrip("_"), call.traced_input_values()
            )
        if self._can_call_torch and stays_torch:
            return self._write_torch_call_or_keep_plain_outputs_or_refuse(call, context, None)
        new_count_before = len(new_nodes)
        if not self._follows_table:
            outputs = translate_plainly()
            self._refuse_silently_wrong_translation(call, new_nodes[new_count_before:], outputs)
            return outputs
        try:
            outputs = translate_plainly()
        except Exception as error:
            return self._write_torch_call_or_keep_plain_outputs_or_refuse(call, context, error)
        written_nodes = new_nodes[new_count_before:]
        self._record_origin_and_line_of_written_nodes(
            node, written_nodes, call.user_source_location_text_or_empty()
        )
        if (
            not all(map(is_valid_if_transpose_or_layer_norm, written_nodes))
            or self._name_of_blocking_operator_if_training_or_empty(written_nodes, outputs)
            or self._sizes.node_reads_possibly_empty_tensor(node)
        ):
            return self._write_torch_call_or_keep_plain_outputs_or_refuse(
                call, context, None, outputs
            )
        return outputs

    def _record_origin_and_line_of_written_nodes(
        self, traced_node: torch.Node, written_nodes: Sequence[torch.Node], source_line_text: str
    ) -> None:
        scope = traced_node.scopeName().rpartition("::")[2].removeprefix("_original_module")
        for written_node in written_nodes:
            self._origins_by_operator.setdefault(_onnx_or_aten_operator_name(written_node), {})[
                traced_node.kind()
            ] = source_line_text
            if source_line_text:
                self._lines.setdefault((scope, written_node.kind().rpartition("::")[2]), {})[
                    source_line_text
                ] = None

    def _attention_stays_fused_or_note_why_not(
        self, traced_inputs: Sequence[Any], graph_inputs: Sequence[Any], is_operator_listed: bool
    ) -> bool:
        learns_mask = self._gradients.depends_on_trained_input(graph_inputs[3])
        return (
            is_operator_listed or self._auto
        ) and attention_choice.stays_fused_if_listed_or_large_and_note_why_not(
            traced_inputs, self._device, learns_mask, is_operator_listed
        )

    def _name_of_blocking_operator_if_training_or_empty(
        self, written_nodes: Sequence[Any], output_values: Any
    ) -> str:
        values = output_values if isinstance(output_values, (tuple, list)) else [output_values]
        return (
            self._gradients.name_of_operator_blocking_gradient_or_empty(written_nodes, values)
            if self._training
            else ""
        )

    def _refuse_silently_wrong_translation(
        self, operator_call: Any, written_nodes: Sequence[Any], output_values: Any
    ) -> None:
        """Refuse a translation that would be wrong without an error.

        This applies where the settings do not let the operator stay torch's.
        """
        if (
            table_lets_torch_compute_call(
                operator_call.name.rstrip("_"), operator_call.traced_input_values()
            )
            or self._name_of_blocking_operator_if_training_or_empty(written_nodes, output_values)
            in SILENTLY_WRONG
        ):
            raise RuntimeError(
                f"{operator_call.name} or its gradient is another one in ONNX Runtime than in torch; "
                "it can stay torch's: torch_operators='auto', or a list with it. "
                f"{extensions.reason_interop_is_unbuildable_or_empty()}".rstrip()
            )

    def _write_torch_call_or_keep_plain_outputs_or_refuse(
        self,
        operator_call: Any,
        graph_context: GraphContext,
        translation_error: Exception | None,
        plain_outputs: Any = None,
    ) -> Any:
        try:
            return operator_call.write(graph_context, self._gradients)
        except operator_calls.OperatorNotCallable as reason:
            if plain_outputs is not None:
                # If this value needs a gradient, ORT raises an error of its own later.
                return plain_outputs
            earlier_message = (
                f"{' '.join(str(translation_error).split()) or type(translation_error).__name__}; "
                if translation_error
                else ""
            )
            raise self._create_not_callable_error(
                operator_call, reason, earlier_message
            ) from translation_error

    def _create_not_callable_error(
        self,
        operator_call: operator_calls.TorchOperatorCall,
        refusal_reason: object,
        earlier_message: str = "",
    ) -> RuntimeError:
        layer = operator_call.calling_layer_pattern_or_empty(self._layers)
        setting_text = f"setting torch_modules{f'=[{layer!r}]' if layer else ''}"
        return RuntimeError(
            f"{earlier_message}torch cannot compute "
            f"{operator_call.name}{operator_call.user_source_location_text_or_empty()} inside ONNX Runtime's graph: "
            f"{refusal_reason}. Write it with other operators, or let the layer run as torch ({setting_text})"
        )


def _is_empty_tensor(export_input: object) -> bool:
    return isinstance(export_input, torch.Tensor) and not export_input.numel()


def _onnx_or_aten_operator_name(graph_node: torch.Node) -> str:
    """Return a node's operator in ONNX; for an ATen node, torch's operator."""
    name = str(graph_node.kind()).rpartition("::")[2]
    return (
        str(graph_node.s("operator"))
        if name == "ATen" and "operator" in graph_node.attributeNames()
        else name
    )


def _nodes_with_inner_blocks(graph_or_block: Any) -> Iterator[Any]:
    for node in graph_or_block.nodes():
        yield node
        for inner_block in node.blocks():
            yield from _nodes_with_inner_blocks(inner_block)


# moved_modules.py makes this name importable on every torch.
_JIT = "torch.onnx._internal.jit_utils"


def _export_opset() -> int:
    return int(importlib.import_module("torch.onnx._globals").GLOBALS.export_onnx_opset_version)


# ------------------------------------------------------------------- failures after the translation


def _post_process_and_keep_batch_if_graph_changed(
    original_get_model: AnyFunction, graph_manager: Any, batch_args: Any, batch_kwargs: Any
) -> Any:
    # For `_export_again_and_rebuild_up_to_method`, if the build that follows fails.
    record = GraphManagerRecord.attached_to(graph_manager)
    record.batch = batch_args, batch_kwargs
    was_changed, info = _export_and_retry_with_blamed_operators_as_torch(
        original_get_model, graph_manager, batch_args, batch_kwargs
    )
    # No build follows, so the batch is freed.
    if not was_changed:
        record.batch = None
    return was_changed, info


def _export_and_retry_with_blamed_operators_as_torch(
    original_get_model: AnyFunction, graph_manager: Any, batch_args: Any, batch_kwargs: Any
) -> Any:
    for _ in range(_MAX_RETRIES):
        try:
            return original_get_model(graph_manager, batch_args, batch_kwargs)
        except ShapeInferenceError as error:
            options = graph_manager._runtime_options
            if not _mark_and_note_new_operators_for_torch(options, {error.operator}, str(error)):
                origins = OptionsRecord.attached_to(options).lines_by_torch_by_onnx_operator.get(
                    error.operator, {}
                )
                lines = ", ".join(
                    f"{name}{line}" for name, line in sorted(origins.items())[:_MAX_LOCATIONS]
                )
                raise RuntimeError(
                    f"{error}, which is exported for {lines or 'the model'}: write it with other "
                    "operators, or let the layer run as torch (setting torch_modules)"
                ) from error
            graph_manager._exported_model_info = None
    return original_get_model(graph_manager, batch_args, batch_kwargs)


def _create_agent_and_free_batch(original_create_agent: AnyFunction, manager: Manager) -> Any:
    original_create_agent(manager)
    _keep_lines_and_free_batch_of_new_agent(manager, "_create_execution_agent")


def _run_agent_with_readable_errors(
    original_run: AnyFunction, execution_agent: Any, *run_arguments: Any
) -> Any:
    with pass_errors.raise_torch_or_readable_pass_error(
        AgentRecord.attached_to(execution_agent).lines_by_node
    ):
        return original_run(execution_agent, *run_arguments)


def _build_and_retry_with_blamed_operators_as_torch(
    build_method_name: str, original_build: AnyFunction, manager: Manager, *build_arguments: Any
) -> Any:
    for _ in range(_MAX_RETRIES):
        try:
            original_build(manager, *build_arguments)
            return _keep_lines_and_free_batch_of_new_agent(manager, build_method_name)
        except Exception as error:
            onnx_operators = {
                operator_name
                for pattern in _FAILED_PATTERNS
                for operator_name in re.findall(pattern, str(error))
            }
            can_retry = _disable_compute_optimizer_if_it_failed(
                manager, str(error), *build_arguments
            ) or _mark_and_note_new_operators_for_torch(
                manager._runtime_options, onnx_operators, str(error)
            )
            if not can_retry:
                raise
            _export_again_and_rebuild_up_to_method(manager, build_method_name)
    return original_build(manager, *build_arguments)


def _disable_compute_optimizer_if_it_failed(
    manager: Manager, error_text: str, *transformer_configs: Any
) -> bool:
    """Turn ORT's compute optimizer off if it failed at an unknown shape; return whether it did."""
    if (
        "compute_optimizer" not in error_text
        or not manager._runtime_options.enable_compute_optimizer
    ):
        return False
    tally.add_end_note_once(
        "compute_optimizer is off: ONNX Runtime's ends at a shape of this model that is known in a "
        "pass only"
    )
    for options in (manager._runtime_options, *transformer_configs):
        options.enable_compute_optimizer = False
    return True


def _keep_lines_and_free_batch_of_new_agent(manager: Manager, finished_method_name: str) -> None:
    if finished_method_name == "_create_execution_agent":
        lines = OptionsRecord.attached_to(manager._runtime_options).lines_by_node
        AgentRecord.attached_to(manager._execution_agent).lines_by_node = dict(lines)
        GraphManagerRecord.attached_to(manager._graph_transition_manager).batch = None


def _mark_and_note_new_operators_for_torch(
    runtime_options: Any, onnx_operators: set[str], error_text: str
) -> set[str]:
    """Mark the torch operators that were translated to the ONNX operators in ORT's error.

    Returns:
        The newly marked operators; the next export keeps them as torch calls.
    """
    record = OptionsRecord.attached_to(runtime_options)
    if (
        record.settings.torch_operators != "auto"
        or extensions.reason_interop_is_unbuildable_or_empty()
    ):
        return set()
    new_operators = {
        torch_operator
        for name in onnx_operators
        for torch_operator in record.lines_by_torch_by_onnx_operator.get(name, ())
    } - record.blamed_operators
    if new_operators:
        tally.add_end_note_once(
            f"exported once more with {', '.join(sorted(new_operators))} as torch's: "
            f"{error_text.splitlines()[-1][:200]}"
        )
    record.blamed_operators |= new_operators
    return new_operators


def _export_again_and_rebuild_up_to_method(manager: Manager, interrupted_method_name: str) -> None:
    graph_manager = manager._graph_transition_manager
    graph_manager._exported_model_info = None
    batch = GraphManagerRecord.attached_to(graph_manager).batch
    assert batch, "the batch is kept until the session exists"
    _, info = graph_manager.get_post_processed_model(*batch)
    manager._initialize_graph_builder(info)
    # The execution agent is created from a built graph, so the new export is built first.
    if interrupted_method_name != "_build_graph":
        manager._build_graph(manager._get_graph_transformer_config())
