"""Compare whole jobs, from the command to the exported model, with those of peers, in turns.

python benchmarks/jobs.py RESULTS.json
    jobs a to i by ours on engines ort and eager, Trainer, TRL and LLaMA-Factory, three turns
python benchmarks/jobs.py RESULTS.json --jobs a,b --tools ours-ort,trainer --turns 1
python benchmarks/jobs.py RESULTS.json --tools ours-default --ours before=/.../bin --ours after=/.../bin
    two versions of ours, each in an environment of its own, in the same turns
python benchmarks/jobs.py RESULTS.json --show
    the tables and the picture of what the file has

A tool of ours is `ours-` and an engine; `ours-default` takes the engine that the recipe has without
one. RESULTS.json gets every run as it ends, and a later call adds to it; RESULTS.svg beside it is
the picture. Recipes and peers' scripts are in benchmarks/whole_jobs. Data and models are written
once into --cache, which also has an environment of each peer with the versions of
whole_jobs/environments.py. Jobs b and c begin with the weights that a and d end with.

Before the turns of a job each tool runs two steps of it: caches are filled, so that all turns are
warm, and a tool that cannot run is left out with its reason. A run whose neighbours took more than
a twentieth of a core is marked *: only a quiet machine gives figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import finetune
from whole_jobs import environments, job_run

HERE = Path(__file__).with_name("whole_jobs")
ENGINES = ("ort", "eager", "inductor", "auto", "default")
# Ours prints a line of every tenth step, at which the signal is sent.
STOP_STEP = 100
RATES = ("1e-4", "2e-4", "4e-4", "8e-4", "1e-3", "2e-3", "4e-3", "8e-3")
# A run beside neighbours that took a larger share of a core is not a figure.
NOISE = 0.05
SETTINGS = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
# Each process would compile what it imports; lines of the output would come late, or at once.
REMOVED_SETTINGS = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")


class Job(NamedTuple):
    """One row of the table."""

    title: str
    peers: tuple[str, ...]
    alike: str | None = None
    """The job whose recipe and warm-up it has."""


JOBS = {
    "a": Job("BERT masked-LM, 150 steps of 32 x 128", ("trainer",)),
    "b": Job("classification, 250 steps of 16 x 64, 2 evaluations", ("trainer",)),
    "c": Job("LoRA chats, packed 512, steps of 8, 2 epochs", ("trl", "llama-factory")),
    "d": Job("pretraining Llama, 40 steps of 16 x 256", ("trainer", "trl")),
    "e": Job("a tiny run, 20 steps", ("trainer",)),
    "f": Job(f"a, stopped by SIGTERM at step {STOP_STEP}, continued", ("trainer",), "a"),
    "g": Job("d in 2 processes", ("trainer",), "d"),
    "h": Job("8 trials of e", ("trainer",), "e"),
    "i": Job("b beside a busy neighbour", ("trainer",), "b"),
}


class Tool(NamedTuple):
    """A contestant."""

    name: str
    kind: str
    """A peer's name, or an engine of ours."""
    programs: Path
    """The folder of its commands."""


class Part(NamedTuple):
    """One command of a job."""

    command: list[str]
    stop: job_run.Stop | None = None
    exit_statuses: tuple[int, ...] = (0,)


# ------------------------------------------------------------ commands


def parts_of_job(job: str, tool: Tool, out: Path, warm_up: bool = False) -> list[Part]:
    """Return the commands of a job, or of two steps of it, which run one after another."""
    if tool.kind in ENGINES:
        return own_parts(job, tool, out, warm_up)
    python = str(tool.programs / "python")
    if tool.kind == "llama-factory":
        words = [str(HERE / "llama_factory.yaml"), f"output_dir={out}"]
        steps = ["max_steps=2"] if warm_up else []
        return [Part([str(tool.programs / "llamafactory-cli"), "train", *words, *steps])]
    script = str(HERE / f"{tool.kind}_job.py")
    words = [script, JOBS[job].alike or job, str(out), *(["--steps=2"] if warm_up else [])]
    if job == "f":
        # It trains on for three seconds, saves, and ends as a whole training does.
        words += ["--save-at-sigterm"]
        stop = job_run.Stop(rf"\bstep {STOP_STEP}/")
        return [Part([python, *words], stop), Part([python, *words, "--resume"])]
    if job == "g":
        torchrun = [str(tool.programs / "torchrun"), "--standalone", "--nproc-per-node=2"]
        return [Part([*torchrun, *words, "--micro-batch=8"])]
    if job == "h":
        return [Part([python, *words, f"--learning-rate={rate}"]) for rate in RATES]
    return [Part([python, *words])]


