"""Print the repairs of ORTModule in the order in which they run.

    python -m ortmodule.export                    with the state of each on the installed versions
    python -m ortmodule.export module:factory     and how each ran in the export of a model

The factory takes no argument and returns a model and its example inputs: a tensor, a sequence of
arguments, or a dictionary of named arguments.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

# The pipeline imports all modules in which repairs are declared.
from ortmodule._internal import pipeline  # noqa: F401
from ortmodule._internal.base import repair_registry
from ortmodule._internal.base.repair_registry import PHASES, Phase
from ortmodule._internal.errors import ORTModuleError
from ortmodule._internal.module import ORTModule, import_ortmodule_with_all_repairs

Outcomes = dict[tuple[Phase, str], str]
"""How a repair ran in an export, by phase and name."""


def main(arguments: Sequence[str]) -> int:
    """Print the repairs, and return the exit status."""
    try:
        if len(arguments) > 1 or "".join(arguments).startswith("-"):
            raise ORTModuleError(f"{' '.join(arguments)!r}: wrong arguments\n\n{__doc__}")
        import_ortmodule_with_all_repairs()
        print(repairs_text(run_first_pass_recording_outcomes(arguments[0]) if arguments else {}))
    except ORTModuleError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def repairs_text(outcomes: Outcomes) -> str:
    """Return each phase with its repairs: their state, how they ran, and their fault."""
    states = {
        **dict.fromkeys(repair_registry.applied_repair_names(), "applied"),
        **{
            name: f"not applied, {reason}"
            for name, reason in repair_registry.reason_by_unapplied_repair().items()
        },
    }
    lines = []
    for phase in PHASES:
        lines.append(f"{phase}:")
        for entry in repair_registry.repairs_of_phase(phase):
            state = states.get(entry.name, "not needed with the installed versions")
            outcome = outcomes.get((phase, entry.name))
            lines.append(f"    {entry.name}: {state}{f'; {outcome}' if outcome else ''}")
            lines.append(f"        {entry.fault}")
    return "\n".join(lines)


def run_first_pass_recording_outcomes(factory_path: str) -> Outcomes:
    """Run the first pass of a model in an ORTModule, and return how each step of its export ran.

    Args:
        factory_path: `module:factory`, of a function that returns a model and its example inputs.

    Raises:
        ORTModuleError: there is no such function, or it returns something else.
    """
    module_name, _, factory_name = factory_path.partition(":")
    try:
        model, inputs = getattr(importlib.import_module(module_name), factory_name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ORTModuleError(
            f"{factory_path!r}: {error}; it must be module:factory, and the factory must return a "
            "model and its example inputs"
        ) from error
    outcomes: Outcomes = {}
    # The ONNX form of an operator is called by the table of operators, and not by its phase.
    for phase in {*PHASES} - {"operator form"}:
        for entry in repair_registry.repairs_of_phase(phase):
            record = partial(outcomes.__setitem__, (phase, entry.name))
            entry.functions_by_phase[phase] = [
                partial(_run_and_record, phase, record, function)
                for function in entry.functions_by_phase[phase]
            ]
    if isinstance(inputs, dict):
        ORTModule(model)(**inputs)
    else:
        ORTModule(model)(*([inputs] if isinstance(inputs, torch.Tensor) else inputs))
    return outcomes


def _run_and_record(
    phase: Phase, record: Callable[[str], None], function: Callable[..., Any], *arguments: Any
) -> Any:
    graph_before = _graph_content(arguments[1]) if phase == "graph pass" else None
    result = function(*arguments)
    if phase == "graph pass":
        is_changed = _graph_content(arguments[1]) != graph_before
        record("changed the graph" if is_changed else "left the graph as it was")
    elif phase == "gradient selection":
        record(f"left out {len(arguments[2]) - len(result)} of {len(arguments[2])} gradients")
    else:
        record("ran")
    return result


def _graph_content(model: Any) -> object:
    """Return what distinguishes a graph, without the names of its nodes, which some passes set."""
    nodes = [
        (node.op_type, *node.input, *node.output, str(node.attribute)) for node in model.graph.node
    ]
    return nodes, str(model.graph.input), str(model.graph.output), str(model.metadata_props)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
