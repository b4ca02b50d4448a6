"""The pure parts of `ortlaunch bench`: variants, figures, the plot, and warnings on the machine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base import machine
from ortlaunch.base.errors import InputError, MissingDependency
from ortlaunch.bench import command, measure, picture, report
from ortlaunch.bench.measure import MeasurementLength
from ortlaunch.bench.variants import (
    ENGINES,
    Variant,
    overrides_that_replace_engine,
    resolve_variant_or_record_refusal,
    split_at_commas_outside_brackets,
    variants_of_engines_and_varied_keys,
)
from ortlaunch.recipe.fields.engine import Engine
from ortlaunch.report.charts import bar_chart
from tests.control.benches import player, resolved, rows
from tests.makers import BERT, WORDS

pytestmark = pytest.mark.usefixtures("workbench")

BERT_ON_WORDS: dict[str, Any] = {"model": {"task": "masked-lm", "config": BERT}, "data": WORDS}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0,1", ["0", "1"]),
        ("{a: [1, 2]}, {b: 2}", ["{a: [1, 2]}", "{b: 2}"]),
        ("'a,b',\"c,d\",[1,[2,3]]", ["'a,b'", '"c,d"', "[1,[2,3]]"]),
        ("one", ["one"]),
        # A bracket inside quotes opens and closes nothing.
        ("'it]s',x", ["'it]s'", "x"]),
    ],
)
def test_values_of_vary(text: str, values: list[str]) -> None:
    """Commas separate values, but not inside brackets or quotes."""
    assert list(split_at_commas_outside_brackets(text)) == values


def test_variants_are_engines_times_values() -> None:
    """Every engine is combined with all values; names contain only the varied keys."""
    found = variants_of_engines_and_varied_keys(
        ["ort", "eager"], ["engine.memory_optimization=0,1", "optimizer.learning_rate=0.1,1.5"]
    )
    assert len(found) == 8
    # Engines of one combination are next to each other.
    assert [variant.engine for variant in found[:2]] == ["ort", "eager"]
    assert found[0].name == "ort memory_optimization=0 learning_rate=0.1"
    assert found[0].folder_name == "ort-memory_optimization=0-learning_rate=0.1"
    assert len({variant.folder_name for variant in found}) == 8


def test_all_engines_by_default() -> None:
    """The default is the three engines of the recipe's field, without auto."""
    assert [variant.engine for variant in variants_of_engines_and_varied_keys(ENGINES, ())] == [
        "ort",
        "inductor",
        "eager",
    ]


def test_an_engine_replaces_the_recipes() -> None:
    """Another engine drops the fields for ort, and ort never falls back in a bench."""
    before = Engine(name="auto", parity_steps=2, memory_optimization=1)
    assert overrides_that_replace_engine("inductor", before) == ('engine={"name": "inductor"}',)
    assert overrides_that_replace_engine("inductor", before, keeps_parity_fields=True) == (
        'engine={"name": "inductor", "parity_steps": 2}',
    )
    assert overrides_that_replace_engine("eager", before, keeps_parity_fields=True) == (
        'engine={"name": "eager"}',
    )
    base = resolved(engine={"name": "ort", "memory_optimization": 1, "allow_fallback": True})
    assert base.apply_overrides(
        *Variant("eager", ()).overrides_that_make_variant_without_fallback(
            base.recipe_file.recipe.engine
        )
    ).recipe_file.recipe.engine == Engine(name="eager")
    ort = base.apply_overrides(
        *Variant("ort", ()).overrides_that_make_variant_without_fallback(
            base.recipe_file.recipe.engine
        )
    ).recipe_file.recipe.engine
    assert (ort.memory_optimization, ort.allow_fallback) == (1, False)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_keeps_the_precision_of_products(engine: str) -> None:
    """Every engine keeps engine.matmul_precision, so that all are compared at one precision."""
    base = resolved(engine={"name": "ort", "matmul_precision": "medium"})
    for chosen, word in (((), "medium"), (("engine.matmul_precision=high",), "high")):
        found = resolve_variant_or_record_refusal(Variant(engine, chosen), base).resolved_run
        assert found is not None
        assert found.recipe_file.recipe.engine.matmul_precision == word


