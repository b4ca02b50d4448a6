"""The page that tools/gpu_proof.py makes of its results: Markdown, a section a part. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ortlaunch.units import human

Row = dict[str, Any]
_FORMS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "variant": ("variant", str),
    "precision": ("precision", str),
    "ran": ("tests run", str),
    "skipped": ("skipped", str),
    "difference": ("largest difference of a loss", "{:.1e}".format),
    "tolerance": ("allowed", "{:g}".format),
    "last_loss": ("last loss", "{:.4f}".format),
    "nodes": ("nodes of ONNX Runtime's graph", str),
    "seconds": ("s/step", "{:.4g}".format),
    "tokens_per_second": ("tokens/s", "{:,.0f}".format),
    "mfu": ("MFU", "{:.1%}".format),
    "peak_flops": ("matrix rate, TFLOP/s", lambda rate: f"{rate / 1e12:.3g}"),
    "gradient_norm": ("gradient norm by", str),
    "recomputed_by": ("recomputed by", str),
    "chunk_rows": ("rows a chunk", str),
    "planned_model": ("weights, gradients, optimizer: planned", human),
    "model": ("measured", human),
    "ratio": ("ratio", "{:.2f}".format),
    "planned": ("peak planned", human),
    "memory": ("peak measured", human),
    "first_step": ("first step after, s", "{:.0f}".format),
    "verdict": ("parity", str),
    "largest": ("largest difference", "{:.0e}".format),
    "loss_from_highest": ("loss moved by", "{:.0e}".format),
}
_COUNTED = ("passed", "failed", "skipped")


def page(results: dict[str, Any]) -> str:
    """Everything in results.json that a reader wants."""
    by_part: dict[str, dict[str, Any]] = {}
    for case in results["cases"].values():
        by_part.setdefault(case["part"], {})[case["name"]] = case
    parts = [_part(part, cases) for part, cases in by_part.items()]
    return "\n".join([*_head(results["machine"]), *_summary(by_part), *(line for part in parts for line in part), ""])


def _head(machine: Row) -> list[str]:
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    commit = f", commit {machine['commit']}" if machine["commit"] else ""
    return [
        f"# {machine['name']}: what ran",
        "",
        f"Written by `tools/gpu_proof.py --device {machine['device']}` on {machine['date']}{commit}; "
        f"Python {machine['python']}, {packages}.",
        *(["A rehearsal on a CPU: small models, figures of no meaning."] if machine["device"] == "cpu" else []),
        "Weights are random, texts are those of the Python that ran it.",
        "",
    ]


def _summary(by_part: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| part | passed | failed | skipped | s |", "|---|---|---|---|---|"]
    for part, cases in by_part.items():
        counts = [sum(case["status"] == status for case in cases.values()) for status in _COUNTED]
        seconds = sum(case["seconds"] for case in cases.values())
        lines.append(f"| {part} | {' | '.join(map(str, counts))} | {seconds:.0f} |")
    return lines


def _part(part: str, cases: dict[str, Any]) -> list[str]:
    rows = [(f"{name} | {case['status']}", row) for name, case in cases.items() for row in case["rows"]]
    measured = [pair for pair in rows if "variant" in pair[1]]  # of a bench: other columns than a curve's
    lines = [*_table([pair for pair in rows if pair not in measured]), *_table(measured), *_reasons(cases)]
    return ["", f"## {part}", *lines] if lines else []


def _table(rows: list[tuple[str, Row]]) -> list[str]:
    """A line a row; columns that no row has are left out."""
    names = [name for name in _FORMS if any(row.get(name) is not None for _, row in rows)]
    if not names:
        return []
    head = ["", f"| case | result | {' | '.join(_FORMS[name][0] for name in names)} |", "|---" * (2 + len(names)) + "|"]
    return [*head, *(f"| {start} | {' | '.join(_cell(row, name) for name in names)} |" for start, row in rows)]


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    return "" if value is None else _escaped(_FORMS[name][1](value))


def _reasons(cases: dict[str, Any]) -> list[str]:
    """Every failure and skip with its reason, and what a case that passed noted."""
    lines = [f"- {name}: {case['status']}: {_escaped(why)}" for name, case in cases.items() for why in case["why"]]
    return ["", *lines] if lines else []


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
