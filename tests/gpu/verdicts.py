"""Judges of the GPU tests.

A judge reads the output and files of a command and returns passed, failed or skipped, with reasons
and figures. It changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
# Largest relative difference of a loss from plain PyTorch's in float32, over 20 steps.
TOLERANCE = {"fp32": 1e-3, "fp16": 2e-3, "bf16": 5e-3}
# Relative difference of a loss after a skipped step, which shifts all later steps.
AFTER_SKIP = 0.1
# In fp16: GradScaler lowers its scale by skipping steps.
MOST_SKIPPED = 3
# Relative difference of the measured bytes from the planned ones.
MEMORY_TOLERANCE = 0.1
# Least speed-up of a matmul by TF32, which exists from compute capability 8.0 (Ampere) on.
TF32_GAIN = 1.5
TF32_CAPABILITY = 8.0
Row = dict[str, Any]


class Ended(NamedTuple):
    """A command that has ended, with facts that were known before it started."""

    status: int
    stdout: str
    stderr: str
    folder: Path
    # Losses to compare with; empty if the case has no reference.
    reference: list[float]
    # Compute capability of the CUDA device; None on a CPU.
    capability: float | None

    @property
    def last_words(self) -> str:
        """The last three lines of stderr, or of stdout if stderr is empty."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return " / ".join(line.strip() for line in lines[-3:]) or "no message"


class Verdict(NamedTuple):
    """A judge's result: status, reasons of a failure or skip (`why`), and rows of figures."""

    status: str
    why: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()


Check = Callable[[Ended, list[Row]], list[str]]


def judged(complaints: list[str], rows: list[Row], notes: tuple[str, ...] = ()) -> Verdict:
    return Verdict(FAILED if complaints else PASSED, (*complaints, *notes), tuple(rows))


def _ended_badly(ended: Ended) -> Verdict:
    return Verdict(FAILED, (f"exit status {ended.status}: {ended.last_words}",))


def _refused_for_ort(ended: Ended) -> bool:
    """Return whether the command refused engine ort: not installed, or request not supported."""
    # Status 2 has other causes, too: the message decides.
    return ended.status == 2 and "engine ort" in ended.stderr


# -------------------------------------------------------------------------------------- loss curves


def curve(engine: str, precision: str, ended: Ended) -> Verdict:
    """Check that every loss is near plain PyTorch's in float32, on the requested engine."""
    if engine == "ort" and _refused_for_ort(ended):
        return Verdict(SKIPPED, (ended.last_words,))
    if ended.status:
        return _ended_badly(ended)
    run = ended.folder / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    complaints, row, notes = near(
        [record for record in records if "loss" in record], precision, ended
    )
    # engine.json records the engine that trained, which may differ from the requested one.
    used = json.loads((run / "engine.json").read_text())["engine"]["used"]
    return judged([*complaints, *([f"ran on {used}"] if used != engine else [])], [row], notes)


def near(
    records: list[Row], precision: str, ended: Ended
) -> tuple[list[str], Row, tuple[str, ...]]:
    """Return complaints, figures and notes of a loss curve compared with the reference."""
    losses = [record["loss"] for record in records]
    skips = [record.get("skipped_steps", 0) for record in records]
    plain = ended.reference
    tolerance = TOLERANCE[precision]
    # GradScaler begins at 65,536 and skips a step or two in fp16. That shifts the later steps, so
    # their losses are compared coarsely.
    exact = next((place for place, count in enumerate(skips, 1) if count), len(losses))
    largest = difference(losses[:exact], plain[:exact]) if len(losses) == len(plain) else math.inf
    rest = difference(losses[exact:], plain[exact : len(losses)])
    skipped = max(skips, default=0)
    complaints = [
        *(
            [f"a loss differs by {largest:.1e}; {tolerance:g} is allowed"]
            if largest > tolerance
            else []
        ),
        *([f"a loss after a skipped step differs by {rest:.1e}"] if rest > AFTER_SKIP else []),
        *(
            [f"{skipped} steps were skipped"]
            if skipped > (MOST_SKIPPED if precision == "fp16" else 0)
            else []
        ),
    ]
    notes = (
        (f"{skipped} skipped steps: {len(losses) - exact} losses were compared coarsely",)
        if skipped
        else ()
    )
    return (
        complaints,
        {"difference": largest, "tolerance": tolerance, "last_loss": losses[-1]},
        notes,
    )


