"""Fixtures for tests of a bench: a recipe with engine auto, and variants with known times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ortlaunch.bench import report
from ortlaunch.bench.variant_job import VariantJob
from ortlaunch.bench.variants import Variant, resolve_variant_or_record_refusal
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.resolve.resolve import ResolvedRun, load_and_resolve_recipe
from ortlaunch.run_folder.folder import RunDir
from tests.makers import CUSTOM


def resolved(environ: dict[str, str] | None = None, **sections: Any) -> ResolvedRun:
    """Return a custom recipe with engine auto and these sections, read from recipe.yaml."""
    path = Path("recipe.yaml")
    path.write_text(yaml.safe_dump({**CUSTOM, "engine": {"name": "auto"}, **sections}))
    return load_and_resolve_recipe(path, (), LaunchOptions(), environ or {})


def player(
    name: str, took: list[list[float]], parity: dict[str, Any] | None = None, *chosen: str
) -> VariantJob:
    """Return a variant whose steps have these durations in seconds, turn by turn."""
    found = resolve_variant_or_record_refusal(Variant(name, chosen), resolved())
    made = VariantJob(found, RunDir(f"out/{found.folder_name}"))
    # As the job reports when it has warmed up.
    made.ready_answer = {
        "flops_per_token": None,
        "peak_flops": None,
        "vendor_peak_flops": None,
        "engine": {},
        "first_step": {"since_launch": 3.0},
    }
    # One rank with 1 MiB.
    made.turns = [{"seconds": seconds, "memory": [1 << 20], "tokens": [0, 0]} for seconds in took]
    made.parity = parity or {"verdict": "passes", "largest": 1e-6}
    return made


def rows(*players: VariantJob) -> list[dict[str, Any]]:
    """Return the figures of these variants."""
    return report.variant_result_rows_with_ratio_and_mfu(
        [each.variant for each in players], players
    )
