"""Tensor values that a forward pass reads in Python; a graph keeps those of the first batch.

`if x.sum() > 0`, `.item()` and `.tolist()` of values are refused, unless
`Settings.allow_traced_values` is true. Checks (`assert`, or an `if` that only raises) add a note.
After `len(x)` or `int(x.shape[0])`, a batch of other sizes causes another export. After
`self.scale.item()` of a buffer, a change of the model's buffers does. Numbers among the arguments
belong to the export itself, and their change is detected elsewhere.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakTensorKeyDictionary

from ortmodule._internal.base.attached import GraphManagerRecord
from ortmodule._internal.base.counters import tally
from ortmodule._internal.base.export import ExportContext
from ortmodule._internal.base.repair_registry import EXPORT_SOURCES, repair
from ortmodule._internal.base.torch_calls import (
    pause_tracing_and_torch_function,
    tensor_property_getter,
)
from ortmodule._internal.torch_in_graph import attention, torch_modules
from ortmodule._internal.tracing import aliases, grad_mode, observer, python_state, row_counts
from ortmodule._internal.tracing.grad_mode import (
    inplace_change_counts,
    tensors_changed_in_place_since,
    tensors_inside_nested_values,
)
from ortmodule._internal.tracing.value_dependent_sizes import ValueDependentDims

if TYPE_CHECKING:
    from types import FrameType

    from ortmodule._internal.base.ort_types import (
        AnyFunction,
        Args,
        GraphTransitionManager,
        Kwargs,
        Manager,
    )
    from ortmodule._internal.base.trace_facts import PythonReads, TraceFacts

_T = torch.Tensor
_SIZES = {_T.size, _T.numel, _T.nelement, torch.numel, tensor_property_getter("shape"), _T.__len__}
# Functions that return values of a tensor to Python.
_VALUE_READERS = {_T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.__complex__, _T.item, _T.tolist, _T.numpy,
          _T.__array__, _T.is_nonzero, torch.is_nonzero, torch.equal, _T.equal, torch.allclose,
          _T.allclose}  # fmt: skip
_TORCH = str(Path(torch.__file__).parent)
_LIBRARY_FOLDERS = (
    f"{_TORCH}/",
    str(Path(__file__).parents[1]),
    f"{Path(_TORCH).parent}/onnxruntime/",
)
# torch's function that compares a mask with the causal one.
_MASK_CHECK = "_detect_is_causal_mask"
# Files of this package whose frames are between a call of torch and the model.
_FILES_BETWEEN = (
    grad_mode.__file__,
    aliases.__file__,
    attention.__file__,
    observer.__file__,
    str(Path(__file__).with_name("weight_changes.py")),
)
# Reads by this package itself, by the exporter, and torch's checks of a distribution's parameters.
_UNREPORTED_FILES = (
    str(Path(__file__).parents[1]),
    f"{_TORCH}/distributions",
    f"{_TORCH}/onnx",
    f"{_TORCH}/jit",
    "onnxruntime",
)


# ------------------------------------------------------------------------------------------------ in the export


@repair(
    "detect_traced_values",
    "context",
    10,
    fault="Sizes and values that Python reads (`math.sqrt(x.shape[0])`, `if x.sum() > 0`, "
    "`.item()`) stay those of the first batch for ever.",
    example="state/test_python_values.py::test_another_size_is_exported_again_where_python_has_it",
    sources=EXPORT_SOURCES,
)
@contextlib.contextmanager
def record_lines_reading_values_and_sizes_in_python(
    export_context: ExportContext,
) -> Iterator[None]:
    """Record where the model reads values and sizes in Python.

    A trace makes those of the first batch constant.
    """
    are_numbers = [
        name in export_context.info.onnx_graph_input_const_as_tensor
        for name in export_context.info.onnx_graph_input_names
    ]
    tracker = _ValueReadTracker(
        export_context.module,
        are_numbers,
        torch_modules.paths_of_outermost_torch_layers_or_refuse(export_context),
        export_context.facts,
    )
    with (
        export_context.module.register_forward_pre_hook(tracker.classify_buffers_and_number_inputs),
        observer.handle_calls_of_trace(
            observer.HandlerOrder.PYTHON_VALUES, tracker.call_and_record_values
        ),
    ):
        yield


# Kinds of tensors, in this order: a result has the largest kind of its arguments.
# _SOME: whether a selection has an element, which the first batch's has.
_CONSTANT, _BUFFER, _ONE, _SIZE, _SOME, _SELECTED, _VALUE = range(7)
_COMPARED = {
    _T.__gt__,
    _T.__lt__,
    _T.__ge__,
    _T.__le__,
    _T.__eq__,
    _T.__ne__,
    _T.gt,
    _T.lt,
    _T.ge,
    _T.le,
    _T.eq,
    _T.ne,
}
# Functions that draw random numbers: their results are values, also if the arguments are sizes.
_DRAWING_NAMES = (
    "rand",
    "normal_",
    "bernoulli",
    "multinomial",
    "uniform_",
    "exponential_",
    "dropout",
)


class _ValueReadTracker:
    """A record of torch's calls, and of the tensors that depend on sizes or constants only.

    numbers: which arguments of `module` are tensors in place of Python numbers, because ORT made
        them so.
    whole: paths of its layers that run as torch.
    """

    def __init__(
        self,
        traced_model: torch.nn.Module,
        are_inputs_python_numbers: list[bool],
        torch_layer_paths: list[str],
        trace_facts: TraceFacts,
    ) -> None:
        self._facts = trace_facts
        # Tensors without an entry are values.
        self._kind_by_tensor = WeakTensorKeyDictionary()
        self._selections = ValueDependentDims()
        # The sizes of selections themselves, and nothing computed from them.
        self._selection_sizes = WeakTensorKeyDictionary()
        self._are_numbers = are_inputs_python_numbers
        # Only methods of a layer that runs as torch are recorded here, not its call.
        layers = [
            (path, layer)
            for path, layer in traced_model.named_modules()
            if not torch_modules.is_inside_layers(path, torch_layer_paths)
        ]
        self._path_by_layer_id = {id(layer): path.partition(".")[2] for path, layer in layers}

    def classify_buffers_and_number_inputs(
        self, traced_model: torch.nn.Module, model_inputs: Sequence[torch.Tensor]
    ) -> None:
        """Set the kinds of the model's buffers and inputs; a hook before its pass."""
        self._kind_by_tensor.update(dict.fromkeys(traced_model.buffers(), _BUFFER))
        self._kind_by_tensor.update(
            {
                tensor: _CONSTANT
                for tensor, is_number in zip(model_inputs, self._are_numbers)
                if is_number
            }
        )

    def call_and_record_values(self, func: AnyFunction, args: Args, kwargs: Kwargs) -> object:
        """Run a call, and record the kinds of its results and what it reads in Python."""
        # ORT also runs the model without tracing, to learn its outputs.
        if not torch.jit.is_tracing():
            return func(*args, **kwargs)
        input_tensors = tensors_inside_nested_values((args, kwargs))
        tensor_kind = max(
            (self._kind_by_tensor.get(tensor, _VALUE) for tensor in input_tensors),
            default=_CONSTANT,
        )
        versions = inplace_change_counts(input_tensors)
        result = func(*args, **kwargs)
        selected_sizes = (
            self._selections.value_dependent_sizes_read_by_call(func, args, result)
            if func in _SIZES
            else []
        )
        if func in _SIZES:
            tensor_kind = min(
                tensor_kind, _SELECTED if selected_sizes and func is _T.__len__ else _SIZE
            )
        elif tensor_kind == _SIZE and func in _COMPARED and _is_single_zero_or_one(*args[1:]):
            tensor_kind = _ONE
        elif (
            func in _COMPARED
            and args[0] in self._selection_sizes
            and _is_single_zero_or_one(*args[1:])
        ):
            # The losses of some models ask for a batch of which every label is ignored.
            with pause_tracing_and_torch_function():
                tensor_kind = _SOME if args[1] == 0 and int(args[0]) > 0 else tensor_kind
        elif func is torch.normal or getattr(func, "__name__", "").startswith(_DRAWING_NAMES):
            tensor_kind = _VALUE
        if (func in _VALUE_READERS or func is _T.__len__) and tensor_kind != _CONSTANT:
            locations = self._facts.python_reads
            decision_lines = locations.decisions
            reads_later_sizes = tensor_kind == _SIZE and row_counts.is_independent_of_row_count(
                args[0]
            )
            self._record_line_and_layer_that_read_value_or_size(
                (
                    locations.buffers,
                    locations.ones,
                    locations.later_sizes if reads_later_sizes else locations.sizes,
                    locations.checks,
                    decision_lines,
                    decision_lines,
                )[tensor_kind - 1],
                is_size_read=_ONE <= tensor_kind <= _SELECTED,
            )
        changed_tensors = tensors_changed_in_place_since(input_tensors, versions)
        for tensor in (
            *changed_tensors,
            *tensors_inside_nested_values(
                list(result) if isinstance(result, torch.Size) else result
            ),
        ):
            self._kind_by_tensor[tensor] = tensor_kind
        for tensor in tensors_inside_nested_values(selected_sizes):
            self._kind_by_tensor[tensor] = _SELECTED
            self._selection_sizes[tensor] = None
        self._selections.record_value_dependent_dims_of_results(func, args, input_tensors, result)
        if tensor_kind == _VALUE:
            frame = innermost_frame_of_user_code()
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self._facts.line_by_value.update(
                (tensor, line)
                for tensor in tensors_inside_nested_values(result)
                if not any(tensor is input_tensor for input_tensor in input_tensors)
            )
        return result

    def _record_line_and_layer_that_read_value_or_size(
        self, location_set: set[str], is_size_read: bool
    ) -> None:
        frame = sys._getframe(2)
        while frame.f_back and frame.f_code.co_filename in _FILES_BETWEEN:
            frame = frame.f_back
        if any(part in frame.f_code.co_filename for part in _UNREPORTED_FILES):
            return
        asking_file = frame.f_code.co_filename
        # torch checks the sizes of arguments, as nn.GRU does.
        if (
            is_size_read
            and asking_file.startswith(_TORCH)
            and _is_assertion_or_raising_condition(asking_file, frame.f_lineno)
        ):
            return
        is_mask_check = False
        while frame.f_back and frame.f_code.co_filename.startswith((_TORCH, *_FILES_BETWEEN)):
            is_mask_check = is_mask_check or frame.f_code.co_name == _MASK_CHECK
            frame = frame.f_back
        file = frame.f_code.co_filename
        line = frame.f_lineno
        reads = self._facts.python_reads
        if location_set is reads.decisions and _is_assertion_or_raising_condition(file, line):
            location_set = reads.checks
        location_set.add(f"{file}:{line}")
        if location_set is reads.decisions:
            reads.layer_paths.update(
                path_of_running_layer_in_list_or_empty(frame, self._path_by_layer_id)
            )
        if is_mask_check:
            reads.masks.add(f"{file}:{line}")


