"""The proof that ortlaunch works on a GPU, in parts of less than ten minutes: results.json and a page made of it.

`make gpu`, or `python tools/gpu_proof.py --part bert --out proof`. What has a result in the folder is not run again, so
a call that was stopped, or whose minutes were over, goes on with the next. `--device cpu` rehearses every part at a
tiny size. Exit status: 1 where a case failed, 3 where cases are left for another call, 2 where it cannot be run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_smoke
from gpu_cases import FOLDER, PARTS, Case, Form, cases, form, plan_command, planned_bytes
from gpu_page import page
from gpu_verdicts import FAILED, PASSED, SKIPPED, Ended, Verdict

from ortlaunch.resolve import provenance
from ortlaunch.units import human
from tests.e2e import forked

ROOT = Path(__file__).resolve().parents[1]
CASE_SECONDS = 600  # no case may take longer, whatever the call has
LEFT = 3  # exit status: call again
_ASKS_TORCH = """
import json, torch
found = torch.cuda.is_available()
device = torch.cuda.get_device_properties(0) if found else None
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "name": device and device.name,
    "memory": device and device.total_memory, "capability": device and float(f"{device.major}.{device.minor}")}))
"""
_TOLD = ("torch", "transformers", "deepspeed", "peft", "onnxruntime-training", "onnxruntime-training-cpu", "numpy")


def main() -> int:
    """Run what is asked and has no result yet."""
    options = _options()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    options.out.mkdir(parents=True, exist_ok=True)
    machine = _machine(options.device)
    results = _read(options.out, machine)
    wanted = [case for part in options.part for case in cases(part, form(options.device, options.ranks))]
    wanted = [case for case in wanted if case.is_reference or any(word in case.key for word in options.only)]
    with tempfile.TemporaryDirectory(prefix="gpu-proof-") as scratch:
        left = _run_all(wanted, results, options, Path(scratch))
    return _conclusion([case.key for case in wanted], results, left, options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=["all"], choices=[*PARTS, "all"], help="default: all")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="cases with such a word in their names")
    parser.add_argument("--out", type=Path, default=Path("gpu-proof"), help="folder of results.json and page.md")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, tiny")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=1, help="ranks of a run, one a GPU")
    parser.add_argument("--minutes", type=float, default=9, help="nothing goes on for longer; call again (default 9)")
    parser.add_argument("--again", action="store_true", help="run what has a result, too")
    parser.add_argument(
        "--at-once", type=int, metavar="N", help="runs of smoke and functions; default: cores / 4, 1 - 4"
    )
    options = parser.parse_args()
    cores = (os.cpu_count() or 1) // (4 if options.device == "cuda" else 1)
    options.at_once = options.at_once or max(1, min(4, cores))
    options.part = list(PARTS) if "all" in options.part else list(dict.fromkeys(options.part))
    return options


# ----------------------------------------------------------------------------------------------- running cases


def _run_all(wanted: list[Case], results: dict[str, Any], options: argparse.Namespace, scratch: Path) -> list[str]:
    """Run cases, each result written at once; the keys of those that time was too short for."""
    deadline, left = time.monotonic() + 60 * options.minutes, list[str]()
    todo = list(_not_done(wanted, results["cases"], options.again))
    for is_forked, group in itertools.groupby(todo, lambda case: bool(case.forked)):
        if left:
            left += [case.key for case in group]
        else:
            (_run_forked if is_forked else _run_in_turn)(list(group), results, options, scratch, deadline, left)
    return left


def _run_in_turn(
    cases: list[Case], results: dict[str, Any], options: argparse.Namespace, scratch: Path, deadline: float,
    left: list[str],
) -> None:  # fmt: skip
    """One case after the other."""
    longest: dict[str, float] = {}  # seconds by part
    shape = form(options.device, options.ranks)
    for number, case in enumerate(cases):
        remaining = deadline - time.monotonic()
        if left or remaining < longest.get(case.part, 0):  # one more like it would not come to its end
            left.append(case.key)
            continue
        print(f"{case.key} ...", flush=True)
        started = time.monotonic()
        verdict = _verdict(
            case, shape, results, Path(tempfile.mkdtemp(dir=scratch)) / "case", min(remaining, CASE_SECONDS)
        )
        if verdict is None and number and remaining < CASE_SECONDS:  # alone in the next call it has more time
            left.append(case.key)
            continue
        verdict = verdict or Verdict(FAILED, (f"was not done in {min(remaining, CASE_SECONDS):.0f} s",))
        seconds = time.monotonic() - started
        longest[case.part] = max(longest.get(case.part, 0), seconds)
        _keep(case, verdict, seconds, results, options.out)


def _run_forked(
    cases: list[Case], results: dict[str, Any], options: argparse.Namespace, scratch: Path, deadline: float,
    left: list[str],
) -> None:  # fmt: skip
    """Several at a time; what others need goes first."""
    cold, waiting, active = _loaded(options.device), list(cases), dict[str, _Active]()
    try:
        while waiting or active:
            open_ = {case.key for case in waiting} | set(active)
            free = [case for case in waiting if not case.needs & (open_ - {case.key})]
            if free and len(active) < options.at_once and time.monotonic() < deadline:
                waiting.remove(free[0])
                print(f"{free[0].key} ...", flush=True)
                active[free[0].key] = _Active.begin(free[0], scratch, deadline, cold)
            for key, each in list(active.items()):
                try:
                    verdict = each.verdict(results)
                except subprocess.TimeoutExpired as error:
                    if error.timeout < CASE_SECONDS:  # of this call's minutes
                        left.append(active.pop(key).case.key)
                        continue
                    verdict = Verdict(FAILED, (f"was not done in {CASE_SECONDS} s",))
                if verdict is not None:
                    del active[key]
                    _keep(each.case, verdict, time.monotonic() - each.started, results, options.out)
            if time.monotonic() >= deadline and not active:
                left += [case.key for case in waiting]
                return
            time.sleep(0.01)
    finally:
        for each in active.values():
            each.commands.close()


class _Active(NamedTuple):
    """A forked case that runs."""

    case: Case
    folder: Path
    commands: Any
    started: float

    @classmethod
    def begin(cls, case: Case, scratch: Path, deadline: float, cold: bool) -> _Active:
        folder, seconds = Path(tempfile.mkdtemp(dir=scratch)) / "case", min(deadline - time.monotonic(), CASE_SECONDS)
        return cls(case, folder, gpu_smoke.run(case.forked, folder, seconds, cold), time.monotonic())

    def verdict(self, results: dict[str, Any]) -> Verdict | None:
        """The judge's, once its commands have ended."""
        try:
            next(self.commands)
            return None
        except StopIteration:
            return _judged(self.case, gpu_smoke.ended(self.folder), self.folder, results)