def own_parts(job: str, tool: Tool, out: Path, warm_up: bool) -> list[Part]:
    """Return ortlaunch's commands of a job."""
    recipe = job if job == "h" else JOBS[job].alike or job
    command = [str(tool.programs / "ortlaunch"), "sweep" if job == "h" else "train"]
    command += [str(HERE / f"{recipe}.yaml"), f"--run-dir={out}"]
    command += [f"engine.name={tool.kind}"] if tool.kind != "default" else []
    if warm_up:
        command += ["train.max_steps=2", "train.epochs=null"]
    if job == "f":
        stop = job_run.Stop(rf"\bstep {STOP_STEP}/")
        return [Part(command, stop, (85,)), Part(command)]
    if job == "g":
        command += ["--nproc-per-node=2", "batch.micro_size=8"]
    return [Part(command)]


# ------------------------------------------------------------ runs


class Failed(Exception):
    """A run failed; the text has the end of its log."""


def run_job(
    job: str, tool: Tool, cache: Path, timeout_seconds: float, warm_up: bool = False
) -> dict[str, Any]:
    """Run a job once, and return its record.

    Raises:
        Failed: a command ended with another status than it should.
    """
    name = f"{job}-{tool.name}{'-warm-up' if warm_up else ''}"
    out = cache / "runs" / name
    shutil.rmtree(out, ignore_errors=True)
    logs = cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if key not in REMOVED_SETTINGS}
    environ = {**kept, **SETTINGS, "HF_HOME": str(cache / "huggingface")}
    parts = parts_of_job(job, tool, out, warm_up)
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    measures = []
    logs_of_parts = []
    with job_run.busy_neighbour() if job == "i" else contextlib.nullcontext() as neighbour:
        for number, part in enumerate(parts):
            log = logs / f"{name}-{number}.log"
            each = job_run.run_and_measure(
                part.command, log, cache / "inputs", environ, timeout_seconds, part.stop, neighbour
            )
            if each.exit_status not in part.exit_statuses:
                words = " ".join(part.command)
                raise Failed(f"{words} ended with {each.exit_status}:\n{log.read_text()[-2000:]}")
            measures.append(each)
            logs_of_parts.append(log)
    record = {
        "job": job, "tool": tool.name, "at": at, "commands": [each._asdict() for each in measures],
        "wall_seconds": sum(each.wall_seconds for each in measures),
        "user_seconds": sum(each.user_seconds for each in measures),
        "system_seconds": sum(each.system_seconds for each in measures),
        "peak_resident_bytes": max(each.peak_resident_bytes for each in measures),
        "peak_proportional_bytes": max(each.peak_proportional_bytes for each in measures),
        "other_cpu_seconds": sum(each.other_cpu_seconds for each in measures),
        **({} if warm_up else results_of_job(job, tool, out, logs_of_parts)),
    }  # fmt: skip
    shutil.rmtree(out, ignore_errors=True)
    return record


