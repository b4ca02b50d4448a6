"""`ortlaunch bench`: measure the variants, show them, write the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ortlaunch.bench import auto
from ortlaunch.bench.measure import Length, measure, new_folder, prepared
from ortlaunch.bench.picture import draw, require_matplotlib
from ortlaunch.bench.report import FAILED, MEASURED, passes, table, verdict
from ortlaunch.bench.variants import ENGINES
from ortlaunch.json_types import Json
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.run_folder.folder import RunDir, read_own_json, write_json_atomically
from ortlaunch.run_folder.profile_record import profile_lines


def bench(
    resolved: ResolvedRun,
    engines: Sequence[str],
    vary: Sequence[str],
    length: Length,
    out: Path | None,
    picture: bool,
) -> int:
    """Measure the variants, print the comparison and write it.

    Returns:
        The exit status: 1 where a variant failed or differs from plain PyTorch, else 0.

    Raises:
        InputError: nothing can be measured, and nothing was started (exit status 2).
    """
    # Before the measurement, which takes long.
    if picture:
        require_matplotlib()
    found = prepared(resolved, engines or ENGINES, vary)
    folder = new_folder(out, resolved.file.recipe.name)
    report = measure(resolved, found, length, folder, lambda text: print(text, flush=True))
    rows = report["variants"]
    write_json_atomically(folder / "bench.json", report)
    written = [folder / "bench.json"]
    measured = [row for row in rows if row["state"] == MEASURED]
    if picture and measured:
        draw(measured, title(resolved, report), folder / "bench.png")
        written.append(folder / "bench.png")
    print(
        "\n".join(["", table(rows), *verdict(rows), f"written: {', '.join(map(str, written))}"]),
        flush=True,
    )
    # A variant that failed has no profile.
    for path in filter(
        Path.exists, (RunDir(row["folder"]).profile for row in rows if "folder" in row)
    ):
        print("", *profile_lines(read_own_json(path)), f"written: {path}", sep="\n", flush=True)
    # This bench measured all that engine auto would, so auto can use its result.
    if not engines and not vary and auto.long_enough(report):
        choice = auto.remember(
            resolved, auto.decide(rows, folder, resolved.file.recipe.train.max_steps)
        )
        print(
            f"engine.name: auto will choose {choice.chosen} for this recipe on this machine",
            flush=True,
        )
    return int(
        any(
            # A variant that was refused is no failure.
            row["state"] == FAILED or (row["state"] == MEASURED and not passes(row))
            for row in rows
        )
    )


def title(resolved: ResolvedRun, report: Json) -> str:
    """Return the title of the figure: recipe, hardware and number of ranks."""
    hardware = report["hardware"]
    ranks = resolved.world.ranks
    gpus = hardware["gpus"] if report["device"] == "cuda" else []
    where = gpus[0] if gpus else f"{hardware['processor']}, {hardware['cores']} cores"
    return f"{report['name']} on {where}, {ranks} {'rank' if ranks == 1 else 'ranks'}"