def _keep(case: Case, verdict: Verdict, seconds: float, results: dict[str, Any], out: Path) -> None:
    results["cases"][case.key] = _record(case, verdict, seconds)
    _write(out, results)
    print(f"{case.key}: {verdict.status}, {seconds:.0f} s", *verdict.why, sep="\n  ", flush=True)


def _not_done(wanted: list[Case], done: dict[str, Any], again: bool) -> Iterator[Case]:
    """Each once: parts share the curves of plain PyTorch."""
    seen = set()
    for case in wanted:
        if case.key not in seen and (again or case.key not in done):
            yield case
        seen.add(case.key)


def _verdict(case: Case, shape: Form, results: dict[str, Any], folder: Path, seconds: float) -> Verdict | None:
    """The judge's, or None where time was too short."""
    refused = _refused_before(case, shape, results["machine"]["memory"])
    if refused:
        return Verdict(SKIPPED, (refused,))
    folder.mkdir()
    try:
        command = [word.replace(FOLDER, str(folder)) for word in case.command]
        return _judged(case, _run(command, folder.parent, seconds), folder, results)
    except subprocess.TimeoutExpired:
        return None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _judged(case: Case, output: tuple[int, str, str], folder: Path, results: dict[str, Any]) -> Verdict:
    try:
        return case.judge(Ended(*output, folder, results["cases"], results["machine"]["capability"]))
    except (OSError, KeyError, IndexError, ValueError) as error:  # what the judge reads is not there
        return Verdict(FAILED, (f"{type(error).__name__}: {error}",))
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # checkpoints of a BERT-large are gigabytes


def _refused_before(case: Case, shape: Form, memory: int | None) -> str:
    """Why a case is not started: a card that is too small; else an empty text."""
    if case.recipe and memory is not None:
        status, stdout, _ = _run(plan_command(case, shape), ROOT, 60)
        planned = planned_bytes(stdout) if status == 0 else None  # what is wrong with it, its own run will say
        if planned is not None and planned > memory:
            return f"the plan takes {human(planned)} of a card, and this one has {human(memory)}"
    return ""