def test_a_refused_variant_says_why() -> None:
    """A refused variant has the reason; if all variants are refused, this is an error."""
    # Engine ort has no bf16 on a CPU.
    base = resolved(precision="bf16")
    refused = resolve_variant_or_record_refusal(Variant("ort", ()), base)
    assert (refused.resolved_run, "precision: got bf16 with engine ort" in refused.refusal) == (
        None,
        True,
    )
    assert resolve_variant_or_record_refusal(Variant("eager", ()), base).resolved_run is not None
    with pytest.raises(InputError) as caught:
        measure.resolve_variants_or_refuse_if_none_can_run(base, ["ort"], ["seed=1,2"])
    assert str(caught.value).count("ort seed=") == 2


def test_medians_spread_and_ratios() -> None:
    """Figures are the median of all steps of all turns, and the ratio to eager at the same keys."""
    ort, eager = rows(
        player("ort", [[1.0, 2.0], [3.0, 4.0]]), player("eager", [[5.0, 5.0], [5.0, 9.0]])
    )
    assert ort["seconds"] == {
        "median": 2.5,
        "quartile_1": 1.75,
        "quartile_3": 3.25,
        "min": 1.0,
        "max": 4.0,
    }
    assert (ort["samples_per_second"], eager["samples_per_second"]) == (2 / 2.5, 2 / 5.0)
    assert (ort["ratio"], eager["ratio"], ort["ratio_to"]) == (2.0, 1.0, "eager")
    text = report.bench_table_and_notes_text([ort, eager])
    cells = text.splitlines()[1].split()
    assert (cells[:5], cells[-3:]) == (["ort", "2.5", "1.75", "-", "3.25"], ["1e-06", "2.00", "x"])


def test_ratio_within_the_same_option() -> None:
    """A variant is compared with eager at the same value of the varied key."""
    made = rows(
        player("eager", [[1.0]], None, "seed=1"),
        player("eager", [[4.0]], None, "seed=2"),
        player("ort", [[2.0]], None, "seed=2"),
    )
    assert (made[2]["ratio_to"], made[2]["ratio"]) == ("eager seed=2", 2.0)


def test_mfu_has_one_yardstick() -> None:
    """The highest rate that any variant measured is the peak of all of them."""
    made = []
    for name, peak in (("ort", 100.0), ("eager", 400.0)):
        one = player(name, [[1.0]])
        one.variant = resolve_variant_or_record_refusal(
            Variant(name, ()), resolved(**BERT_ON_WORDS)
        )
        one.ready_answer.update(flops_per_token=2.0, peak_flops=peak, vendor_peak_flops=1024.0)
        # Padding is computed, and is no token.
        one.turns[0]["tokens"] = [192, 64]
        made.append(one)
    figures = [(row["mfu"], row["tokens_per_second"]) for row in rows(*made)]
    assert figures == [(2.0 * 256 / 400.0, 192)] * 2
    assert {row["mfu_of_vendor_peak"] for row in rows(*made)} == {0.5}


def test_mfu_is_against_the_rate_at_the_same_precision() -> None:
    """The peak for MFU is that of variants at the same precision."""
    made = []
    # A matmul at medium may be six times as fast as one at highest.
    for word, peak in (("highest", 100.0), ("medium", 600.0)):
        one = player("eager", [[1.0]], None, f"engine.matmul_precision={word}")
        assert one.variant.resolved_run is not None
        one.turns[0]["tokens"] = [100, 0]
        one.ready_answer.update(flops_per_token=2.0, peak_flops=peak)
        made.append(one)
    assert [row["mfu"] for row in rows(*made)] == [
        pytest.approx(200 / 100),
        pytest.approx(200 / 600),
    ]


def test_the_table_has_no_column_without_a_value() -> None:
    """The table has no column without values, such as MFU on a CPU, and fits 100 columns."""
    lines = report.bench_table_and_notes_text(
        rows(player("eager", [[1.0]]), player("inductor", [[123.4, 125.6, 130.2]]))
    ).splitlines()
    assert "tokens/s" not in lines[0]
    assert "MFU" not in lines[0]
    assert len(lines[1].split()) == len(lines[2].split())
    assert max(map(len, lines)) <= 100