def difference(losses: list[float], plain: list[float]) -> float:
    """Return the largest relative difference; inf for unequal lengths or a non-finite loss."""
    if len(losses) != len(plain) or not all(map(math.isfinite, losses)):
        return math.inf
    return max((abs(a - b) / abs(b) for a, b in zip(losses, plain)), default=0.0)


# ------------------------------------------------------------------------------------------ benches


def bench(check: Check, ended: Ended) -> Verdict:
    """Check that every variant was measured and equals plain PyTorch; then apply the part's check.

    Variants that engine ort refuses become notes.
    """
    report = ended.folder / "bench" / "bench.json"
    if not report.exists():
        return (
            Verdict(SKIPPED, (ended.last_words,))
            if _refused_for_ort(ended)
            else _ended_badly(ended)
        )
    variants = json.loads(report.read_text())["variants"]
    rows = [_row(v, ended.folder) for v in variants if v["state"] == "measured"]
    refused = [v for v in variants if v["state"] == "refused"]
    complaints = [
        f"{v['name']}: {v['state']}: {_short(v['reason'])}" for v in variants if _is_failure(v)
    ]
    complaints += [f"{row['variant']}: parity: {row['why']}" for row in rows if _differs(row)]
    notes = [
        f"{v['name']}: refused: {_short(v['reason'])}" for v in refused if v["engine"] == "ort"
    ]
    notes += [f"{row['variant']}: not compared: {row['why']}" for row in rows if _had_no_room(row)]
    if not rows and not complaints:
        return Verdict(SKIPPED, tuple(notes))
    return judged([*complaints, *(check(ended, rows) if rows else [])], rows, tuple(notes))


def _is_failure(variant: Row) -> bool:
    return variant["state"] == "failed" or (
        variant["state"] == "refused" and variant["engine"] != "ort"
    )


def _differs(row: Row) -> bool:
    return row["verdict"] not in ("passes", "reference") and not _had_no_room(row)


def _had_no_room(row: Row) -> bool:
    """Return whether parity was not compared for lack of memory."""
    # The comparison needs a second set of gradients; a model that fills the card leaves no memory.
    return row["verdict"] == "not compared" and "out of memory" in row["why"].lower()


def _short(reason: str) -> str:
    # A traceback carries its error on the last line; other reasons begin with the main sentence.
    lines = [line for line in reason.strip().splitlines() if line.strip()] or ["no reason"]
    return (lines[-1] if lines[0].startswith("Traceback") else lines[0])[:500]


def _row(variant: Row, folder: Path) -> Row:
    """Return the figures of one variant, with its planned memory in bytes."""
    parity = variant["parity"]
    truth = variant["truth"]
    plan = json.loads((folder.parent / variant["folder"] / "plan.json").read_text())["memory"]
    by = "ortlaunch" if truth["fp16_optimizer"]["applied"] else "DeepSpeed"
    return {
        "variant": variant["name"],
        "varied": variant["varied"],
        "precision": variant["precision"],
        "seconds": variant["seconds"]["median"],
        "samples_per_second": variant["samples_per_second"],
        "tokens_per_second": variant["tokens_per_second"],
        "mfu": variant["mfu"],
        "mfu_of_vendor_peak": variant["mfu_of_vendor_peak"],
        "peak_flops": variant["peak_flops"],
        "memory": max(variant["memory"]),
        "planned": plan and plan["by_stage"][plan["chosen"]]["total"],
        "first_step": variant["first_step"]["since_launch"],
        "verdict": parity["verdict"],
        "largest": parity.get("largest"),
        "why": parity.get("why", ""),
        "used": truth["engine"]["used"],
        "gradient_norm": by if "ZeRO" in truth["sharding"] else None,
        "matmul": truth["matmul_precision"]["in_force"],
        "loss_from_highest": parity.get("loss_from_highest"),
        "recomputed_by": truth["gradient_checkpointing"],
        "chunk_rows": truth["chunked_loss"]["rows"],
    }


