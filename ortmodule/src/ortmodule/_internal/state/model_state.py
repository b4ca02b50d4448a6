"""Follow the state of a model that an exported graph fixes, beside its weights.

Such state are modes, Python values, hooks and parts. A trace records the Python state that a
forward pass reads (python_state.py). Before each later pass that state is compared, and after a
change the graph is built again. A graph cannot follow hooks of a backward pass, numbers that Python
or NumPy draws, and a forward pass that continues from a value that an earlier one left in an
attribute: these are refused.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn

from ortmodule._internal.base.export import ExportContext, path_in_model
from ortmodule._internal.base.patching import replace_attribute_temporarily
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, repair
from ortmodule._internal.state.buffers import restore_buffers_after_block_and_count_changes
from ortmodule._internal.torch_in_graph import torch_modules
from ortmodule._internal.tracing.python_state import (
    ENVIRONMENT,
    GLOBAL,
    MISSING_VALUE,
    AttributeWriter,
    RecordedStateReads,
    StateValueSnapshots,
    are_snapshots_equal,
    random_generator_state_text,
    record_python_values_that_passes_read,
)

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction
    from ortmodule._internal.base.trace_facts import TraceFacts

# Attributes of nn.Module whose change means another graph.
_PART_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


# ---------------------------------------------------------------------------------------------- in the export


@repair(
    "follow_model_state",
    "context",
    60,
    fault="Values of the model that change between steps (`model.scale = 3`, "
    "`self.config.scale`, a replaced buffer, a hook added later) stay those of the export: a "
    "loss of 0.3233 instead of 2.9095.",
    example="state/test_model_state.py::test_a_changed_model_is_exported_again[number]",
    sources=EXPORT_SOURCES,
)
@contextlib.contextmanager
def record_read_state_and_refuse_untraceable(export_context: ExportContext) -> Iterator[None]:
    """Record the Python state that the passes read, and refuse state that a graph cannot follow."""
    module = export_context.module
    if export_context.training:
        _refuse_backward_hooks_outside_torch_layers(
            module, torch_modules.paths_of_outermost_torch_layers_or_refuse(export_context)
        )
    with (
        record_python_values_that_passes_read(module) as reads,
        _refuse_torch_seeding_and_python_or_numpy_draws(),
    ):
        yield
        _run_pass_again_and_refuse_changing_read_state(module, reads, export_context.inputs)
    export_context.facts.state_paths = sorted(reads.value_by_path)
    export_context.facts.code_names = reads.code_names


def _run_pass_again_and_refuse_changing_read_state(
    traced_model: nn.Module, state_reads: RecordedStateReads, example_inputs: Any
) -> None:
    """Refuse a pass that continues from a value that an earlier pass left.

    Such a value is read, then changed, and changed again by a second pass.
    """
    values_after = StateValueSnapshots(traced_model, state_reads.value_by_path)
    changed_paths = {
        state_path
        for state_path, value in values_after.snapshots.items()
        if not (
            value is MISSING_VALUE
            or are_snapshots_equal(state_reads.value_by_path[state_path], value)
        )
    }
    if not changed_paths:
        return
    # One more pass: a value that it does not change again was only initialized by the first.
    with torch.no_grad(), restore_buffers_after_block_and_count_changes(traced_model):
        traced_model(*(tensor.clone() for tensor in example_inputs))
    for state_path in values_after.state_paths_with_changed_value():
        if state_path in changed_paths:
            writer = state_reads.writer_by_layer.get(state_path[0], AttributeWriter())
            layer = path_in_model(writer.layer_path)
            torch_remedy = f", or let {layer} run as torch (torch_modules={[layer]})"
            raise RuntimeError(
                f"a forward pass reads and changes {_python_state_name_for_messages(*state_path)}"
                f"{writer.line_text}, and ONNX Runtime's graph would hold its first value; give such a "
                f"value to the forward pass as an argument{torch_remedy if layer else ''}"
            )


def _refuse_backward_hooks_outside_torch_layers(
    traced_model: nn.Module, torch_layer_paths: list[str]
) -> None:
    """Raise RuntimeError if a layer in the graph has a backward hook."""
    for path, layer in traced_model.named_modules():
        if not torch_modules.is_inside_layers(path, torch_layer_paths) and any(
            getattr(layer, hooks, None) for hooks in _BACKWARD_HOOKS
        ):
            raise RuntimeError(
                f"{path_in_model(path) or 'the model'} has a backward hook, which ONNX Runtime's graph "
                "would never call; hooks of parameters are called, and those of layers in "
                "setting torch_modules"
            )


@contextlib.contextmanager
def _refuse_torch_seeding_and_python_or_numpy_draws() -> Iterator[None]:
    """Refuse a pass that seeds torch, or draws numbers with Python or NumPy.

    These would be the same in every step.
    """
    state_functions: dict[str, Any] = {
        "random": random.getstate,
        "numpy.random": numpy.random.get_state,
    }
    generator_by_name = {name: state.__self__ for name, state in state_functions.items()}
    # A draw changes the generator's state.
    state_before = {
        name: random_generator_state_text(generator)
        for name, generator in generator_by_name.items()
    }
    with replace_attribute_temporarily(
        torch,
        "manual_seed",
        functools.partial(_set_torch_seed_or_refuse_in_trace, torch.manual_seed),
    ):
        yield
    if drawn_names := [
        name
        for name, generator in generator_by_name.items()
        if random_generator_state_text(generator) != state_before[name]
    ]:
        raise RuntimeError(
            f"a forward pass draws numbers with Python's {drawn_names[0]}, which would be the same in "
            "every step of ONNX Runtime's graph; draw them with torch, give them to the forward "
            "pass as arguments, or let the layer run as torch "
            "(torch_modules=['PATH OF THE LAYER'])"
        )


def _set_torch_seed_or_refuse_in_trace(
    original_manual_seed: AnyFunction, seed_number: int
) -> torch.Generator:
    if torch.jit.is_tracing():
        raise RuntimeError(
            f"a forward pass seeds torch's random numbers with {seed_number}, and ONNX Runtime's graph "
            "would never: seed them before it, give the numbers to the forward pass as arguments, "
            "or let the layer run as torch (torch_modules=['PATH OF THE LAYER'])"
        )
    generator: torch.Generator = original_manual_seed(seed_number)
    return generator


def _python_state_name_for_messages(layer_path_or_global_holder: str, value_name: str) -> str:
    """Return a place of Python state as a name for messages."""
    if layer_path_or_global_holder.startswith(GLOBAL):
        return f"{layer_path_or_global_holder.removeprefix(GLOBAL)}.{value_name}"
    return (
        f"{ENVIRONMENT} {value_name}"
        if layer_path_or_global_holder == ENVIRONMENT
        else f"the model's {path_in_model(f'{layer_path_or_global_holder}.{value_name}')}"
    )


# ------------------------------------------------------------------------------------------------ in each pass


class GraphModelState:
    """The state of a model at the time when its graph was made."""

    def __init__(self, traced_model: nn.Module, trace_facts: TraceFacts) -> None:
        self._values = StateValueSnapshots(
            traced_model, trace_facts.state_paths, trace_facts.code_names
        )
        groups = [
            getattr(layer, part) for layer in traced_model.modules() for part in _PART_ATTRIBUTES
        ]
        # Most groups are empty, and to check that they still are is fast.
        self._empty_groups = [group for group in groups if not group]
        # The objects are kept, because the id of a freed object may be used again.
        self._parts = [
            (group, tuple(map(id, group.values())), tuple(group.values()))
            for group in groups
            if group
        ]

    def has_replaced_weight_layer_or_hook(self) -> bool:
        """Return whether a weight, buffer, layer or hook is another object than before."""
        return any(self._empty_groups) or any(
            tuple(map(id, group.values())) != ids for group, ids, _ in self._parts
        )

    def first_changed_value_name_or_empty(self) -> str:
        """Return the name of a value that a pass reads and that has changed, or an empty string."""
        return next(
            (
                _python_state_name_for_messages(*state_path)
                for state_path in self._values.state_paths_with_changed_value()
            ),
            "",
        )
