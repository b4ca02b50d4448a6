"""Which layers and models train on engine ort as in eager: tried one by one, and written down.

`python tools/zoo.py` tries torch.nn; `python tools/zoo.py layers masked-lm causal-lm ...` also families of transformers
at toy size. Cases run in worker processes with a time limit; what is done is kept in results.json in the cache folder,
and a later call goes on after it. Standard library only. Writes docs/models.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
KINDS = {
    "layers": "Layers, losses and activations of torch.nn",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "ctc": "AutoModelForCTC",
}


def main() -> int:
    """Try every case that has no result yet, and write the page."""
    options = _options()
    options.cache.mkdir(parents=True, exist_ok=True)
    store = options.cache / "results.json"
    results: dict[str, Any] = json.loads(store.read_text()) if store.is_file() else {}
    for kind in options.kinds:
        done = results.setdefault(kind, {})
        names = [name for name in options.only or _names(kind) if options.again or name not in done]
        while names:
            names = _round(kind, names, done, options.limit, lambda: store.write_text(json.dumps(results, indent=1)))
            store.write_text(json.dumps(results, indent=1))
        print(f"{kind}: {dict(Counter(found['state'] for found in done.values()))}", flush=True)
    if options.write:
        PAGE.write_text(_page(results))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ortlaunch-zoo"
    parser.add_argument("kinds", nargs="*", default=["layers"], help=f"of {', '.join(KINDS)}")
    parser.add_argument("--only", nargs="*", help="cases by name")
    parser.add_argument("--cache", type=Path, default=default, help="where results are kept")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a case")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave docs/models.md as it is")
    return parser.parse_args()


def _worker(kind: str, *names: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "tools" / "zoo_worker.py"), kind, *names]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=environ, text=True, start_new_session=True, **pipes)


def _names(kind: str) -> list[str]:
    process = _worker(kind)
    lines = [json.loads(line) for line in process.communicate()[0].splitlines() if line.startswith("{")]
    return [line["case"] for line in lines if "case" in line]


def _round(kind: str, names: list[str], done: dict[str, Any], limit: float, save: Callable[[], Any]) -> list[str]:
    """One worker, until it is through, dies or hangs; the names that are left."""
    process, current = _worker(kind, *names), None
    late = False

    def kill() -> None:
        nonlocal late
        late = True
        _kill(process)

    timer = threading.Timer(limit, kill)
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("{"):
            continue
        found = json.loads(line)
        timer.cancel()
        timer = threading.Timer(limit, kill)
        timer.start()
        if "started" in found:
            current = found["started"]
        else:
            done[found.pop("name")] = found
            print(f"{kind} {current}: {found['state']} {found.get('why', '')}"[:160], flush=True)
            current = None
            save()
    timer.cancel()
    process.wait()
    _kill(process)
    if current is not None:
        why = f"no result in {limit:g} s" if late else f"the process ended with {process.returncode}"
        done[current] = {"state": "ended", "why": why}
    return [name for name in names if name not in done] if current is not None else []


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _page(results: dict[str, Any]) -> str:
    lines = [
        "# What trains on engine ort",
        "",
        "Made by `tools/zoo.py`. Each case takes three steps of SGD on engine `ort` and in eager PyTorch, of the same "
        "weights on the same numbers, on a CPU: losses and all gradients of each step, and buffers at the end, are "
        "equal to 1e-5 (norm of the difference / norm). What runs as torch inside ONNX Runtime's graph "
        "([repairs.md](repairs.md#torch-in-the-graph)) is in the last column, with its calls of "
        "three steps.",
    ]
    for kind, title in KINDS.items():
        if results.get(kind):
            lines += ["", *_section(title, results[kind])]
    return "\n".join(lines) + "\n"


def _section(title: str, found: dict[str, Any]) -> list[str]:
    cases = {name: case for name, case in sorted(found.items()) if case["state"] != "no case"}
    trains = [name for name, case in cases.items() if case["state"] == "trains"]
    pure = [name for name in trains if not cases[name]["torch"]]
    others = [name for name, case in found.items() if case["state"] == "no case"]
    lines = [
        f"## {title}",
        "",
        f"{len(trains)} of {len(cases)} train ({len(trains) / max(1, len(cases)):.0%}), {len(pure)} of them without "
        "torch in the graph" + (f": {', '.join(pure)}." if pure else "."),
    ]
    if others:
        lines += ["", f"Not tried, for eager does not run the toy that is made of them: {', '.join(sorted(others))}."]
    rest = [name for name in cases if name not in pure]
    if rest:
        lines += ["", "| case | | difference | torch in the graph |", "|---|---|---|---|"]
        lines += [_row(name, cases[name]) for name in rest]
    return lines


def _row(name: str, case: dict[str, Any]) -> str:
    if "difference" not in case:
        return f"| {name} | {case['state']} | | {case['why'].replace('|', ' ')[:200]} |"
    calls = f"as the error says, torch_modules: {', '.join(case['named'])}; " if case.get("named") else ""
    calls += ", ".join(f"{key.removeprefix('aten.')} {count}" for key, count in list(case["torch"].items())[:6])
    calls += f" and {len(case['torch']) - 6} more" if len(case["torch"]) > 6 else ""
    return f"| {name} | {case['state']} | {case['difference']:.0e} | {calls} |"


if __name__ == "__main__":
    sys.exit(main())
