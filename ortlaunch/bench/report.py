"""A bench's figures: bench.json as plain values, and the same as a table. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ortlaunch.base.units import aligned_table_lines, human_bytes
from ortlaunch.bench.variant_job import VariantJob
from ortlaunch.bench.variants import Variant
from ortlaunch.run_folder.bench_row import VariantRow

_TABLE_HEAD = (
    "variant",
    "s/step",
    "middle half",
    "samples/s",
    "tokens/s",
    "MFU",
    "of vendor's peak",
    "memory",
    "first step",
    "parity",
    "ratio",
)
MEASURED_STATE = "measured"
REFUSED_STATE = "refused"
FAILED_STATE = "failed"
# Verdicts of parity with which an engine may be chosen.
PASSING_VERDICTS = ("passes", "reference")


def variant_result_rows_with_ratio_and_mfu(
    variants: Sequence[Variant], variant_jobs: Sequence[VariantJob]
) -> list[VariantRow]:
    """Return every variant in its order: with figures, or refused or failed with the reason."""
    job_by_name = {variant_job.variant.name: variant_job for variant_job in variant_jobs}
    rows = [
        _measured_refused_or_failed_variant_row(variant, job_by_name.get(variant.name))
        for variant in variants
    ]
    measured_rows = [row for row in rows if row["state"] == MEASURED_STATE]
    for row in measured_rows:
        # Ratios need all rows, so they are added afterwards.
        reference_row = _eager_or_first_row_that_ratio_refers_to(row, measured_rows)
        row["ratio"] = row["samples_per_second"] / reference_row["samples_per_second"]
        row["ratio_to"] = reference_row["name"]
        rate = _model_flops_per_second_of_rank_or_none(row)
        peak = _highest_measured_peak_of_same_precision(row, measured_rows)
        row["mfu"] = rate / peak if rate and peak else None
        vendor_peak = row["vendor_peak_flops"]
        row["mfu_of_vendor_peak"] = rate / vendor_peak if rate and vendor_peak else None
    return rows


def _measured_refused_or_failed_variant_row(
    variant: Variant, variant_job: VariantJob | None
) -> VariantRow:
    row: VariantRow = {
        "name": variant.name,
        "engine": variant.engine,
        "varied": list(variant.varied_overrides),
    }
    if variant_job is None or not variant_job.is_measured:
        has_failed = variant_job is not None and bool(variant_job.failure_text)
        reason = (
            variant_job.failure_text if variant_job is not None and has_failed else variant.refusal
        )
        return {
            **row,
            "state": FAILED_STATE if has_failed else REFUSED_STATE,
            "reason": reason,
            **_folder_field(variant_job),
        }
    assert variant.resolved_run is not None
    step_seconds = [seconds for turn in variant_job.turns for seconds in turn["seconds"]]
    tokens, padding = (
        sum(turn["tokens"][count_index] for turn in variant_job.turns) for count_index in (0, 1)
    )
    rank_count = variant.resolved_run.world.rank_count
    # The median is robust against single slow steps.
    median = statistics.median(step_seconds)
    return {
        **row,
        "state": MEASURED_STATE,
        "precision": variant.resolved_run.recipe_file.recipe.precision,
        "matmul_precision": variant.resolved_run.recipe_file.recipe.engine.matmul_precision,
        "ranks": rank_count,
        "seconds": median_quartiles_and_extremes(step_seconds),
        "samples_per_second": variant.resolved_run.workload.batch.global_samples / median,
        "tokens_per_second": tokens / len(step_seconds) / median if tokens else None,
        "padding_share": padding / (tokens + padding) if tokens else None,
        "flops_per_token": variant_job.ready_answer["flops_per_token"],
        "peak_flops": variant_job.ready_answer["peak_flops"],
        "vendor_peak_flops": variant_job.ready_answer["vendor_peak_flops"],
        # Peak bytes of each rank, over all turns.
        "memory": [
            max(turn["memory"][rank] for turn in variant_job.turns) for rank in range(rank_count)
        ],
        "first_step": variant_job.ready_answer["first_step"],
        "parity": variant_job.parity,
        "truth": variant_job.ready_answer["engine"],
        "turns": variant_job.turns,
        **_folder_field(variant_job),
    }


def _folder_field(variant_job: VariantJob | None) -> VariantRow:
    return {"folder": str(variant_job.run)} if variant_job else {}


def median_quartiles_and_extremes(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles, minimum and maximum."""
    lower_quartile, median, upper_quartile = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        # statistics.quantiles needs two values.
        else [values[0]] * 3
    )
    return {
        "median": median,
        "quartile_1": lower_quartile,
        "quartile_3": upper_quartile,
        "min": min(values),
        "max": max(values),
    }


