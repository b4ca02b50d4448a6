"""Tests of benchmarks/models.py and contest.py: a contest of small processes, tables, the chart."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
# A contestant whose steps take no time; with an argument it fails in its second turn.
LOOP = """
import sys
from contest import Gate
gate = Gate(2)
for step in range(100):
    if len(sys.argv) > 1 and step == 3:
        raise ValueError("planted")
    gate.step()
"""


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported as it imports its neighbours."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import models

    return models


def record(models: ModuleType, **seconds: float) -> dict[str, Any]:
    """Return a result with these seconds a step; engines without any failed."""
    found = {
        name: {"median": took, "least": took, "most": took, "turns": [took], "memory": 2**30}
        for name, took in seconds.items()
    }
    missing = {name: {"failed": "planted"} for name in models.CONTESTANTS if name not in found}
    return {
        "task": "masked-lm", "batch": 8, "tokens": 128, "contestants": {**found, **missing},
        "auto": {"chosen": "ort", "cost": 60.0},
        "environment": {"processor": "P", "cores": 2, "torch": "2"},
    }  # fmt: skip


def test_a_contestant_that_fails_does_not_end_the_race(models: ModuleType, tmp_path: Path) -> None:
    """The others have all their turns; without a place for reasons the failure is an error."""
    (tmp_path / "loop.py").write_text(LOOP)
    command = [sys.executable, str(tmp_path / "loop.py")]
    commands = {"good": command, "bad": [*command, "fails"]}
    environ = {"CONTEST_FOLDER": str(tmp_path), "PYTHONPATH": str(BENCHMARKS)}
    from contest import race

    failed: dict[str, str] = {}
    times = race(commands, 2, environ, failed=failed, together=True)
    assert list(times) == ["good"]
    assert len(times["good"].turns) == 2
    assert 2**20 < times["good"].memory < 2**30
    assert models._last_line(failed["bad"]) == "ValueError: planted"
    with pytest.raises(SystemExit, match="bad ended early"):
        race(commands, 2, environ)


def test_tables_and_chart(models: ModuleType, tmp_path: Path) -> None:
    """Means, medians and worst are of the models that an engine trained; failures have reasons."""
    records = {
        "bert": record(models, Trainer=1.0, eager=0.5, inductor=0.8, ort=0.25),
        "llama": record(models, Trainer=1.0, eager=0.5, ort=1.0),
    }
    assert "| ort | 2 | 2.00 | 2.50 | 2.50 | 1.00 (llama) | 4.00 (bert) |" in models.summary(
        records
    )
    assert "| inductor | 1 | 1.25 |" in models.summary(records)
    assert "- llama, inductor: planted" in models.table(records)
    judged = models.judged(records)
    assert "for 1 of 2 models" in judged
    assert "| bert | ort | 100% of ort | 60 | 4,800 |" in judged
    assert "| llama | ort | 50% of eager | 60 | 2,400 |" in judged
    drawn = xml.fromstring(models.chart(records))
    dots = [each for each in drawn.iter() if each.tag.endswith("circle")]
    # Five figures, and three in the legend.
    assert len(dots) == 8


def test_results_are_kept(
    models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call measures only what has no result."""
    measured = []

    def raced(name: str, *_: object) -> dict[str, Any]:
        measured.append(name)
        found = record(models, Trainer=1.0, eager=0.5)
        del found["auto"]
        return found

    def chosen(name: str) -> dict[str, Any]:
        measured.append(f"auto {name}")
        return {"chosen": "eager", "cost": 1.0}

    def call(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["models.py", f"--out={tmp_path}", *words])
        models.main()

    monkeypatch.setattr(models, "raced", raced)
    monkeypatch.setattr(models, "chosen", chosen)
    call("--only=llama", "--parts=race")
    call("--only=llama,bert")
    call("--only=llama,bert")
    assert measured == ["llama", "auto llama", "bert", "auto bert"]
    assert sorted(json.loads((tmp_path / "families.json").read_text())) == ["bert", "llama"]
    assert "for 2 of 2 models" in (tmp_path / "families.md").read_text()
    assert (tmp_path / "families.svg").exists()
    with pytest.raises(SystemExit, match="--only lama: unknown; valid: bert"):
        call("--only=lama")


def test_a_busy_machine_is_reported(models: ModuleType) -> None:
    """A model whose turns differ much is named, and one that is missing."""
    found = record(models, Trainer=1.0, eager=0.5)
    assert "busy" not in models.page({"bert": found})
    found["contestants"]["eager"]["least"] = 0.3
    assert "On a busy machine, to be measured again: bert." in models.page({"bert": found})
    assert "Not measured yet: roberta, electra" in models.page({"bert": found})


def test_the_pages_have_the_recorded_figures(models: ModuleType) -> None:
    """The page and the chart are those of docs/evidence/families.json."""
    docs = BENCHMARKS.parent / "docs" / "evidence"
    records = json.loads((docs / "families.json").read_text())
    assert models.page(records) == (docs / "families.md").read_text()
    assert models.chart(records) == (docs / "families.svg").read_text()


def test_twenty_families(models: ModuleType) -> None:
    """The chart has 20 families; sequences of 128 to 2,048 tokens."""
    assert len(models.CASES) == 20
    assert all(128 <= case[2] <= 2048 for case in models.CASES.values())