def nothing_more(ended: Ended, rows: list[Row]) -> list[str]:
    """Check that each variant ran on its own engine."""
    return [
        f"{row['variant']}: ran on {row['used']}"
        for row in rows if not row["variant"].startswith(row["used"])
    ]  # fmt: skip


def modifier_as_asked(ended: Ended, rows: list[Row]) -> list[str]:
    """Check that our gradient norm is used where it is requested, and DeepSpeed's elsewhere."""
    complaints = []
    for row in rows:
        asked = "fused_gradient_norm=true" in row["variant"]
        if asked != (row["gradient_norm"] != "DeepSpeed"):
            complaints.append(f"{row['variant']}: the gradient norm is by {row['gradient_norm']}")
    return [*nothing_more(ended, rows), *complaints]


def precision_in_force(ended: Ended, rows: list[Row]) -> list[str]:
    """Check that the requested precision is in force, and that TF32 is faster than float32.

    The speed is checked only on cards that have TF32.
    """
    complaints = [
        f"{row['variant']}: {row['matmul']} is in force"
        for row in rows if not row["variant"].endswith(f"matmul_precision={row['matmul']}")
    ]  # fmt: skip
    if ended.capability is not None and ended.capability >= TF32_CAPABILITY:
        rates = {
            word: max((r["peak_flops"] for r in rows if r["matmul"] == word), default=0)
            for word in _words(rows)
        }
        exact = rates.get("highest", 0)
        fast = rates.get("high", 0)
        if fast < TF32_GAIN * exact:
            complaints.append(
                f"a matrix product at high runs at {fast / 1e12:.0f} TFLOP/s, "
                f"{exact / 1e12:.0f} without"
            )
    return [*nothing_more(ended, rows), *complaints]


def _words(rows: list[Row]) -> set[str]:
    return {row["matmul"] for row in rows}


def less_memory(ended: Ended, rows: list[Row]) -> list[str]:
    """Check that the second of an engine's two variants needs less GPU memory than the first."""
    complaints = nothing_more(ended, rows)
    # Only on a GPU: the measured peak of a CPU process is too coarse.
    for engine in (
        dict.fromkeys(row["used"] for row in rows) if ended.capability is not None else ()
    ):
        pair = [row for row in rows if row["used"] == engine]
        if len(pair) == 2 and pair[1]["memory"] >= pair[0]["memory"]:
            complaints.append(
                f"{pair[1]['variant']} takes no less memory than {pair[0]['variant']}"
            )
    return complaints


def loss_in_chunks(ended: Ended, rows: list[Row]) -> list[str]:
    """Check that the loss is computed in chunks unless switched off, and that this saves memory."""
    complaints = [
        f"{row['variant']}: chunks of {row['chunk_rows']} rows"
        for row in rows if bool(row["chunk_rows"]) == row["variant"].endswith("chunked_loss=off")
    ]  # fmt: skip
    return [*complaints, *less_memory(ended, rows)]


def recomputed(ended: Ended, rows: list[Row]) -> list[str]:
    """Check that layers are recomputed where requested, and that this saves memory."""
    complaints = [
        f"{row['variant']}: recomputed by {row['recomputed_by']}"
        for row in rows if bool(row["recomputed_by"]) != row["variant"].endswith("true")
    ]  # fmt: skip
    return [*complaints, *less_memory(ended, rows)]


# --------------------------------------------------------------------------- memory beside the plan


def memory(ended: Ended) -> Verdict:
    """Check that weights, gradients and optimizer state are within a tenth of the plan.

    The peak is reported without a check.
    """
    if ended.status:
        return _ended_badly(ended)
    record = json.loads((ended.folder / "run" / "memory.json").read_text())
    planned = record["planned"]
    measured = record["measured"]
    ratio = measured["model"] / planned["model"]
    wrong = abs(ratio - 1) > MEMORY_TOLERANCE
    row = {
        "planned_model": planned["model"], "model": measured["model"], "ratio": ratio,
        "planned": planned["peak"], "memory": measured["peak"],
    }  # fmt: skip
    return judged(
        [f"weights, gradients and optimizer are {ratio:.2f} x the plan"] if wrong else [], [row]
    )
