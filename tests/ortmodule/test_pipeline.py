"""The steps of an export and the repairs that they belong to: a name in one table that the other lacks does nothing."""

from __future__ import annotations

from ortlaunch.ortmodule import pipeline
from ortlaunch.ortmodule.base.registry import Repair
from ortlaunch.ortmodule.repairs import REPAIRS
from ortlaunch.ortmodule.tracing import compat
from tests.ort import needs_ort

pytestmark = [needs_ort]

ALL = (*compat._BEFORE_IMPORT, *compat._AFTER_IMPORT, *REPAIRS)
STEPS = {
    name
    for table in (
        pipeline._CONTEXTS,
        pipeline._TRACE,
        pipeline._PASSES,
        pipeline._GRADIENTS,
        pipeline._VERDICTS,
    )
    for name, _ in table
}


def test_every_step_is_a_repairs_and_every_repair_does_something() -> None:
    """A step of a repair that is not there would never be taken; a repair without any would be told as applied."""
    names = [repair.name for repair in ALL]
    assert len(names) == len(set(names))
    assert STEPS - set(names) == set()
    idle = {
        repair.name for repair in ALL if repair.install is Repair._field_defaults["install"]
    } - STEPS
    # Which pipeline._traced and attention_forms.attention read by name.
    assert idle == {"ignore_ort_export_cache", "export_sdpa_dropout"}
