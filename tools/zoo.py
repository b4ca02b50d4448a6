"""Which layers and models train on engine ort as in eager: tried one by one, and written down.

`python tools/zoo.py` tries torch.nn; `python tools/zoo.py layers masked-lm causal-lm ...` also families of transformers
at toy size. Each case runs in a process with limits of time and memory; what is done is kept in results.json in the
cache folder, and a later call goes on after it. A case takes 2 to 40 s, all together an hour of one core. Standard
library only. Writes docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
KINDS = {
    "layers": "Layers, losses and activations of torch.nn",
    "nets": "Nets written out",
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
        names = options.only or [found["name"] for found in _worker(kind, options)]
        names = [name for name in names if options.again or name not in done]
        for found in _tried(kind, names, options) if names else ():
            done[found.pop("name")] = found
            store.write_text(json.dumps(results, indent=1))
        print(f"{kind}: {dict(Counter(found['state'] for found in done.values()))}", flush=True)
    if options.write:
        PAGE.write_text(_page(results, _sections(PAGE.read_text())))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ortlaunch-zoo"
    parser.add_argument("kinds", nargs="*", default=["layers"], help=f"of {', '.join(KINDS)}")
    parser.add_argument("--only", nargs="*", help="cases by name")
    parser.add_argument("--cache", type=Path, default=default, help="where results are kept")
    parser.add_argument("--limit", type=int, default=240, help="seconds of a case")
    parser.add_argument("--memory", type=float, default=6.0, help="GiB of a case")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave docs/models.md as it is")
    return parser.parse_args()


def _worker(kind: str, options: argparse.Namespace, *names: str) -> Iterator[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "tools" / "zoo_worker.py"), kind]
    command += [str(options.limit), str(options.memory), *names]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environ, text=True, **pipes) as process:
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith('{"name"'))


def _tried(kind: str, names: list[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for found in _worker(kind, options, *names):
        print(f"{kind} {found['name']}: {found['state']} {found.get('why', '')}"[:160], flush=True)
        yield found


def _sections(page: str) -> dict[str, str]:
    """What a page has under each title."""
    return {part.partition("\n")[0]: f"## {part.rstrip()}" for part in page.split("\n## ")[1:]}


def _page(results: dict[str, Any], before: dict[str, str]) -> str:
    """Sections of which there is no result here stay as they were before."""
    lines = [
        "# What trains on engine ort",
        "",
        "Made by `tools/zoo.py`. Each case takes three steps of SGD on engine `ort` and in eager PyTorch, of the same "
        "weights on the same numbers, on a CPU: losses and all gradients of each step, and buffers at the end, are "
        "equal to 1e-5 (norm of the difference / norm), or as near to those in float64 as eager's (4 times as far at "
        "most, in each step). What runs as torch inside ONNX Runtime's graph "
        "([repairs.md](repairs.md#torch-in-the-graph)) is in the last column, with its calls of "
        "three steps.",
        *_summary(results, before),
    ]
    for kind, title in KINDS.items():
        if results.get(kind):
            lines += ["", *_section(title, results[kind])]
        elif title in before:
            lines += ["", before[title]]
    return "\n".join(lines) + "\n"


def _summary(results: dict[str, Any], before: dict[str, str]) -> list[str]:
    """The families of transformers by what became of them: a row for each task, and one for all."""
    kinds = {kind: title for kind, title in KINDS.items() if kind not in ("layers", "nets")}
    rows = [
        (title, Counter(_outcome(case) for case in results[kind].values()))
        for kind, title in kinds.items()
        if results.get(kind)
    ]
    if not rows:
        return []
    lines = [
        "",
        "| families of transformers | known | tried | train as in eager | differ | refused, ended |",
        "|---|---|---|---|---|---|",
    ]
    for title, counts in (*rows, ("all of these", sum((counts for _, counts in rows), Counter()))):
        known = sum(counts.values())
        tried = known - counts["no case"]
        share = f"{counts['trains']} ({counts['trains'] / max(1, tried):.1%})"
        lines.append(f"| {title} | {known} | {tried} | {share} | {counts['differs']} | {counts['refused']} |")
    lines += [
        "",
        "The others of those known are not tried, for the reason that stands with them: eager's own error, mostly.",
    ]
    old = [title for kind, title in kinds.items() if not results.get(kind) and title in before]
    return [*lines, *([f"Of an earlier run, and not in the table: {', '.join(old)}."] if old else [])]


def _outcome(case: dict[str, Any]) -> str:
    return "refused" if case["state"] == "ended" else str(case["state"])


def _section(title: str, found: dict[str, Any]) -> list[str]:
    cases = {name: case for name, case in sorted(found.items()) if case["state"] != "no case"}
    trains = [name for name, case in cases.items() if case["state"] == "trains"]
    pure = [name for name in trains if not cases[name]["torch"]]
    others = [f"{name} ({_plain(case['why'], 90)})" for name, case in found.items() if case["state"] == "no case"]
    lines = [
        f"## {title}",
        "",
        f"{len(trains)} of {len(cases)} train ({len(trains) / max(1, len(cases)):.0%}), {len(pure)} of them without "
        "torch in the graph" + (f": {', '.join(pure)}." if pure else "."),
    ]
    if others:
        lines += ["", f"Not tried: {'; '.join(sorted(others))}."]
    rest = [name for name in cases if name not in pure]
    if rest:
        lines += ["", "| case | | difference | torch in the graph |", "|---|---|---|---|"]
        lines += [_row(name, cases[name]) for name in rest]
    return lines


def _row(name: str, case: dict[str, Any]) -> str:
    if "difference" not in case:
        return f"| {name} | {case['state']} | | {_plain(case['why'], 200)} |"
    calls = f"as the error says, torch_modules: {', '.join(case['named'])}; " if case.get("named") else ""
    calls += ", ".join(f"{key.removeprefix('aten.')} {count}" for key, count in list(case["torch"].items())[:6])
    calls += f" and {len(case['torch']) - 6} more" if len(case["torch"]) > 6 else ""
    if case.get("before"):
        calls += f" (with `torch_operators: off`: {_plain(case['before'], 120)})"
    return f"| {name} | {case['state']} | {_difference(case)} | {calls} |"


def _plain(why: str, length: int) -> str:
    """Of a table's cell."""
    return why.replace("|", " ").replace(f"{ROOT}/", "")[:length]


def _difference(case: dict[str, Any]) -> str:
    """With how far from float64 loss and gradients of the first step are, where the difference is more than 1e-5."""
    if not case.get("exact"):
        return f"{case['difference']:.0e}"
    ours, eagers = (max(column) for column in zip(*case["exact"][:2]))
    return f"{case['difference']:.0e}; step 1 from float64: {ours:.0e}, eager {eagers:.0e}"


if __name__ == "__main__":
    sys.exit(main())