def results_of_job(job: str, tool: Tool, out: Path, logs: list[Path]) -> dict[str, Any]:
    """Return loss and accuracy, and of ours the seconds of each part of the last command.

    The loss of several trials is the lowest.
    """
    if tool.kind == "llama-factory":
        history = json.loads((out / "trainer_state.json").read_text())["log_history"]
        return {"loss": [entry["loss"] for entry in history if "loss" in entry][-1]}
    if tool.kind not in ENGINES:
        lines = [re.findall(r"^RESULT (.*)$", log.read_text(), re.M)[-1] for log in logs]
        results = [json.loads(line) for line in (lines if job == "h" else lines[-1:])]
        best = min(results, key=lambda result: result["loss"][-1:])
        return {name: values[-1] for name, values in best.items() if values}
    if job == "h":
        # The trials' own parts, together.
        summaries = [json.loads(path.read_text()) for path in out.glob("trials/*/summary.json")]
        names = dict.fromkeys(name for each in summaries for name in each["seconds"])
        seconds = {name: sum(s["seconds"].get(name, 0) for s in summaries) for name in names}
        return {"loss": min(each["loss"] for each in summaries), "parts": seconds}
    summary = json.loads((out / "summary.json").read_text())
    record = json.loads((out / "engine.json").read_text())["engine"]["used"]
    accuracy = (summary.get("evaluation") or {}).get("classification_accuracy")
    return {
        "loss": summary["loss"], "parts": summary["seconds"], "engine": record,
        "step_seconds": summary.get("step_seconds"),
        **({} if accuracy is None else {"accuracy": accuracy}),
    }  # fmt: skip


# ------------------------------------------------------------ data, models and environments


def prepare_inputs(cache: Path, tool: Tool, classifier: str) -> str:
    """Write data and models unless they are there; return the name of job b's pretrained model."""
    inputs = cache / "inputs"
    if not (inputs / "complete").exists():
        print(f"writing data and models into {inputs}", flush=True)
        python = str(tool.programs / "python")
        subprocess.run([python, str(HERE / "make_inputs.py"), str(inputs)], check=True)
        for job, name in (("a", "bert-base"), ("d", "llama-base")):
            print(f"training {job}, whose export others begin with", flush=True)
            shutil.rmtree(cache / "runs" / name, ignore_errors=True)
            command = [str(tool.programs / "ortlaunch"), "train", str(HERE / f"{job}.yaml")]
            command += [f"--run-dir={cache / 'runs' / name}", "engine.name=eager"]
            subprocess.run(command, check=True, cwd=inputs, stdout=subprocess.DEVNULL)
            shutil.copytree(cache / "runs" / name / "export", inputs / "models" / name)
        (inputs / "complete").touch()
    names = {"bert": inputs / "models" / "bert-base"}
    if classifier == "minilm":
        names["minilm"] = finetune.fetch_model(cache)
    base = inputs / "models" / "classifier-base"
    base.unlink(missing_ok=True)
    base.symlink_to(names[classifier])
    return "the export of job a" if classifier == "bert" else "MiniLM, 22 million parameters"


def requested_tools(options: argparse.Namespace, cache: Path) -> list[Tool]:
    """Return the contestants; a peer whose environment cannot be made is named and left out."""
    labels = dict(each.split("=", 1) for each in options.ours)
    labels = labels or {"ours": str(Path(sys.executable).parent)}
    tools = []
    for word in options.tools.split(","):
        if word.startswith("ours-"):
            engine = word.removeprefix("ours-")
            if engine not in ENGINES:
                raise SystemExit(f"--tools: {word}: one of {', '.join(ENGINES)} after ours-")
            tools += [Tool(f"{x}-{engine}", engine, Path(path)) for x, path in labels.items()]
        elif word not in environments.PINS:
            raise SystemExit(f"--tools: got {word}; ours-ENGINE, {', '.join(environments.PINS)}")
        else:
            try:
                programs = environments.make_environment_unless_there(word, cache)
                tools.append(Tool(word, word, programs))
            except environments.NoEnvironment as error:
                print(f"{word} is left out: its environment cannot be made: {error}", flush=True)
    return tools