def _eager_or_first_row_that_ratio_refers_to(
    row: VariantRow, measured_rows: Sequence[VariantRow]
) -> VariantRow:
    """Return the variant that a row is compared with.

    It is eager with the same varied keys, else the first eager, else the first.
    """
    eager_rows = [other for other in measured_rows if other["engine"] == "eager"]
    rows_with_same_keys = [other for other in eager_rows if other["varied"] == row["varied"]]
    return (rows_with_same_keys or eager_rows or list(measured_rows))[0]


def _model_flops_per_second_of_rank_or_none(row: VariantRow) -> float | None:
    """Return the operations per second that the formula counts for the tokens of one rank.

    None: the model or its batch cannot be counted.
    """
    if not row["flops_per_token"] or not row["tokens_per_second"]:
        return None
    # Padding is computed, too.
    computed_tokens = row["tokens_per_second"] / (1 - (row["padding_share"] or 0.0))
    return row["flops_per_token"] * computed_tokens / row["ranks"]


def _highest_measured_peak_of_same_precision(
    row: VariantRow, measured_rows: Sequence[VariantRow]
) -> float:
    """Return the highest rate of a matmul that any variant of this precision measured.

    It is one scale for all of them; 0: none measured it.
    """
    return max(
        other["peak_flops"] or 0.0
        for other in measured_rows
        if other["precision"] == row["precision"]
        and other["matmul_precision"] == row["matmul_precision"]
    )


def passes_parity(variant_row: VariantRow) -> bool:
    """Return whether a variant was measured and computes the results of plain PyTorch."""
    return (
        variant_row["state"] == MEASURED_STATE
        and variant_row["parity"]["verdict"] in PASSING_VERDICTS
    )


def fastest_row_that_passes_parity(measured_rows: Sequence[VariantRow]) -> VariantRow | None:
    """Return the variant with the most samples a second that passes parity, or None."""
    return max(
        (row for row in measured_rows if passes_parity(row)),
        key=lambda row: float(row["samples_per_second"]),
        default=None,
    )


def fastest_variant_tie_and_break_even_lines(all_rows: Sequence[VariantRow]) -> list[str]:
    """Return a line that names the fastest variant, and lines that limit it."""
    best_row = fastest_row_that_passes_parity(all_rows)
    if best_row is None:
        return ["fastest: none passed parity"]
    other_rows = [row for row in all_rows if row["state"] == MEASURED_STATE and row is not best_row]
    passing_rows = [row for row in other_rows if passes_parity(row)]
    best_seconds, best_start_seconds = best_row["seconds"], best_row["first_step"]["since_launch"]
    indistinguishable_rows = [
        row for row in passing_rows if best_seconds["quartile_3"] >= row["seconds"]["quartile_1"]
    ]
    fastest_names = [best_row["name"], *(row["name"] for row in indistinguishable_rows)]
    ratios_text = "".join(
        f", {ratio_text(best_row, row)}" for row in other_rows if row not in indistinguishable_rows
    )
    lines = [f"fastest: {' or '.join(fastest_names)}{ratios_text}"]
    if indistinguishable_rows:
        lines.append(
            f"{' and '.join(fastest_names)} cannot be told apart: the middle halves of their steps overlap"
        )
    for row in passing_rows:
        later_seconds = best_start_seconds - row["first_step"]["since_launch"]
        gain_seconds = row["seconds"]["median"] - best_seconds["median"]
        # Without a difference there is no step from which one is ahead.
        if later_seconds > 1 and gain_seconds > 0 and row not in indistinguishable_rows:
            steps_text = f"{later_seconds / gain_seconds:,.0f} steps"
            lines.append(
                f"{best_row['name']} begins {later_seconds:.0f} s later than {row['name']}: ahead after {steps_text}"
            )
    return lines


