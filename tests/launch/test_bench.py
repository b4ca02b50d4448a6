"""Tests of `ortlaunch bench` and `engine.name: auto` with real jobs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ortlaunch.base.cache import cache_root_without_creating
from ortlaunch.rank import EXIT_SAVED
from tests.launch.tiny import ORTLAUNCH, noting_opens, opened, ortlaunch, processes_of
from tests.makers import CUSTOM

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
# A bench with --picture and without matplotlib fails.
PICTURE = ("--picture",) if HAS_MATPLOTLIB else ()
MODULE = """
import os, time, torch

class Net(torch.nn.Module):
    def __init__(self, width, fails, odd, says):
        super().__init__()
        self.first, self.drop, self.last = torch.nn.Linear(8, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1)
        self.fails, self.odd, self.says, self.passes = fails, odd, says, 0

    def forward(self, x, y):
        if self.fails:  # what counts passes cannot be in ONNX Runtime's graph
            self.passes += 1
            if self.passes == self.fails:
                raise ValueError("planted")
        if self.odd:  # no ONNX operator
            x = torch.special.bessel_j0(x)
        return ((self.last(self.drop(torch.relu(self.first(x)))) - y) ** 2).mean()

def model(width=64, fails=0, odd=False, says=""):
    return Net(width, fails, odd, says)

def data():
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(8, generator=generator), "y": torch.ones(1)} for _ in range(64)]
"""


def folder_with(path: Path, **sections: Any) -> Path:
    """Write the model and its recipe to a folder."""
    (path / "mine.py").write_text(MODULE)
    (path / "recipe.yaml").write_text(
        yaml.safe_dump({**CUSTOM, "name": "tiny", "train": {"max_steps": 4}, **sections})
    )
    return path


def bench(
    folder: Path, *words: str, timeout: float = 240, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `ortlaunch bench recipe.yaml` into the folder's out/, with a cache of its own."""
    command = ("bench", "recipe.yaml", *words, "--out=out")
    return ortlaunch(
        folder, *command, timeout=timeout, **{"ORTLAUNCH_CACHE": own_cache(folder), **environ}
    )


def own_cache(folder: Path, name: str = "cache") -> str:
    """Return a cache with everything that was built, and without measured engines."""
    cache = folder.parent / f"{folder.name}-{name}"
    cache.mkdir(exist_ok=True)
    for built in cache_root_without_creating().glob("*"):
        if built.name != "engines" and not (cache / built.name).exists():
            # Building the extensions again would take minutes.
            (cache / built.name).symlink_to(built.absolute())
    return str(cache)


