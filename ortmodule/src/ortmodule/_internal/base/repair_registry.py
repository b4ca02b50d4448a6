"""The registry of repairs: a decorator at a repair's functions declares all of it.

A repair is applied only where every function of ORT and torch that it relies on has the known
source; otherwise it is reported as not applied. Imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from ortmodule._internal.base import source_guard

if TYPE_CHECKING:
    from ortmodule._internal.base.ort_types import AnyFunction

_Function = TypeVar("_Function", bound=Callable[..., object])
# ORT's classes, as source_guard.py names them.
TRANSITION = "_graph_transition_manager:GraphTransitionManager"
PROCESSED = "_graph_transition_manager:PostExportProcessedModelInfo"
TRAINING = "_training_manager:TrainingManager"
MANAGER = "_graph_execution_manager:GraphExecutionManager"
SHAPES = "onnxruntime.tools.symbolic_shape_infer:SymbolicShapeInference"
EVALUATION = "_inference_manager:InferenceManager"
EXPORT_SOURCES: dict[str, source_guard.KnownSource] = {
    f"{TRANSITION}._export_model": "c78321fdd45b86ef",
    f"{TRANSITION}._get_exported_model": "dec39cba4428f95e",
}
"""The two functions of ORT in which the steps of an export run."""
_applied: list[str] = []
_not_applied: dict[str, str] = {}


Phase = Literal[
    "before import",
    "after import",
    "install",
    "context",
    "trace wrapper",
    "operator form",
    "graph pass",
    "gradient selection",
    "verdict",
]
"""When a repair's functions run.

- `before import`, `after import`: beside the import of ORTModule; `install`: before the first
  ORTModule. `() -> bool | None`, where False means that nothing was to be done, or the wrapper of a
  function of ORT, which `replaces` names.
- `context`: around ORT's plain pass and trace; `(ExportContext) -> context manager`; the outermost
  has the lowest number.
- `trace wrapper`: around the trace alone; `(export) -> export`; the innermost has the lowest number.
- `operator form`: an operator's ONNX form, which operator_table.py calls in the trace.
- `graph pass`: `(ExportContext, ModelProto) -> None` changes the traced graph.
- `gradient selection`: `(ExportContext, ModelProto, names) -> names` of the inputs and weights that
  get a gradient.
