"""Tests of `ortlaunch report`: the page's content, and that no text of a run becomes markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.base.errors import InputError
from ortlaunch.launch import JobState
from ortlaunch.launch.record import Attempt, JobRecord
from ortlaunch.launch.stop import PRUNER
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.report import write_report_page
from ortlaunch.report.charts import thinned_points
from ortlaunch.run_folder.cause_text import advice_for_failure
from ortlaunch.run_folder.folder import (
    RunDir,
    json_text,
    read_json_or_raise_damaged,
    write_json_atomically,
    write_text_atomically,
)
from ortlaunch.run_folder.profile_record import OperatorCost, Profile
from ortlaunch.run_folder.records import MeasuredMemory, MemoryReport, PlannedMemory
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.search.parallel import Picture
from ortlaunch.started_runs.diagnosis import diagnose_run
from ortlaunch.started_runs.runs_table import runs_table_text
from ortlaunch.started_runs.status import read_status
from ortlaunch.tables.metrics import METRICS
from tests import labs
from tests.makers import engine_report, host, onnxruntime, plan, recipe

# Would end a table cell and run a script if it were not escaped.
HOSTILE = "</td></svg><script>alert(1)</script>&"
ATTEMPT = Attempt(1, 5.0, 1, Cause.RAISED, "a rank failed", "ValueError", 25, 20, 0)


def made(folder: Path, lines: list[dict[str, Any]], verdict: str = "done", **sections: Any) -> Path:
    """Make the folder of a run that ended, and return it."""
    run = RunDir(folder)
    write_text_atomically(run.recipe, dump_recipe_yaml(recipe(**sections)))
    write_text_atomically(run.plan, plan(recipe(), [host("a", 2)], "torchrun").to_json())
    # A second start, which resumed after step 20.
    later = Attempt(2, 5.0, 1, Cause.RAISED, "again", "ValueError", 25, 20, 20)
    job = JobRecord.for_this_process("local", JobState.RUNNING).copy_ended_now(
        JobState.SUCCEEDED, Verdict(0, verdict)
    )
    write_json_atomically(
        run.job, {**asdict(job), "state": "succeeded", "attempts": [asdict(ATTEMPT), asdict(later)]}
    )
    write_text_atomically(run.metrics, "".join(json_text(line) + "\n" for line in lines))
    engine = engine_report("ort", onnxruntime=onnxruntime(fallbacks=3, fallback_reasons=[HOSTILE]))
    write_json_atomically(run.engine, engine.to_json())
    planned = PlannedMemory(1, 1, 2, 3, 0, 1, 4, 8)
    measured = MeasuredMemory(1, 1, 2, 0, 5, 4, 2048)
    write_json_atomically(run.memory, MemoryReport(planned, measured, "resident bytes", 0, [2048]).__dict__ | {
        "planned": asdict(planned), "measured": asdict(measured)})  # fmt: skip
    write_text_atomically(
        run.commands,
        json.dumps({"time": "now", "argv": ["ortlaunch", "train", "HF_TOKEN=secret"]}) + "\n",
    )
    return folder


def steps(*losses: float | None) -> list[dict[str, Any]]:
    return [
        {"step": 10 * n, "loss": loss, "learning_rate": 0.1 / n} for n, loss in enumerate(losses, 1)
    ]


def page(*runs: Path, to: Path) -> ElementTree.Element:
    """Return the page as a tree; it must be well-formed XML."""
    return ElementTree.fromstring(write_report_page(runs, to, "now").read_text(encoding="utf-8"))


def figures(tree: ElementTree.Element) -> list[dict[str, Any]]:
    """Return what charts.js draws on a page."""
    return [json.loads("".join(figure.itertext())) for figure in tree.iter("figure")]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ElementTree.Element]:
    """Return the charts that Chromium draws of a page of two runs and a sweep, by their titles."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        labs.skip("Chromium is not installed")
    folder = tmp_path_factory.mktemp("drawn")
    shares = {"evaluation_loss": 1.0, "evaluation_f1_macro": 1.0}
    long = [
        {**line, "loss": 1000.0 if n == 1 else 2.0} for n, line in enumerate(steps(*[1.0] * 60))
    ]
    runs = [
        made(folder / "a" / HOSTILE.replace("/", ""), [*long, {"step": 10, **shares}]),
        made(folder / "b" / "run", steps(4.0, None, 1.5e-4)),
    ]
    marks = {
        "optimizer.learning_rate": [(1e-4, "0.0001"), (1e-2, "0.01")],
        "loss": [(1, "1"), (2, HOSTILE)],
    }
    axes = [{"name": name, "log": name != "loss", "marks": each} for name, each in marks.items()]
    lines = [{"best": best, "text": HOSTILE, "values": {"optimizer.learning_rate": 1e-3, "loss": 2}}
             for best in (False, True)]  # fmt: skip
    sweep = Picture(
        {"kind": "parallel", "title": "Trials", "axes": axes, "lines": lines},
        [],
        [],
        "loss",
        (),
        [],
    )
    path = write_report_page(runs, folder / "r.html", "now", sweep)
    shown = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
         "--disable-background-networking", f"--user-data-dir={folder / 'profile'}", "--dump-dom",
         path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    charts = re.findall(
        r"(?s)<(?:h3>(.*?)</h3|div class=\"(scroll)\")><figure>.*?(<svg.*?</svg>)", shown.stdout
    )
    # alert() of a planted script would have no result; an element of it would.
    assert "<script>alert" not in shown.stdout
    return {heading or other: ElementTree.fromstring(svg) for heading, other, svg in charts}


