"""A bench's figures: bench.json as plain values, and the same as a table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ortlaunch.bench.turns import VariantJob
from ortlaunch.bench.variants import Variant
from ortlaunch.json_types import Json
from ortlaunch.run_folder.cause_text import COMMAND_PREFIX
from ortlaunch.units import align_columns, human_bytes

_HEAD = (
    "variant",
    "s/step",
    "middle half",
    "samples/s",
    "tokens/s",
    "MFU",
    "memory",
    "first step",
    "parity",
    "ratio",
)
MEASURED = "measured"
REFUSED = "refused"
FAILED = "failed"
# Verdicts of parity with which an engine may be chosen.
PASSING = ("passes", "reference")


def results(variants: Sequence[Variant], players: Sequence[VariantJob]) -> list[Json]:
    """Return every variant in its order: with figures, or refused or failed with the reason."""
    playing = {player.variant.name: player for player in players}
    rows = [_row(variant, playing.get(variant.name)) for variant in variants]
    measured = [row for row in rows if row["state"] == MEASURED]
    for row in measured:
        # Ratios need all rows, so they are added afterwards.
        base = _base(row, measured)
        row["ratio"] = row["samples_per_second"] / base["samples_per_second"]
        row["ratio_to"] = base["name"]
        row["mfu"] = _mfu(row, measured)
    return rows


def _row(variant: Variant, player: VariantJob | None) -> Json:
    row: Json = {"name": variant.name, "engine": variant.engine, "varied": list(variant.chosen)}
    if player is None or not player.measured:
        failed = player is not None and bool(player.failed)
        reason = player.failed if player is not None and failed else variant.refused
        return {**row, "state": FAILED if failed else REFUSED, "reason": reason, **_folder(player)}
    assert variant.resolved is not None
    took = [seconds for turn in player.turns for seconds in turn["seconds"]]
    tokens, padding = (sum(turn["tokens"][kind] for turn in player.turns) for kind in (0, 1))
    ranks = variant.resolved.world.ranks
    # The median is robust against single slow steps.
    median = statistics.median(took)
    return {
        **row,
        "state": MEASURED,
        "precision": variant.resolved.file.recipe.precision,
        "matmul_precision": variant.resolved.file.recipe.engine.matmul_precision,
        "ranks": ranks,
        "seconds": spread(took),
        "samples_per_second": variant.resolved.work.batch.global_samples / median,
        "tokens_per_second": tokens / len(took) / median if tokens else None,
        "padding_share": padding / (tokens + padding) if tokens else None,
        "flops_per_token": player.ready["flops_per_token"],
        "peak_flops": player.ready["peak_flops"],
        # Peak bytes of each rank, over all turns.
        "memory": [max(turn["memory"][rank] for turn in player.turns) for rank in range(ranks)],
        "first_step": player.ready["first_step"],
        "parity": player.parity,
        "truth": player.ready["engine"],
        "turns": player.turns,
        **_folder(player),
    }


def _folder(player: VariantJob | None) -> dict[str, str]:
    return {"folder": str(player.run)} if player else {}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles, minimum and maximum."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        # statistics.quantiles needs two values.
        else [values[0]] * 3
    )
    return {
        "median": middle,
        "quartile_1": low,
        "quartile_3": high,
        "min": min(values),
        "max": max(values),
    }


def _base(row: Json, measured: Sequence[Json]) -> Json:
    """Return the variant that a row is compared with.

    It is eager with the same varied keys, else the first eager, else the first.
    """
    eager = [other for other in measured if other["engine"] == "eager"]
    same = [other for other in eager if other["varied"] == row["varied"]]
    return (same or eager or list(measured))[0]


def _mfu(row: Json, measured: Sequence[Json]) -> float | None:
    """Return the model FLOPs utilization, from 0 to 1, or None if it is unknown.

    The peak is the highest rate that any variant of this precision measured: one scale for all of
    them.
    """
    # The model or its batch cannot be counted.
    if not row["flops_per_token"] or not row["tokens_per_second"]:
        return None
    alike = [
        o for o in measured if all(o[key] == row[key] for key in ("precision", "matmul_precision"))
    ]
    peak = max(other["peak_flops"] or 0.0 for other in alike)
    return (
        # Padding is computed, too.
        float(
            row["flops_per_token"]
            * row["tokens_per_second"]
            / (1 - row["padding_share"])
            / (peak * row["ranks"])
        )
        if peak
        else None
    )


def passes(row: Json) -> bool:
    """Return whether a variant was measured and computes the results of plain PyTorch."""
    return row["state"] == MEASURED and row["parity"]["verdict"] in PASSING


def fastest(rows: Sequence[Json]) -> Json | None:
    """Return the variant with the most samples a second that passes parity, or None."""
    return max(
        (row for row in rows if passes(row)),
        key=lambda row: float(row["samples_per_second"]),
        default=None,
    )


def verdict(rows: Sequence[Json]) -> list[str]:
    """Return a line that names the fastest variant, and lines that limit it."""
    best = fastest(rows)
    if best is None:
        return ["fastest: none passed parity"]
    others = [row for row in rows if row["state"] == MEASURED and row is not best]
    able = [row for row in others if passes(row)]
    fast, start = best["seconds"], best["first_step"]["since_launch"]
    near = [row for row in able if fast["quartile_3"] >= row["seconds"]["quartile_1"]]
    names = [best["name"], *(row["name"] for row in near)]
    ratios = "".join(f", {times(best, row)}" for row in others if row not in near)
    lines = [f"fastest: {' or '.join(names)}{ratios}"]
    if near:
        lines.append(
            f"{' and '.join(names)} cannot be told apart: the middle halves of their steps overlap"
        )
    for row in able:
        later = start - row["first_step"]["since_launch"]
        gain = row["seconds"]["median"] - fast["median"]
        # Without a difference there is no step from which one is ahead.
        if later > 1 and gain > 0 and row not in near:
            steps = f"{later / gain:,.0f} steps"
            lines.append(
                f"{best['name']} begins {later:.0f} s later than {row['name']}: ahead after {steps}"
            )
    return lines


def times(best: Json, other: Json) -> str:
    """Return the ratio to another variant, such as `1.90 x eager`."""
    return f"{best['samples_per_second'] / other['samples_per_second']:.2f} x {other['name']}"


def table(rows: Sequence[Json]) -> str:
    """Return the figures of measured variants, and a line with the reason for each other one."""
    measured = [row for row in rows if row["state"] == MEASURED]
    cells = [_HEAD, *(_cells(row) for row in measured)] if measured else []
    columns = [
        # Without columns that no variant fills, such as tokens/s or MFU.
        column
        for column in zip(*cells)
        if set(column[1:]) != {"-"}
    ]
    return "\n".join([*align_columns(zip(*columns), numbers_right=True), *_notes(rows)])


def _cells(row: Json) -> tuple[str, ...]:
    seconds = row["seconds"]
    tokens = row["tokens_per_second"]
    mfu = row["mfu"]
    return (
        row["name"],
        f"{seconds['median']:.4g}",
        f"{seconds['quartile_1']:.3g} - {seconds['quartile_3']:.3g}",
        f"{row['samples_per_second']:,.1f}",
        f"{tokens:,.0f}" if tokens else "-",
        f"{mfu:.1%}" if mfu else "-",
        human_bytes(max(row["memory"])),
        f"{row['first_step']['since_launch']:.1f} s",
        _parity_cell(row["parity"]),
        f"{row['ratio']:.2f} x",
    )


def _parity_cell(parity: Json) -> str:
    """Return `reference`, `1.2e-06`, or a text in capitals where the figures must not be used."""
    if parity["verdict"] == "passes":
        return f"{parity['largest']:.0e}"
    if parity["verdict"] == "differs":
        return "DIFFERS" if parity["largest"] is None else f"DIFFERS {parity['largest']:.0e}"
    return "reference" if parity["verdict"] == "reference" else "NOT COMPARED"


def _notes(rows: Sequence[Json]) -> list[str]:
    notes = [
        f"{row['name']}: {row['state']}: {short_reason(row['reason'])}"
        for row in rows
        if "reason" in row
    ]
    measured = [row for row in rows if row["state"] == MEASURED]
    notes += [
        f"{row['name']}: parity: {row['parity']['why']}"
        for row in measured
        if row["parity"].get("why") and not passes(row)
    ]
    for row in measured:
        if "loss_from_highest" in row["parity"]:
            moved = (
                f"changes the loss by {row['parity']['loss_from_highest']:.1e}; parity is "
                "compared at highest"
            )
            notes.append(f"{row['name']}: matmul_precision {row['matmul_precision']} {moved}")
    if measured:
        others = sorted({row["ratio_to"] for row in measured})
        notes.append(
            f"ratio: to {', '.join(others)}; memory: of the largest rank, without libraries"
        )
        notes.append("parity: largest relative difference from PyTorch")
    return notes


def short_reason(reason: str) -> str:
    """Return one line of a failure's text: an error's message, or the end of a traceback."""
    # The command's own lines follow the reason.
    said = reason.partition(f"\n\n{COMMAND_PREFIX}")[0].strip().splitlines() or [""]
    return said[-1] if said[0].startswith("Traceback") else said[0]
