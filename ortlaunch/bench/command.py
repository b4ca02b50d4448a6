"""`ortlaunch bench`: measure the variants, show them, write the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ortlaunch.base.json_types import Json
from ortlaunch.bench import auto
from ortlaunch.bench.measure import (
    MeasurementLength,
    create_or_reuse_bench_folder,
    measure_variants_and_build_report,
    resolve_variants_or_refuse_if_none_can_run,
)
from ortlaunch.bench.picture import require_matplotlib, write_bar_chart_as_png
from ortlaunch.bench.report import (
    FAILED_STATE,
    MEASURED_STATE,
    bench_table_and_notes_text,
    fastest_variant_tie_and_break_even_lines,
    passes_parity,
)
from ortlaunch.bench.variants import ENGINES
from ortlaunch.launch.record import current_time_iso
from ortlaunch.report import bench_page_html
from ortlaunch.report.charts import bar_chart
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run_folder.folder import (
    RunDir,
    read_json_or_raise_damaged,
    write_json_atomically,
    write_text_atomically,
)
from ortlaunch.run_folder.profile_record import profile_text_lines


def measure_print_and_write_bench_and_cache_engine(
    resolved_run: ResolvedRun,
    engine_names: Sequence[str],
    vary_options: Sequence[str],
    measurement_length: MeasurementLength,
    output_folder: Path | None,
    draws_picture: bool,
) -> int:
    """Measure the variants, print the comparison and write it.

    Returns:
        The exit status: 1 where a variant failed or differs from plain PyTorch, else 0.

    Raises:
        InputError: nothing can be measured, and nothing was started (exit status 2).
    """
    # Before the measurement, which takes long.
    if draws_picture:
        require_matplotlib()
    prepared_variants = resolve_variants_or_refuse_if_none_can_run(
        resolved_run, engine_names or ENGINES, vary_options
    )
    bench_folder = create_or_reuse_bench_folder(output_folder, resolved_run.recipe_file.recipe.name)
    bench_report = measure_variants_and_build_report(
        resolved_run,
        prepared_variants,
        measurement_length,
        bench_folder,
        lambda text: print(text, flush=True),
    )
    variant_rows = bench_report["variants"]
    write_json_atomically(bench_folder / "bench.json", bench_report)
    written_paths = [bench_folder / "bench.json"]
    table_text = bench_table_and_notes_text(variant_rows)
    measured_rows = [row for row in variant_rows if row["state"] == MEASURED_STATE]
    if measured_rows:
        title = bench_picture_title(resolved_run, bench_report)
        chart = bar_chart(measured_rows, title)
        written_paths.append(bench_folder / "bench.html")
        page = bench_page_html(title, chart, table_text, current_time_iso())
        write_text_atomically(written_paths[-1], page)
        if draws_picture:
            written_paths.append(bench_folder / "bench.png")
            write_bar_chart_as_png(chart, written_paths[-1])
    print(
        "\n".join(
            [
                "",
                table_text,
                *fastest_variant_tie_and_break_even_lines(variant_rows),
                f"written: {', '.join(map(str, written_paths))}",
            ]
        ),
        flush=True,
    )
    # A variant that failed has no profile.
    for profile_path in filter(
        Path.exists, (RunDir(row["folder"]).profile for row in variant_rows if "folder" in row)
    ):
        print(
            "",
            *profile_text_lines(read_json_or_raise_damaged(profile_path)),
            f"written: {profile_path}",
            sep="\n",
            flush=True,
        )
    # This bench measured all that engine auto would, so auto can use its result.
    if (
        not engine_names
        and not vary_options
        and auto.is_bench_enough_to_choose_engine(bench_report)
    ):
        choice = auto.cache_measured_engine_choice_and_add_its_key(
            resolved_run,
            auto.choose_fastest_engine_of_bench_or_raise(
                variant_rows, bench_folder, resolved_run.recipe_file.recipe.train.max_steps
            ),
        )
        print(
            f"engine.name: auto will choose {choice.chosen} for this recipe on this machine",
            flush=True,
        )
    return int(
        any(
            # A variant that was refused is no failure.
            row["state"] == FAILED_STATE
            or (row["state"] == MEASURED_STATE and not passes_parity(row))
            for row in variant_rows
        )
    )


def bench_picture_title(resolved_run: ResolvedRun, bench_report: Json) -> str:
    """Return the title of the figure: recipe, hardware and number of ranks."""
    hardware = bench_report["hardware"]
    rank_count = resolved_run.world.rank_count
    gpu_names = hardware["gpus"] if bench_report["device"] == "cuda" else []
    hardware_text = (
        gpu_names[0] if gpu_names else f"{hardware['processor']}, {hardware['cores']} cores"
    )
    return f"{bench_report['name']} on {hardware_text}, {rank_count} {'rank' if rank_count == 1 else 'ranks'}"