- `verdict`: after the export; `(ExportContext) -> None` reports, sets options, or raises an error.
"""
PHASES: tuple[Phase, ...] = get_args(Phase)
"""The phases in their order."""


@dataclass
class Repair:
    """A change to the behaviour of ORT or torch; a change to torch affects ORTModule alone."""

    name: str
    fault: str = ""
    """How ORTModule 1.19.2 behaves without it."""
    example: str = ""
    """A test that fails without it, as `file::test[parameter]` in tests/ortmodule_tests."""
    sources: Mapping[str, source_guard.KnownSource] = field(default_factory=dict)
    """Functions of ORT and torch that it replaces or relies on, with their known source."""
    order_by_phase: dict[Phase, int] = field(default_factory=dict)
    """Its position in each phase in which it has functions; no other repair has the same."""
    functions_by_phase: dict[Phase, list[AnyFunction]] = field(default_factory=dict)
    """Its functions in each phase, in the order of their file."""

    def phase_of_application(self) -> Phase:
        """Return the phase in which it is applied: that of its first function, if that installs.

        Otherwise its functions are steps of the export. Steps of the trace alone are applied with
        the import, because ORTModule needs them even if nothing else of it is repaired.
        """
        first_phase = min(self.order_by_phase, key=PHASES.index)
        if first_phase in PHASES[: PHASES.index("context")]:
            return first_phase
        is_in_trace = {"trace wrapper", "operator form"} & self.order_by_phase.keys()
        return "after import" if is_in_trace else "install"


REPAIR_BY_NAME: dict[str, Repair] = {}


def repair(
    name: str,
    phase: Phase,
    order: int,
    *,
    replaces: str = "",
    fault: str = "",
    example: str = "",
    sources: Mapping[str, source_guard.KnownSource] | None = None,
) -> Callable[[_Function], _Function]:
    """Declare a function as a part of a repair. One of a repair's functions has `fault` to `sources`.

    Args:
        name: the repair's name in reports.
        phase: when the function runs.
        order: its position in the phase, which no other repair has.
        replaces: in the phases up to `install`, the function of ORT (`module:Class.function`) whose
            calls go to this function, as `function(original, *args, **kwargs)`.
        fault: how ORTModule behaves without the repair, in one sentence.
        example: a test that fails without it, as `file::test[parameter]` in tests/ortmodule_tests.
        sources: functions of ORT and torch that it relies on, with their known source.
    """

    def register(function: _Function) -> _Function:
        entry = REPAIR_BY_NAME.setdefault(name, Repair(name))
        for other in REPAIR_BY_NAME.values():
            if other is not entry and other.order_by_phase.get(phase) == order:
                raise ValueError(f"{name} and {other.name} have one order in {phase!r}: {order}")
        run = functools.partial(replace_ort_function, replaces, function) if replaces else function
        entry.order_by_phase[phase] = order
        entry.functions_by_phase.setdefault(phase, []).append(run)
        if fault:
            entry.fault, entry.example, entry.sources = fault, example, sources or {}
        return function

    return register


def apply_repairs(phase: Phase) -> None:
    """Apply the repairs of a phase, once in a process, where all of their sources are known."""
    for entry in repairs_in_order():
        # A second call must not wrap the same functions again.
        if entry.phase_of_application() != phase or entry.name in (*_applied, *_not_applied):
            continue
        if mismatch := source_guard.source_mismatch_text_or_empty(entry.sources):
            record_unapplied_repair(entry.name, mismatch)
        elif False not in [install() for install in entry.functions_by_phase.get(phase, ())]:
            _applied.append(entry.name)


def repairs_in_order() -> list[Repair]:
    """Return every repair, in the order of their first functions."""
    return [
        entry
        for phase in PHASES
        for entry in repairs_of_phase(phase)
        if phase == min(entry.order_by_phase, key=PHASES.index)
    ]


def repairs_of_phase(phase: Phase) -> list[Repair]:
    """Return the repairs with functions in a phase, in their order there."""
    return sorted(
        (entry for entry in REPAIR_BY_NAME.values() if phase in entry.order_by_phase),
        key=lambda entry: entry.order_by_phase[phase],
    )


def applied_steps(phase: Phase) -> list[AnyFunction]:
    """Return the functions of a phase, in order, that belong to repairs in force."""
    return [
        function
        for entry in repairs_of_phase(phase)
        if entry.name in _applied
        for function in entry.functions_by_phase[phase]
    ]


def applied_repair_names() -> tuple[str, ...]:
    """Return the names of the repairs in force, in the order of application.

    Empty before `import_ortmodule_with_repairs_and_export_steps`.
    """
    return tuple(_applied)


def reason_by_unapplied_repair() -> dict[str, str]:
    """Return the repairs that were not applied, with the reason."""
    return dict(_not_applied)


def record_unapplied_repair(repair_name: str, reason: str) -> None:
    """Add a repair to `reason_by_unapplied_repair`; if it is not applied yet, it never is."""
    _not_applied[repair_name] = reason


def replace_ort_function(qualified_name: str, call_with_original: AnyFunction) -> None:
    """Replace a function of ORT, named as source_guard.py does.

    Calls go to `call_with_original(original, *args, **kwargs)`.
    """
    module_name, _, path_in_module = qualified_name.partition(":")
    class_name, _, function_name = path_in_module.rpartition(".")
    owner = source_guard.owning_class_or_module(f"{module_name}:{class_name}")
    original = getattr(owner, function_name)

    @functools.wraps(original)
    def call_wrapper(*args: object, **kwargs: object) -> object:
        return call_with_original(original, *args, **kwargs)

    setattr(owner, function_name, call_wrapper)