def machine() -> str:
    """Return the processor and the number of cores that this process may use."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = model[1] if model else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores of {name}, {platform.system()}"


# ------------------------------------------------------------ tables


def is_noisy(record: dict[str, Any]) -> bool:
    """Whether other processes took so much time that the run is no figure."""
    return bool(record["other_cpu_seconds"] > NOISE * record["wall_seconds"])


def runs_by_tool(record: dict[str, Any], job: str) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of a job, by the name of the tool."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in record["runs"]:
        if run["job"] == job:
            found.setdefault(run["tool"], []).append(run)
    return found


def median(runs: Iterable[dict[str, Any]], name: str) -> float:
    """Return the median of a value of all runs."""
    return float(statistics.median(run[name] for run in runs))


def fastest_peer_seconds_or_none(runs: dict[str, list[dict[str, Any]]]) -> float | None:
    """Return the median of the fastest peer."""
    seconds = [median(found, "wall_seconds") for tool, found in runs.items() if is_peer(tool)]
    return min(seconds, default=None)


def is_peer(tool: str) -> bool:
    """Whether a tool is none of ours."""
    return tool in environments.PINS


def results_table(record: dict[str, Any]) -> str:
    """Return the table of all jobs, with the wall time by that of the fastest peer."""
    rows = [["job", "tool", "wall s, median", "turns", "by the fastest peer", "CPU s (system)",
             "peak MB", "shared pages counted once", "last loss", "accuracy"]]  # fmt: skip
    for job, (title, *_) in JOBS.items():
        runs = runs_by_tool(record, job)
        fastest = fastest_peer_seconds_or_none(runs)
        label = f"{job}: {title}"
        for tool, found in runs.items():
            wall = median(found, "wall_seconds")
            turns = [f"{run['wall_seconds']:.1f}{'*' * is_noisy(run)}" for run in found]
            cpu = median(found, "user_seconds") + median(found, "system_seconds")
            rows.append([
                label, tool_with_engines(tool, found), f"{wall:.1f}", " ".join(turns),
                f"{wall / fastest:.2f}" if fastest else "",
                f"{cpu:.0f} ({median(found, 'system_seconds'):.0f})",
                f"{median(found, 'peak_resident_bytes') / 2**20:,.0f}",
                f"{median(found, 'peak_proportional_bytes') / 2**20:,.0f}",
                f"{found[-1]['loss']:.4f}",
                f"{found[-1]['accuracy']:.2%}" if "accuracy" in found[-1] else "",
            ])  # fmt: skip
            # The title once for a job.
            label = ""
    return markdown(rows)


def tool_with_engines(tool: str, runs: list[dict[str, Any]]) -> str:
    """Return the name with the engines that ran, where it does not name them."""
    engines = dict.fromkeys(run["engine"] for run in runs if "engine" in run)
    others = [engine for engine in engines if not tool.endswith(f"-{engine}")]
    return f"{tool} ({', '.join(others)})" if others else tool


def parts_table(record: dict[str, Any]) -> str:
    """Return the seconds of each part of ours, medians; those of h are of all trials together."""
    columns = [
        (job, tool, [run for run in found if "parts" in run])
        for job in JOBS
        for tool, found in runs_by_tool(record, job).items()
        if not is_peer(tool)
    ]
    names = dict.fromkeys(name for *_, found in columns for run in found for name in run["parts"])
    rows = [["seconds", *(f"{job} {tool}" for job, tool, _ in columns)]]

    def add_row(label: str, value: Callable[[dict[str, Any]], float | None]) -> None:
        cells = []
        for *_, found in columns:
            values = [each for run in found if (each := value(run)) is not None]
            cells.append(f"{statistics.median(values):.2f}" if values else "")
        rows.append([label, *cells])

    add_row("command, supervisor, exit", lambda run: (
        run["commands"][-1]["wall_seconds"] - sum(run["parts"].values())
    ))  # fmt: skip
    for name in names:
        add_row(name, lambda run, name=name: run["parts"].get(name))  # type: ignore[misc]
    add_row("a step, median", lambda run: run.get("step_seconds"))
    return markdown(rows)


def means_lines(record: dict[str, Any]) -> str:
    """Return the geometric mean of each tool's speed, where the fastest peer's is 1."""
    lines = []
    for tool in dict.fromkeys(run["tool"] for run in record["runs"] if not is_peer(run["tool"])):
        speeds = []
        for job in JOBS:
            runs = runs_by_tool(record, job)
            fastest = fastest_peer_seconds_or_none(runs)
            if fastest and tool in runs:
                speeds.append(fastest / median(runs[tool], "wall_seconds"))
        if speeds:
            mean = statistics.geometric_mean(speeds)
            lines.append(f"{tool}: {mean:.2f} times as fast as the fastest peer (geometric mean of "
                         f"{len(speeds)} jobs; {min(speeds):.2f} to {max(speeds):.2f})")  # fmt: skip
    return "\n".join(lines)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table; the first is its head."""
    head, *others = rows
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *others])