def report_of(folder: Path) -> dict[str, Any]:
    """Return the contents of bench.json."""
    report: dict[str, Any] = json.loads((folder / "out" / "bench.json").read_text())
    return report


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run one bench of eager variants, of which two fail; return its folder and output."""
    folder = folder_with(tmp_path_factory.mktemp("bench"))
    (folder / "recipe.yaml").rename(folder / "base.yaml")
    (folder / "recipe.yaml").write_text("extends: base.yaml\n")
    ended = bench(
    # {fails: 9} fails in its second turn, {depth: 3} is no argument of the model.
        folder, *PICTURE, "--engines=eager", "--rounds=3", "--steps=2", "--profile",
        "--vary=model.arguments={width: 8},{width: 64},{width: 64, fails: 9},{depth: 3}", **noting_opens(folder),
    )  # fmt: skip
    # Status 1, because variants failed.
    assert ended.returncode == 1, ended.stdout + ended.stderr
    return folder, ended.stdout


def test_turns_are_taken_in_order(measured: tuple[Path, str]) -> None:
    """Variants take turns in order, and no turn begins before the one before it has ended."""
    # By the ranks' own clocks, all of this host.
    rows = [row for row in report_of(measured[0])["variants"] if row["state"] == "measured"]
    turns = sorted(
        (turn["begun"], turn["ended"], row["name"]) for row in rows for turn in row["turns"]
    )
    names = [name for _, _, name in turns]
    assert names == [row["name"] for row in rows] * 3
    assert len(set(names)) == 2
    assert all(ended <= begun for (_, ended, _), (begun, _, _) in zip(turns, turns[1:]))
    assert {len(turn["seconds"]) for row in rows for turn in row["turns"]} == {2}


def test_each_measured_variant_is_profiled(measured: tuple[Path, str]) -> None:
    """With --profile the table of costs of each measured variant is printed after the figures."""
    folder, out = measured
    rows = [row for row in report_of(folder)["variants"] if row["state"] == "measured"]
    assert len(rows) == 2
    for row in rows:
        text = out[: out.index(f"written: {row['folder']}/profile.json")]
        assert "profile of engine eager, steps 1, 3\n" in text
        assert "the profiler's own cost: " in text
        assert (folder / row["folder"] / "trace.json.gz").exists()


def test_a_bench_reads_each_file_once(measured: tuple[Path, str]) -> None:
    """A bench of four variants reads each file of the recipe once."""
    assert opened(measured[0]) == ["base.yaml", "recipe.yaml"]


def test_a_waiting_job_sleeps(measured: tuple[Path, str]) -> None:
    """A job uses hardly any processor time between its turns."""
    rows = report_of(measured[0])["variants"]
    waits = [turn["waited"] for row in rows if row["state"] == "measured" for turn in row["turns"]]
    assert sum(wait["seconds"] for wait in waits) > 1
    assert sum(wait["processor_seconds"] for wait in waits) < 0.1 * sum(
        wait["seconds"] for wait in waits
    )


def test_figures_follow_from_the_steps(measured: tuple[Path, str]) -> None:
    """Medians and rates follow from the recorded steps; memory, first step and parity exist."""
    first = report_of(measured[0])["variants"][0]
    took = sorted(seconds for turn in first["turns"] for seconds in turn["seconds"])
    assert first["seconds"]["median"] == pytest.approx((took[2] + took[3]) / 2)
    assert (first["seconds"]["min"], first["seconds"]["max"]) == (took[0], took[-1])
    assert first["samples_per_second"] == pytest.approx(2 / first["seconds"]["median"])
    # Samples of a custom model have no tokens.
    assert (first["tokens_per_second"], first["mfu"]) == (None, None)
    assert 50e6 < first["memory"][0] < 4e9
    assert 0 < first["first_step"]["since_model"] < first["first_step"]["since_launch"] < 120
    assert first["parity"] == {"verdict": "reference"}
    assert first["ratio"] == 1.0


def test_one_that_fails_is_told_and_the_others_go_on(measured: tuple[Path, str]) -> None:
    """A variant that fails is reported with its reason, and the others continue."""
    folder, out = measured
    rows = report_of(folder)["variants"]
    assert [row["state"] for row in rows] == ["measured", "measured", "failed", "failed"]
    assert "ValueError: planted" in rows[2]["reason"]
    assert "Traceback" in rows[2]["reason"]
    assert f"{rows[2]['name']}: failed: ValueError: planted" in out
    assert "depth" in rows[3]["reason"]


def test_the_table(measured: tuple[Path, str]) -> None:
    """The table has a line for each variant, and then the written files."""
    folder, out = measured
    first, second, *_ = report_of(folder)["variants"]
    lines = out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("variant "))
    assert lines[head].split()[1:3] == ["s/step", "middle"]
    assert lines[head + 1].startswith(first["name"])
    assert f"{first['seconds']['median']:.4g}" in lines[head + 1]
    assert lines[head + 1].endswith("reference  1.00 x")
    assert lines[head + 2].startswith(second["name"])
    assert any(line.startswith("written: out/bench.json, out/bench.html") for line in lines)


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_the_picture(measured: tuple[Path, str]) -> None:
    """bench.png is a PNG of a plausible size."""
    import struct

    data = (measured[0] / "out" / "bench.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (width >= 600, height >= 150) == (True, True)
    # A picture of a single color would be smaller.
    assert len(data) > 3000


def test_no_process_is_left(measured: tuple[Path, str]) -> None:
    """No process of the jobs outlives the bench."""
    assert processes_of(measured[0]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.ci), signal.SIGTERM]
)
def test_a_stopped_bench_leaves_no_process(number: int, tmp_path: Path) -> None:
    """A signal between turns ends every job, and determines the exit status."""
    folder = folder_with(tmp_path)
    command = [
        sys.executable,
        "-m",
        "ortlaunch.cli",
        "bench",
        "recipe.yaml",
        "--engines=eager",
        "--rounds=100000",
    ]
    words = ["--vary=seed=1,2", f"--out={tmp_path / 'out'}"]
    process = subprocess.Popen(
        [*command, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "ORTLAUNCH_CACHE": own_cache(tmp_path)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("round 2/"):
            assert process.poll() is None
        # Two jobs, each with its supervisor.
        assert len(processes_of(tmp_path)) >= 4
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    deadline = time.monotonic() + 10
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(tmp_path) == []
    assert process.returncode == 128 + number
    assert said.splitlines()[-1] == f"ortlaunch: stopped by {signal.Signals(number).name}"


def test_what_cannot_be_measured_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Arguments that cannot be measured are refused with status 2, and nothing is written."""
    folder = folder_with(tmp_path, precision="bf16")
    alone = bench(folder, "--engines=ort")
    assert (alone.returncode, "precision: got bf16 with engine ort" in alone.stderr) == (2, True)
    for words, part in {
        ("--engines=jax",): "--engines jax: give one or more of ort, inductor, eager",
        ("--vary=seed",): "--vary seed: write it as --vary key.path=first,second",
        ("--vary=engine.name=ort",): "use --engines to choose engines",
        ("--vary=seed=1,1",): "--vary: ort seed=1 is given twice",
    }.items():
        ended = bench(folder, *words)
        assert (ended.returncode, part in ended.stderr) == (2, True), ended.stderr
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    inside = bench(folder, "--engines=eager", **rank)
    assert (inside.returncode, "start it outside" in inside.stderr) == (2, True)
    assert sorted(path.name for path in folder.iterdir()) == ["mine.py", "recipe.yaml"]
    (folder / "out").mkdir()
    (folder / "out" / "thesis.tex").write_text("")
    used = bench(folder, "--engines=eager")
    assert (used.returncode, "give --out a new folder" in used.stderr) == (2, True)