@functools.cache
def _loaded(device: str) -> bool:
    """Load what all forks share, once; whether forks cannot use the GPU, so that each process loads it itself."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    cold = not forked.preload(device)
    print("forks cannot use this GPU: each rank loads its libraries itself" if cold else "libraries are loaded")
    return cold


def _run(command: Any, folder: Path, seconds: float) -> tuple[int, str, str]:
    """Exit status and output; a command that is late is ended as by Ctrl-C, so that its ranks end with it."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, cwd=ROOT if "pytest" in command else folder, env={**os.environ, **settings}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except BaseException:
        _end(process)
        raise
    return process.returncode, stdout, stderr


def _stop(number: int, frame: FrameType | None) -> None:
    """So that a case under way is ended first."""
    raise SystemExit(128 + number)


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


# ---------------------------------------------------------------------------------------------------- results


def _machine(device: str) -> dict[str, Any]:
    """What this machine is; ends the program where it has not the device."""
    status, stdout, stderr = _run([sys.executable, "-c", _ASKS_TORCH], ROOT, 300)
    if status:
        raise SystemExit(f"this Python has no torch that can be imported: {stderr.strip().splitlines()[-1]}")
    found = json.loads(stdout.splitlines()[-1])
    if device == "cuda" and found["name"] is None:
        print(
            f"torch {found['torch']} sees no CUDA device here; add --device cpu for a rehearsal", file=sys.stderr
        )  # fmt: skip
        raise SystemExit(2)
    environment, commit = provenance.environment(), provenance.commit(ROOT)
    packages = {name: environment["packages"][name] for name in _TOLD if name in environment["packages"]}
    cuda = device == "cuda"
    return {
        "device": device,
        "name": f"{found['name']}, {human(found['memory'])}, CUDA {found['cuda']}" if cuda else "CPU",
        "memory": found["memory"] if cuda else None,
        "capability": found["capability"] if cuda else None,
        "python": environment["python"],
        "packages": packages,
        "commit": commit["commit"][:12] + (" with changes" if commit["dirty"] else "") if commit else None,
        "date": time.strftime("%Y-%m-%d"),
    }


def _record(case: Case, verdict: Verdict, seconds: float) -> dict[str, Any]:
    told = {"part": case.part, "name": case.name, "status": verdict.status, "seconds": round(seconds, 1)}
    return {
        **told,
        "why": list(verdict.why),
        "rows": list(verdict.rows),
        "command": list(case.command) or [" ".join(words) for _, words in case.forked],
    }


def _read(out: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """The results so far, of this machine; another's end the program."""
    file = out / "results.json"
    if not file.exists():
        return {"format": 1, "machine": machine, "cases": {}}
    results: dict[str, Any] = json.loads(file.read_text())
    before = results["machine"]
    differs = [name for name in ("name", "python", "packages") if before[name] != machine[name]]
    if differs:
        told = "; ".join(f"{name}: {before[name]}, here {machine[name]}" for name in differs)
        print(f"{file} holds results of something else ({told}); give another --out", file=sys.stderr)
        raise SystemExit(2)
    return {**results, "machine": machine}


def _write(out: Path, results: dict[str, Any]) -> None:
    """results.json and page.md, whole at any moment."""
    for name, text in (("results.json", json.dumps(results, indent=1)), ("page.md", page(results))):
        arriving = out / f"{name}.new"
        arriving.write_text(text)
        arriving.replace(out / name)


def _conclusion(keys: list[str], results: dict[str, Any], left: list[str], out: Path) -> int:
    """Say what came out; the exit status."""
    statuses = [results["cases"][key]["status"] for key in dict.fromkeys(keys) if key in results["cases"]]
    counts = {status: statuses.count(status) for status in (PASSED, FAILED, SKIPPED)}
    print(", ".join(f"{count} {status}" for status, count in counts.items()) + f": {out / 'page.md'}")
    if left:
        print(f"{len(left)} left for another call, from {left[0]} on")
    if counts[FAILED] or not (counts[PASSED] or left):
        return 1
    return LEFT if left else 0


if __name__ == "__main__":
    sys.exit(main())