def ratio_text(best_row: VariantRow, other_row: VariantRow) -> str:
    """Return the ratio to another variant, such as `1.90 x eager`."""
    return f"{best_row['samples_per_second'] / other_row['samples_per_second']:.2f} x {other_row['name']}"


def bench_table_and_notes_text(all_rows: Sequence[VariantRow]) -> str:
    """Return the figures of measured variants, and a line with the reason for each other one."""
    measured_rows = [row for row in all_rows if row["state"] == MEASURED_STATE]
    cells = (
        [_TABLE_HEAD, *(_table_cells_of_measured_row(row) for row in measured_rows)]
        if measured_rows
        else []
    )
    columns = [
        # Without columns that no variant fills, such as tokens/s or MFU.
        column
        for column in zip(*cells)
        if set(column[1:]) != {"-"}
    ]
    return "\n".join(
        [
            *aligned_table_lines(zip(*columns), right_aligns_after_first_column=True),
            *_failure_parity_and_unit_notes(all_rows),
        ]
    )


def _table_cells_of_measured_row(row: VariantRow) -> tuple[str, ...]:
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
        f"{row['mfu_of_vendor_peak']:.1%}" if row["mfu_of_vendor_peak"] else "-",
        human_bytes(max(row["memory"])),
        f"{row['first_step']['since_launch']:.1f} s",
        _reference_or_difference_cell(row["parity"]),
        f"{row['ratio']:.2f} x",
    )


def _reference_or_difference_cell(parity_record: dict[str, object]) -> str:
    """Return `reference`, `1.2e-06`, or a text in capitals where the figures must not be used."""
    if parity_record["verdict"] == "passes":
        return f"{parity_record['largest']:.0e}"
    if parity_record["verdict"] == "differs":
        return (
            "DIFFERS"
            if parity_record["largest"] is None
            else f"DIFFERS {parity_record['largest']:.0e}"
        )
    return "reference" if parity_record["verdict"] == "reference" else "NOT COMPARED"


def _failure_parity_and_unit_notes(all_rows: Sequence[VariantRow]) -> list[str]:
    notes = [
        f"{row['name']}: {row['state']}: {shorten_reason(row['reason'])}"
        for row in all_rows
        if "reason" in row
    ]
    measured_rows = [row for row in all_rows if row["state"] == MEASURED_STATE]
    notes += [
        f"{row['name']}: parity: {row['parity']['why']}"
        for row in measured_rows
        if row["parity"].get("why") and not passes_parity(row)
    ]
    for row in measured_rows:
        if "loss_from_highest" in row["parity"]:
            change_text = (
                f"changes the loss by {row['parity']['loss_from_highest']:.1e}; parity is "
                "compared at highest"
            )
            notes.append(f"{row['name']}: matmul_precision {row['matmul_precision']} {change_text}")
    if measured_rows:
        reference_names = sorted({row["ratio_to"] for row in measured_rows})
        notes.append(
            f"ratio: to {', '.join(reference_names)}; memory: of the largest rank, without libraries"
        )
        notes.append("parity: largest relative difference from PyTorch")
    return notes


def shorten_reason(reason: str) -> str:
    """Return the first line of the reason for which a variant is refused or failed."""
    return reason.strip().partition("\n")[0]