def texts(svg: ElementTree.Element, tag: str = "text") -> list[str]:
    return [each.text or "" for each in svg.iter(tag)]


def paths(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [each for each in svg.iter("path") if each.get("class") == name]


def test_a_browser_draws_lines(drawn: dict[str, ElementTree.Element]) -> None:
    """A line for each run, marks of the axes, values under the pointer and resumed starts."""
    (loss,) = [drawn[title] for title in drawn if title.startswith("Loss")]
    # Values from 1.5e-4 to 1,000, whose median is 2, have a logarithmic axis.
    assert any(title.startswith("Loss") and title.endswith("(logarithmic)") for title in drawn)
    assert [text for text in texts(loss) if text != "step"] == [
        "0.001", "0.01", "0.1", "1", "10", "100", "1,000", "0", "200", "400", "600"]  # fmt: skip
    titles = texts(loss, "title")
    (label,) = [title.partition(": a later")[0] for title in titles[:1]]
    assert HOSTILE.replace("/", "") in label
    assert titles[0].endswith(": a later start went on after step 20")
    assert f"step 10\n{label}: 2\nrun: 4\n{label}, evaluation: 1" in titles
    # A step without a value interrupts the line of the second run.
    by_run = [path for path in paths(loss, "curve") if path.get("stroke") == "var(--run1)"]
    assert [path.get("d", "").count("L") for path in by_run] == [1, 0, 0]
    assert paths(drawn["Learning rate"], "axis")
    assert "5e-5" not in texts(loss)


def test_the_axis_of_a_share_ends_at_one(drawn: dict[str, ElementTree.Element]) -> None:
    """The axis of values of a share has no mark above 1."""
    marks = [float(text) for text in texts(drawn["Evaluation f1 macro"])[:-3]]
    assert max(marks) == 1


def test_a_browser_draws_parallel_coordinates(drawn: dict[str, ElementTree.Element]) -> None:
    """A line for each trial over the axes, of which logarithmic ones have equal decades."""
    picture = drawn["scroll"]
    assert [line.get("class") for line in paths(picture, "curve")] == ["curve"]
    # 1e-3 is in the middle of 1e-4 and 1e-2.
    assert [line.get("d") for line in paths(picture, "curve best")] == ["M100 138L790 26"]
    # Long names of fields are two lines, so that those of neighbouring axes do not overlap.
    assert texts(picture) == [
        "optimizer", "learning_rate", "0.0001", "0.01", "loss", "1", HOSTILE]  # fmt: skip


def row(tree: ElementTree.Element, name: str) -> list[str]:
    """Return the cells of a table's row."""
    (cells,) = [
        ["".join(cell.itertext()) for cell in line]
        for line in tree.iter("tr")
        if line[0].text == name
    ]
    return cells[1:]


@pytest.mark.parametrize(
    ("passes", "said"),
    [("fp32", "fp32, matmul in float32"), ("bf16", "bf16"), ("fp16", "fp16")],
)
def test_the_precision_of_passes(passes: str, said: str, tmp_path: Path) -> None:
    """The precision of float32 matmuls is shown only for passes in fp32."""
    run = made(tmp_path / "one", steps(3.0, 2.0))
    told = json.loads((run / "engine.json").read_text())
    told |= {"precision": passes, "matmul_precision": {"asked": "highest", "format": "float32"}}
    (run / "engine.json").write_text(json.dumps(told))
    assert row(page(run, to=tmp_path / "r.html"), "precision") == [said]


def test_a_page_of_one_run(tmp_path: Path) -> None:
    """A page shows curves, the verdict, fallbacks, memory, failed starts and resumed starts."""
    run = made(
        tmp_path / "one",
        [*steps(3.0, 2.0, 1.0), {"step": 30, "evaluation_loss": 1.5}],
        verdict="done: all",
    )
    tree = page(run, to=tmp_path / "r.html")
    # The evaluation's loss is in the chart of the training's.
    assert [chart["title"] for chart in figures(tree)] == ["Loss", "Learning rate"]
    training, evaluation = figures(tree)[0]["curves"]
    assert (training["points"], training["part"]) == ([[10, 3.0], [20, 2.0], [30, 1.0]], "")
    assert (evaluation["points"], evaluation["part"]) == ([[30, 1.5]], "evaluation")
    assert training["starts"] == [20]
    headings = [heading.text for heading in tree.iter("h2")]
    assert headings[:2] == ["Curves", "Results"]
    # Planned and measured.
    assert row(tree, "peak") == ["8 B", "2.0 KiB"]
    assert row(tree, "1") == ["0", "25", "5", "a rank failed"]
    assert row(tree, "forward and backward passes that fell back to PyTorch") == [f"3\n{HOSTILE}"]


def test_no_count_of_passes_before_there_is_one(tmp_path: Path) -> None:
    """A run that failed before its ranks counted passes has no row of them, rather than zeros."""
    run = made(tmp_path / "one", steps(3.0))
    passes = {f"{name}_passes": 0 for name in ("forward", "backward", "evaluation")}
    told = json.loads((run / "engine.json").read_text())
    told["onnxruntime"] |= passes
    (run / "engine.json").write_text(json.dumps(told))
    name = "forward and backward passes by ONNX Runtime"
    assert name not in "".join(page(run, to=tmp_path / "r.html").itertext())
    # A run that has ended well has counted none.
    (run / "summary.json").write_text('{"steps": 10}')
    assert row(page(run, to=tmp_path / "r.html"), name) == ["0 forward, 0 backward, 0 evaluation"]


def test_a_failed_run_has_its_cause_and_a_remedy_once(tmp_path: Path) -> None:
    """The page begins with the cause of a failure and what to try; neither is repeated."""
    folder = made(tmp_path / "one", steps(3.0))
    detail = "IndexError: Target 7 is out of bounds."
    failure = Failure(Cause.INDEX_OUT_OF_RANGE, detail, 0, "box", status=1)
    job = read_json_or_raise_damaged(RunDir(folder).job)
    verdict = Verdict(1, detail, failure, detail, advice=advice_for_failure(failure))
    job |= {"state": "failed", "exit_status": 1, "verdict": asdict(verdict)}
    write_json_atomically(RunDir(folder).job, job)
    text = "".join(page(folder, to=tmp_path / "r.html").itertext())
    assert text.count(detail) == 1
    assert text.index(detail) < text.index("Curves")
    assert "Try: compare the labels" in text


def test_a_pruned_trial_is_no_failure(tmp_path: Path) -> None:
    """A pruned trial is `pruned` everywhere, and nothing advises to continue it."""
    run = RunDir(made(tmp_path / "0001", steps(3.0)))
    detail = "stopped by the pruner of its sweep, saved after step 20 of 40"
    end = Verdict(
        85,
        detail,
        Failure(Cause.STOPPED, detail),
        stopped_by=PRUNER,
        can_continue=True,
        continue_command="ortlaunch train x",
    )
    ended = JobRecord.for_this_process("local", JobState.RUNNING).copy_ended_now(
        JobState.PREEMPTED, end
    )
    ended.write(run)
    tree = page(run.path, to=tmp_path / "r.html")
    assert row(tree, "state")[0].startswith("pruned, exit status 85")
    assert row(tree, "end") == [f"ortlaunch: {detail}"]
    assert not [one for one in tree.iter("p") if one.get("class") == "warn"]
    status = read_status(run)
    assert runs_table_text([status], 100).splitlines()[1].startswith("pruned")
    assert ": pruned " in str(status)
    said = [str(status), str(diagnose_run(run)), "".join(tree.itertext())]
    assert not [text for text in said if "to continue" in text]


@pytest.mark.parametrize(("limit", "title"), [(None, ""), (1.0, " before clipping")])
def test_the_title_of_the_gradient_norm(limit: Any, title: str, tmp_path: Path) -> None:
    """The norm is one before clipping only where a run clips."""
    lines = [{**line, "gradient_norm": 2.0} for line in steps(3.0, 2.0)]
    run = made(tmp_path / "one", lines, train={"max_steps": 9, "max_grad_norm": limit})
    heads = [one.text for one in page(run, to=tmp_path / "r.html").iter("h3")]
    assert f"Gradient norm{title}" in heads


def test_an_accuracy_is_called_one() -> None:
    """A person reads of an accuracy that it is one, not a share of masked tokens."""
    names = [name for name in METRICS if name.endswith("_accuracy")]
    assert {METRICS[name].shown.partition(" ")[0] for name in names} == {"accuracy"}


def test_shares_and_classes(tmp_path: Path) -> None:
    """The axis of a share ends at 1; classes have scores and the samples by predicted class."""
    lines = [{"step": 10, "evaluation_loss": 1.0, "evaluation_f1_macro": 1.0}]
    folder = made(tmp_path / "one", [*steps(3.0), *lines])
    counts = [[3, 1, 0], [0, 2, 0], [0, 0, 0]]
    write_json_atomically(
        RunDir(folder).confusion, {"classes": ["red", HOSTILE, "blue"], "counts": counts}
    )
    tree = page(folder, to=tmp_path / "r.html")
    (chart,) = [each for each in figures(tree) if each["title"] == "Evaluation f1 macro"]
    assert chart["share"]
    # Samples, precision, recall, F1, and the row of the table.
    assert row(tree, "red") == ["4", "1.000", "0.750", "0.857", "3", "1", "0"]
    assert row(tree, HOSTILE) == ["2", "0.667", "1.000", "0.800", "0", "2", "0"]
    assert row(tree, "blue") == ["0", "-", "-", "-", "0", "0", "0"]
    # Of sets of classes: rightly predicted, labelled, predicted.
    sets = {"classes": ["red", "blue"], "counts": [[3, 4, 5], [0, 1, 0]], "are_label_sets": True}
    write_json_atomically(RunDir(folder).confusion, sets)
    tree = page(folder, to=tmp_path / "r.html")
    assert row(tree, "red") == ["4", "0.600", "0.750", "0.667"]
    assert row(tree, "blue") == ["1", "-", "0.000", "0.000"]


def test_the_page_has_the_profile(tmp_path: Path) -> None:
    """The largest costs and the profiler's own cost are shown."""
    run = made(tmp_path / "one", steps(1.0))
    assert "Where the time of a step goes" not in "".join(page(run, to=tmp_path / "r").itertext())
    cost = OperatorCost("ONNX Runtime", HOSTILE, 2, 0.25, 0.5)
    profile = Profile("ort", [4, 6], 0.5, 0.4, [cost])
    write_json_atomically(RunDir(run).profile, asdict(profile))
    text = "".join(page(run, to=tmp_path / "r.html").itertext())
    for line in (
        "profile of engine ort, steps 4, 6",
        "the profiler's own cost: +25.0% (0.5 s a step with it, 0.4 s without)",
        f"50.0%  0.2500   2      ONNX Runtime  {HOSTILE}",
    ):
        assert line in text
    write_json_atomically(RunDir(run).profile, {**asdict(profile), "seconds_without": None})
    text = "".join(page(run, to=tmp_path / "r.html").itertext())
    assert "0.5 s a step with the profiler; no step was measured without it" in text


def test_nothing_of_a_run_becomes_markup_or_is_loaded(tmp_path: Path) -> None:
    """No text of a run becomes markup, no script but ours may run, and secrets are absent."""
    run = made(
        tmp_path / "<b>&",
        steps(1.0),
        verdict=HOSTILE,
        launch={"env": {"MY_API_KEY": "secret", "A": HOSTILE}},
    )
    tree = page(run, to=tmp_path / "r.html")
    assert {each.tag for each in tree.iter()} & {"b", "img", "link", "iframe"} == set()
    scripts = [each for each in tree.iter("script") if each.get("type") != "application/json"]
    assert len(scripts) == 1
    text = (tmp_path / "r.html").read_text()
    (script,) = re.findall(r"(?s)<script>(.*?)</script>", text)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
    assert {name for each in tree.iter() for name in each.attrib} & {
        "src",
        "href",
        "onload",
    } == set()
    assert HOSTILE in "".join(tree.itertext())
    assert "secret" not in "".join(tree.itertext())


def test_runs_side_by_side(tmp_path: Path) -> None:
    """A page of two runs has a curve for each, and exactly the recipe fields that differ."""
    one = made(tmp_path / "a" / "run", steps(3.0, 2.0))
    other = made(
        tmp_path / "b" / "run", steps(4.0, 1.0), optimizer={"name": "sgd", "learning_rate": 0.5}
    )
    tree = page(one, other, to=tmp_path / "r.html")
    assert row(tree, "training loss") == ["2", "1"]
    assert row(tree, "optimizer.learning_rate") == ["0.1", "0.5"]
    assert "optimizer.name" not in [line[0].text for line in tree.iter("tr")]
    assert [(curve["run"], curve["index"]) for curve in figures(tree)[0]["curves"]] == [
        ("a/run", 0),
        ("b/run", 1),
    ]


def test_what_cannot_be_drawn_or_read_is_said(tmp_path: Path) -> None:
    """Values that are not finite and broken lines are reported; an incomplete last line is not."""
    run = made(tmp_path / "one", [*steps(3.0, float("nan"), None, 1.0)])
    # The second line is broken; the third is still being written.
    RunDir(run).saves.write_text('{"step": 1, "seconds": 2.0}\n{"step":\n{"step": 50, "sec')
    RunDir(run).summary.write_text("{")
    text = "".join(page(run, to=tmp_path / "r.html").itertext())
    assert "one: no finite value at step 20, 30" in text
    assert "saves.jsonl:2 is left out: no whole line of JSON" in text
    assert "saves.jsonl:3" not in text
    assert "summary.json: is damaged: not JSON at line 1, column 2" in text


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    """A run that has only a job and a recipe shows them, and no empty sections."""
    run = made(tmp_path / "one", [])
    for path in (RunDir(run).metrics, RunDir(run).engine, RunDir(run).memory, RunDir(run).commands):
        path.unlink()
    heads = [head.text for head in page(run, to=tmp_path / "r.html").iter("h2")]
    assert heads == ["Results", "Starts and bad steps", "Recipe"]


def test_a_sweep(tmp_path: Path) -> None:
    """The page of a sweep is named after it, and its best trial is the one thick line."""
    runs = [made(tmp_path / name, steps(1.0)) for name in ("0000", "0001")]
    # A narrow window shows the values of all runs below each other, with their names.
    cells = [one.get("data-run") for one in page(*runs, to=tmp_path / "r.html").iter("td")]
    assert cells[:2] == ["0000", "0001"]
    head = ("trial", "state", "steps", "loss")
    table = [("0000", "complete", 10, 1.0), ("0001", "pruned", 5, None)]
    figure = {"kind": "parallel", "axes": [], "lines": [{}]}
    best_lines = [("trial 0: loss 1", "")]
    importances = [("optimizer.learning_rate", 1.0)]
    drawn = Picture(figure, best_lines, importances, "loss", head, table)
    text = write_report_page(runs, tmp_path / "r.html", "now", drawn).read_text()
    assert f"<h1>{recipe().name}: sweep of 2 trials</h1>" in text
    assert "Thick line, the best: trial 0: loss 1<" in text
    assert row(ElementTree.fromstring(text), "0001") == ["pruned", "5", "-"]
    best_lines[0] = ("trial 0: loss 1", "trial 1 has exactly the same result")
    tied = write_report_page(runs, tmp_path / "r.html", "now", drawn).read_text()
    assert "Thick line: trial 0: loss 1; trial 1 has exactly the same result<" in tied


def test_what_is_no_run(tmp_path: Path) -> None:
    """All folders without a run are reported at once; a folder given twice is an error, too."""
    run = made(tmp_path / "one", steps(1.0))
    # A folder without job.json.
    (tmp_path / "tmp").mkdir()
    with pytest.raises(
        InputError, match=r"(?s)none: is neither a folder nor.*tmp: has no job.json"
    ):
        write_report_page([run, tmp_path / "none", tmp_path / "tmp"], tmp_path / "r.html", "now")
    with pytest.raises(InputError, match="given twice"):
        write_report_page([run, run], tmp_path / "r.html", "now")
    assert not (tmp_path / "r.html").exists()


def test_a_page_replaces_only_a_page(tmp_path: Path) -> None:
    """A page replaces an earlier report, and no other file."""
    run = made(tmp_path / "one", steps(1.0))
    assert (
        write_report_page([run], None, "now")
        == write_report_page([run], None, "later")
        == run / "report.html"
    )
    (tmp_path / "r.html").write_text("mine")
    with pytest.raises(InputError, match="exists already and is not a report"):
        write_report_page([run], tmp_path / "r.html", "now")


def test_a_long_curve_keeps_its_spikes() -> None:
    """A thinned curve keeps the largest and the smallest value of each piece."""
    points = [(float(x), 1.0) for x in range(100_000)]
    # One spike among 100,000 points.
    points[77_777] = (77_777.0, 9.0)
    drawn = thinned_points(points)
    # At most two points for each of 400 pieces.
    assert len(drawn) < 1000
    assert (77_777.0, 9.0) in drawn