def innermost_frame_of_user_code() -> FrameType:
    """Return the innermost running frame of code that is neither torch's nor this package's."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_LIBRARY_FOLDERS):
        frame = frame.f_back
    return frame


def path_of_running_layer_in_list_or_empty(
    innermost_frame: FrameType | None, path_by_layer_id: dict[int, str]
) -> list[str]:
    """Return the path of the layer whose code a frame runs, as a list; empty for the model itself."""
    while innermost_frame:
        path = path_by_layer_id.get(
            id(python_state.first_argument_of_running_function(innermost_frame))
        )
        if path is not None:
            return [path] if path else []
        innermost_frame = innermost_frame.f_back
    return []


def _is_single_zero_or_one(*values: object) -> bool:
    return len(values) == 1 and isinstance(values[0], int) and values[0] in (0, 1)


def _sizes_or_sizes_capped_at_2_graph_depends_on(
    nested_tensors_of_call: object, python_reads: PythonReads
) -> list[list[int]]:
    """Return the sizes of tensors that a trace with the reads `python_reads` depends on.

    Either the sizes themselves, or only 0, 1 and more (as 2).
    """
    # If the model only compares sizes with 0 and 1, all larger ones share a graph.
    largest_first_size = sys.maxsize if python_reads.sizes else 2
    largest_later_size = sys.maxsize if python_reads.later_sizes else largest_first_size
    return [
        [
            min(size, largest_later_size if dim else largest_first_size)
            for dim, size in enumerate(tensor.shape)
        ]
        for tensor in tensors_inside_nested_values(nested_tensors_of_call)
    ]


def _is_assertion_or_raising_condition(file_path: str, line_number_to_check: int) -> bool:
    """Return whether the line is an assertion, or a condition under which the model only raises."""
    code_line, next_line = (
        linecache.getline(file_path, line_number).strip()
        for line_number in (line_number_to_check, line_number_to_check + 1)
    )
    return code_line.startswith("assert") or (
        code_line.startswith("if ") and next_line.startswith("raise ")
    )


@repair("detect_traced_values", "verdict", 30)
def refuse_or_note_values_read_in_python(export_context: ExportContext) -> None:
    """Refuse values that would stay those of the first batch, or add a note where that is allowed."""
    reads = export_context.facts.python_reads
    if reads.checks:
        tally.add_end_note_once(
            f"checked in the first batch only, because {_first_locations_text(reads.checks)} takes values "
            "into Python"
        )
    if reads.decisions:
        description = f"the model takes values of tensors into Python at {_first_locations_text(reads.decisions)}"
        if not export_context.settings.allow_traced_values:
            remedy = "Use torch.where or another function of torch's in their place"
            if reads.masks:
                mask_locations = _first_locations_text(reads.masks)
                remedy = f"Give is_causal=True or False (a decoder: tgt_is_causal=) at {mask_locations}, "
                remedy += "or torch looks at the mask"
            raise RuntimeError(
                f"{description}: ONNX Runtime's graph would hold those of the first batch. {remedy}, or "
                "allow_traced_values=True where they never change, or "
                f"{_torch_modules_setting_advice(reads.layer_paths)}"
            )
        tally.add_end_note_once(
            f"{description}: they stay those of the first batch (setting allow_traced_values)"
        )


def _torch_modules_setting_advice(layer_paths: set[str]) -> str:
    """Return the setting that would let the layers with such code run as torch."""
    layers = sorted(layer_paths) or ["PATH OF THE LAYER"]
    # One pattern for the many equal layers of a model.
    if len(layers) > 4:
        layers = sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", layer) for layer in layers})
    names = ", ".join(map(repr, layers[:4]))
    return f"torch_modules=[{names}], which runs the layer as torch inside ONNX Runtime's graph"


def _first_locations_text(*location_sets: set[str]) -> str:
    locations = [location for locations in location_sets for location in sorted(locations)]
    return ", ".join(locations[:4]) + (
        f" and {len(locations) - 4} more" if len(locations) > 4 else ""
    )


# ------------------------------------------------------------------------------------------- in later passes


def _newest_python_reads(graph_manager: GraphTransitionManager) -> PythonReads:
    return GraphManagerRecord.attached_to(graph_manager).trace_facts.python_reads


def sizes_graph_depends_on_or_none(
    manager: Manager, call_arguments: object
) -> list[list[int]] | None:
    """Return the sizes of the tensors in `call_arguments` if the graph depends on them, else None."""
    reads = _newest_python_reads(manager._graph_transition_manager)
    return (
        _sizes_or_sizes_capped_at_2_graph_depends_on(call_arguments, reads)
        if reads.sizes or reads.later_sizes or reads.ones
        else None
    )


def buffer_versions_without_batch_norm_or_none(
    manager: Manager,
) -> list[tuple[int, int]] | None:
    """Return values that change with a model's buffers, if its graph depends on them, else None.

    BatchNorm's buffers are left out: they change in every pass, and no Python code reads them
    except for a momentum of None.
    """
    if not _newest_python_reads(manager._graph_transition_manager).buffers:
        return None
    layers = [
        layer for layer in manager._flattened_module.modules() if not isinstance(layer, _BatchNorm)
    ]
    return [(id(b), b._version) for layer in layers for b in layer.buffers(recurse=False)]


def note_export_for_other_sizes_or_buffers(graph_manager: GraphTransitionManager) -> None:
    """Add a note why a batch of other sizes, or a changed buffer, causes another export."""
    reads = _newest_python_reads(graph_manager)
    locations = _first_locations_text(reads.sizes, reads.later_sizes, reads.ones, reads.buffers)
    tally.add_end_note_once(
        f"exported again for other sizes or buffers, which the model takes into Python at {locations}"
    )