def test_the_table_shows_what_lower_precision_does_to_the_loss() -> None:
    """The table shows the change of the loss by a lower precision."""
    moved = {"verdict": "passes", "largest": 1e-6, "loss_from_highest": 2.5e-4}
    one = player("eager", [[1.0]], moved, "engine.matmul_precision=medium")
    # Parity cannot show it, because it is compared at highest.
    text = report.bench_table_and_notes_text(rows(one))
    assert (
        "eager matmul_precision=medium: matmul_precision medium changes the loss by 2.5e-04; "
        "parity is" in text
    )


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib the bench ends before anything is run, with the command to install it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingDependency,
        match=r'pip install "ortlaunch\[bench\]", or leave --picture out',
    ):
        command.measure_print_and_write_bench_and_cache_engine(
            resolved(), ["eager"], (), MeasurementLength(), None, draws_picture=True
        )
    # The folder of results.
    assert not Path("bench").exists()


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    """The plot is written as a PNG."""
    pytest.importorskip("matplotlib")
    chart = bar_chart(rows(player("ort", [[1.0, 2.0]]), player("eager", [[3.0]])), "title")
    picture.write_bar_chart_as_png(chart, tmp_path / "x.png")
    # The signature of a PNG file.
    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_variants_that_do_not_fit_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants that do not fit into the memory together run one at a time, with a warning."""
    said: list[str] = []
    made = [player("eager", [[1.0]]), player("ort", [[1.0]])]
    assert (
        measure._measurement_length_one_at_a_time_if_memory_lacks(
            MeasurementLength(), made, said.append
        )
        == MeasurementLength()
    )
    for each in made:
        each.variant = resolve_variant_or_record_refusal(each.variant, resolved(**BERT_ON_WORDS))
    assert (
        measure._measurement_length_one_at_a_time_if_memory_lacks(
            MeasurementLength(), made, said.append
        )
        == MeasurementLength()
    )
    monkeypatch.setattr(
        machine,
        "machine_and_control_group_memory_limits",
        lambda: [machine.MemoryLimit("a group", 1 << 30, 1 << 20)],
    )
    assert measure._measurement_length_one_at_a_time_if_memory_lacks(
        MeasurementLength(), made, said.append
    ).one_at_a_time
    assert "1.0 MiB is free: running one at a time" in said[0]


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that works beside the bench is named in a warning."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            # On a machine that others keep busy, the process may need some time to be visible.
            deadline = time.monotonic() + 20
            while not any(
                f"({busy.pid}): " in line
                for line in machine.watch_and_describe_other_busy_processes()
            ):
                assert time.monotonic() < deadline
        finally:
            busy.kill()
    said: list[str] = []
    monkeypatch.setattr(machine, "watch_and_describe_other_busy_processes", list)
    measure._watch_and_warn_of_busy_machine(said.append, (0.0, 0.0, 0.0))
    # No other process and no load: no warning.
    assert said == []
    measure._watch_and_warn_of_busy_machine(said.append, (1000.0, 0.0, 0.0))
    assert said[0].startswith("WARNING: this machine is busy (load 1000.0 on ")
    monkeypatch.setattr(
        machine,
        "watch_and_describe_other_busy_processes",
        lambda: ["python (12468): 32% of a core"] * 9,
    )
    measure._watch_and_warn_of_busy_machine(said.append, (10.0, 0.0, 0.0))
    assert max(map(len, said[1].splitlines())) <= 100


def test_a_job_that_works_while_it_waits_is_told() -> None:
    """A job that uses half a core while it waits gets a warning."""
    made = player("ort", [[1.0]])
    said = []
    # Its work slows the other variants' turns.
    made.turns[0]["waited"] = {"seconds": 10.0, "processor_seconds": 5.0}
    measure._warn_of_jobs_busy_while_waiting([made], said.append)
    assert said[0].startswith("WARNING: ort used 5.0 s of processor time in 10.0 s of waiting")


def test_hardware_names_processor_and_cores() -> None:
    """The hardware for the key and bench.json has processor, cores and GPUs."""
    found = machine.hardware_record()
    assert (found["cores"] > 0, bool(found["processor"]), found["gpus"]) == (
        True,
        True,
        machine._gpu_models(),
    )
    # It can be written as JSON.
    json.dumps(found)