# ------------------------------------------------------------ picture

COLORS = ("#d1495b", "#2e86ab", "#e0a030", "#6a994e", "#8e6bbf", "#3d9a9a", "#b07050", "#7a828c")
_LEFT = 350
_WIDTH = 480
_ROW = 26
_TOP = 60


def picture(record: dict[str, Any]) -> str:
    """Return an SVG: a row for each job, a dot for each tool's speed, the fastest peer's = 1.

    The background is transparent, and all colours are readable on white and on black.
    """
    speeds: dict[str, dict[str, float]] = {}
    for job in JOBS:
        runs = runs_by_tool(record, job)
        if fastest := fastest_peer_seconds_or_none(runs):
            speeds[job] = {x: fastest / median(found, "wall_seconds") for x, found in runs.items()}
    tools = list(dict.fromkeys(tool for found in speeds.values() for tool in found))
    color = dict(zip(tools, COLORS * len(tools)))
    high = max([1.5, *(x for found in speeds.values() for x in found.values())]) + 0.1
    height = _TOP + _ROW * len(speeds) + 40

    def x(speed: float) -> float:
        return _LEFT + _WIDTH * speed / high

    def dot(left: float, y: float, tool: str, title: str) -> str:
        return (
            f'<circle cx="{left:.1f}" cy="{y}" r="5" fill="{color[tool]}">'
            f"<title>{title}</title></circle>"
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 24} {height}" '
        'font-family="sans-serif" font-size="12" fill="#7a828c">',
        '<text x="8" y="16">Speed of whole jobs, from the command to the exported model; the '
        f"fastest peer = 1; {record['machine']}</text>",
    ]
    for number, tool in enumerate(tools):
        left = 14 + number * 120
        parts.append(dot(left, 36, tool, tool) + f'<text x="{left + 10}" y="40">{tool}</text>')
    bottom = height - 36
    for half in range(int(high * 2) + 1):
        strong = ' stroke-width="2"' if half == 2 else ' stroke-opacity="0.3"'
        parts.append(
            f'<path d="M{x(half / 2):.1f} {_TOP - 8}V{bottom}" stroke="#7a828c"{strong}/>'
            f'<text x="{x(half / 2):.1f}" y="{bottom + 16}" text-anchor="middle">{half / 2}</text>'
        )
    for row, (job, found) in enumerate(speeds.items()):
        y = _TOP + _ROW * row + 6
        label = f"{job}: {JOBS[job].title}"
        parts.append(f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end">{label}</text>')
        parts += [dot(x(v), y, tool, f"{job}, {tool}: {v:.2f} x") for tool, v in found.items()]
    return "\n".join([*parts, "</svg>", ""])


# ------------------------------------------------------------ the command


def run_turns(
    record: dict[str, Any], tools: list[Tool], options: argparse.Namespace, save: Callable[[], None]
) -> None:
    """Run the requested jobs in turns, and add each run to the record as it ends."""
    warm: set[tuple[str, str]] = set()
    for job in options.jobs.split(","):
        contestants = [tool for tool in tools if tool.kind in (*ENGINES, *JOBS[job].peers)]
        for tool in list(contestants):
            # Jobs that are alike fill the same caches.
            base = JOBS[job].alike or job
            if (base, tool.name) in warm:
                continue
            print(f"{job}: warming up {tool.name}", flush=True)
            try:
                run_job(base, tool, options.cache, options.timeout, warm_up=True)
                warm.add((base, tool.name))
            except Failed as error:
                contestants.remove(tool)
                record["failed"].append({"job": job, "tool": tool.name, "reason": str(error)})
                print(f"{job}: {tool.name} is left out: {error}", flush=True)
        for turn in range(options.turns):
            for tool in list(contestants):
                try:
                    run = run_job(job, tool, options.cache, options.timeout)
                except Failed as error:
                    contestants.remove(tool)
                    record["failed"].append({"job": job, "tool": tool.name, "reason": str(error)})
                    print(f"{job}: {tool.name} failed in turn {turn + 1}: {error}", flush=True)
                    save()
                    continue
                record["runs"].append({**run, "turn": turn + 1})
                save()
                print(f"{run['at']} {job} {tool.name} turn {turn + 1}: "
                      f"{run['wall_seconds']:.1f} s, loss {run['loss']:.4f}"
                      f"{', beside other work' * is_noisy(run)}", flush=True)  # fmt: skip


def main() -> int:
    """Run jobs and print their tables; status 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="JSON file, which later calls add to")
    parser.add_argument("--jobs", default=",".join(JOBS), help="letters, with a comma")
    parser.add_argument(
        "--tools", default=f"ours-ort,ours-eager,{','.join(environments.PINS)}",
        help="names, with a comma",
    )  # fmt: skip
    parser.add_argument(
        "--ours", action="append", default=[], metavar="LABEL=BIN",
        help="a bin folder with an ortlaunch command, repeatable; by default this Python's",
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of one command")
    parser.add_argument(
        "--classifier", choices=("bert", "minilm"), default="bert",
        help="job b begins with the export of a, or with the MiniLM of finetune.py",
    )  # fmt: skip
    parser.add_argument("--show", action="store_true", help="run nothing")
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    parser.add_argument("--cache", type=Path, default=base / "ortlaunch-jobs")
    options = parser.parse_args()
    if unknown := set(options.jobs.split(",")) - set(JOBS):
        parser.error(f"--jobs: got {', '.join(sorted(unknown))}; of {', '.join(JOBS)}")
    record: dict[str, Any] = {"machine": machine(), "versions": {}, "runs": [], "failed": []}
    if options.results.exists():
        record = json.loads(options.results.read_text())
    failed_before = len(record["failed"])

    def save() -> None:
        options.results.write_text(json.dumps(record, indent=1) + "\n")
        options.results.with_suffix(".svg").write_text(picture(record))

    if not options.show:
        # So that the processes of a job end when this one does.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        job_run.adopt_orphans()
        options.cache = options.cache.resolve()
        options.cache.mkdir(parents=True, exist_ok=True)
        tools = requested_tools(options, options.cache)
        own = [tool for tool in tools if tool.kind in ENGINES]
        own_or_default = own or [Tool("ours-eager", "eager", Path(sys.executable).parent)]
        record["classifier"] = prepare_inputs(options.cache, own_or_default[0], options.classifier)
        for tool in tools:
            versions = environments.installed_versions(tool.programs / "python")
            record["versions"][tool.name] = versions
            print(f"{tool.name}: {environments.shown_versions(versions)}", flush=True)
        run_turns(record, tools, options, save)
    save()
    print(f"\n{record['machine']}; job b begins with {record['classifier']}; seconds are medians, "
          "* beside other work; memory is that of all processes together\n\n"
          f"{results_table(record)}\n\n{means_lines(record)}\n\n{parts_table(record)}", flush=True)  # fmt: skip
    for each in record["failed"]:
        print(f"failed: {each['job']}, {each['tool']}: {each['reason'].splitlines()[0]}")
    return int(len(record["failed"]) > failed_before)


if __name__ == "__main__":
    sys.exit(main())
