"""The steps of an export and their repairs: a name that only one table has would have no effect."""

from __future__ import annotations

from ortmodule._internal import pipeline
from ortmodule._internal.base.repair_registry import Repair
from ortmodule._internal.repairs import REPAIRS
from ortmodule._internal.tracing import import_repairs
from ortmodule_tests.ort import needs_ort

pytestmark = [needs_ort]

ALL = (*import_repairs._BEFORE_IMPORT, *import_repairs._AFTER_IMPORT, *REPAIRS)
STEPS = {
    name
    for table in (
        pipeline._CONTEXT_STEPS,
        pipeline._TRACE_STEPS,
        pipeline._GRAPH_STEPS,
        pipeline._GRADIENT_STEPS,
        pipeline._VERDICT_STEPS,
    )
    for name, _ in table
}


def test_every_step_is_a_repairs_and_every_repair_does_something() -> None:
    """Each step belongs to a repair, and each repair has a step or an install function."""
    names = [repair.name for repair in ALL]
    assert len(names) == len(set(names))
    assert STEPS - set(names) == set()
    idle = {
        repair.name for repair in ALL if repair.install is Repair._field_defaults["install"]
    } - STEPS
    # pipeline._trace_until_torch_layers_are_found and attention_forms.attention check these two by name.
    assert idle == {"ignore_ort_export_cache", "export_sdpa_dropout"}