@pytest.mark.slow
def test_one_at_a_time(tmp_path: Path) -> None:
    """With --one-at-a-time each variant is started for each turn, and no job waits for another."""
    folder = folder_with(tmp_path)
    ended = bench(
        folder,
        "--engines=eager",
        "--vary=seed=1,2",
        "--rounds=2",
        "--steps=1",
        "--one-at-a-time",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = report_of(folder)["variants"]
    assert [len(row["turns"]) for row in rows] == [2, 2]
    assert ended.stdout.count("first step") >= 4
    assert all(turn["waited"]["seconds"] < 1 for row in rows for turn in row["turns"])


@pytest.mark.slow
def test_all_engines(tmp_path: Path) -> None:
    """ort, inductor and eager pass parity, and auto uses the fastest from then on."""
    folder = folder_with(tmp_path)
    ended = bench(folder, "--rounds=3", "--steps=3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = {row["name"]: row for row in report_of(folder)["variants"]}
    assert {name: row["parity"]["verdict"] for name, row in rows.items()} == {
        "ort": "passes", "inductor": "passes", "eager": "reference"
    }  # fmt: skip
    assert 0 < rows["ort"]["parity"]["gradient"] < 1e-4
    assert rows["ort"]["truth"]["engine"]["used"] == "ort"
    best = max(rows.values(), key=lambda row: row["samples_per_second"])["name"]
    assert f"engine.name: auto will choose {best} for this recipe on this machine" in ended.stdout
    planned = ortlaunch(
        folder, "plan", "recipe.yaml", "engine.name=auto", ORTLAUNCH_CACHE=own_cache(folder)
    )
    assert f"engine auto: {best}: measured" in planned.stdout
    assert "(cached)" in planned.stdout


@pytest.mark.slow
def test_two_ranks_and_a_model_that_ort_cannot_run(tmp_path: Path) -> None:
    """A model that ONNX Runtime cannot run is reported, and eager is measured all the same."""
    folder = folder_with(tmp_path)
    vary = "--vary=model.arguments={odd: false},{odd: true}"
    ended = bench(
        folder, "--engines=ort,eager", vary, "--rounds=2", "--steps=2", "--nproc-per-node=2"
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    rows = report_of(folder)["variants"]
    assert [(row["engine"], row["state"]) for row in rows] == [
        ("ort", "measured"), ("eager", "measured"), ("ort", "failed"), ("eager", "measured")
    ]  # fmt: skip
    assert [len(row["memory"]) for row in rows if row["state"] == "measured"] == [2, 2, 2]
    assert rows[0]["parity"]["verdict"] == "passes"
    assert "ONNX Runtime cannot run this model" in rows[2]["reason"]
    assert rows[3]["ratio_to"] == rows[3]["name"]
    assert processes_of(folder) == []


@pytest.mark.slow
def test_auto_measures_once_and_takes_the_fastest(tmp_path: Path) -> None:
    """The first training measures the engines, later ones use the stored choice.

    A run that continues keeps its own engine. A short run measures nothing.
    """
    # A run that is long enough for a measurement is stopped.
    folder = folder_with(tmp_path, engine={"name": "auto"}, train={"max_steps": 10**7})
    short = ortlaunch(
        folder, "train", "recipe.yaml", "--run-dir=short", "train.max_steps=4", "model.arguments.odd=true",
        timeout=60, ORTLAUNCH_CACHE=own_cache(folder, "unused"),
    )  # fmt: skip
    assert short.returncode == 0, short.stdout + short.stderr
    assert "engine auto: ort: not measured: 48 steps of a measurement are more" in short.stdout
    engine = json.loads((folder / "short" / "engine.json").read_text())["engine"]
    assert (engine["asked"], engine["chosen"]) == ("auto", "ort")
    assert engine["why"].startswith("not measured: ")
    # One of too short steps: eager alone was started.
    few = ortlaunch(
        folder, "train", "recipe.yaml", "--run-dir=few", "train.max_steps=961", timeout=120,
        ORTLAUNCH_CACHE=own_cache(folder, "unused"),
    )  # fmt: skip
    assert few.returncode == 0, few.stdout + few.stderr
    why = json.loads((folder / "few" / "engine.json").read_text())["engine"]["why"]
    assert "as predicted by eager's first steps" in why
    assert [path.name for path in (folder / "bench").glob("*/*")] == ["eager"]
    shutil.rmtree(folder / "bench")
    cache = {"ORTLAUNCH_CACHE": own_cache(tmp_path)}
    command = [ORTLAUNCH, "train", "recipe.yaml", "--run-dir=one"]
    with subprocess.Popen(
        command, cwd=folder, env={**os.environ, **cache, **noting_opens(folder)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        while process.poll() is None and not list(folder.glob("bench/*/*/results.jsonl")):
            time.sleep(0.1)
        # The recipe was read already: a change while the engines are measured has no effect.
        recipe = (folder / "recipe.yaml").read_text()
        (folder / "recipe.yaml").write_text(recipe.replace("max_steps: 10000000", "max_steps: 99"))
        metrics = folder / "one" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and '"loss"' in metrics.read_text()):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        first = subprocess.CompletedProcess(
            command, process.wait(), *process.communicate(timeout=240)
        )
    (folder / "recipe.yaml").write_text(recipe)
    assert opened(folder) == ["recipe.yaml"]
    assert "\n  max_steps: 10000000\n" in (folder / "one" / "recipe.yaml").read_text()
    assert first.returncode == EXIT_SAVED, first.stdout + first.stderr
    report = json.loads(next((folder / "bench").glob("*/bench.json")).read_text())
    rates = {row["name"]: row["samples_per_second"] for row in report["variants"]}
    best = max(rates, key=lambda name: rates[name])
    truth = json.loads((folder / "one" / "engine.json").read_text())["engine"]
    assert (truth["asked"], truth["used"], truth["chosen"]) == ("auto", best, best)
    assert truth["why"].startswith("measured ")
    assert set(truth["measured"]) == {"ort", "inductor", "eager"}
    assert f"engine auto: {best}: measured" in first.stdout

    # The same recipe in another folder: the cache has the choice.
    second = ortlaunch(
        folder, "train", "recipe.yaml", "--run-dir=two", "train.max_steps=2", timeout=60, **cache
    )
    assert second.returncode == 0, second.stderr
    assert f"engine auto: {best}: {truth['why']} (cached)" in second.stdout
    assert len(list((folder / "bench").iterdir())) == 1

    # With an empty cache, the run folder still has the choice.
    done = max(int(path.name[5:]) for path in (folder / "one" / "checkpoints").glob("step_*"))
    again = ortlaunch(
        folder, "train", "recipe.yaml", "--run-dir=one", f"train.max_steps={done + 2}", timeout=60,
        ORTLAUNCH_CACHE=own_cache(folder, "empty"),
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert f"engine auto: {best}: {truth['why']} (at the start of this run)" in again.stdout
    assert f"resumed after step {done}" in again.stdout
    assert len(list((folder / "bench").iterdir())) == 1
