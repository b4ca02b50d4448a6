"""Record the metrics of a training: in metrics.jsonl, in trackers and on the terminal.

Rank 0 only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import fields

from ortlaunch.base.json_types import Json
from ortlaunch.base.units import clock_duration
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import (
    RunDir,
    json_text,
    terminal_columns_of_command,
    write_text_atomically,
)
from ortlaunch.run_folder.lines import read_json_lines_with_keys
from ortlaunch.run_folder.records import MetricsLine
from ortlaunch.tables.metrics import METRICS
from ortlaunch.worker.training.trackers import TrackerThread

EVALUATION = "evaluation_"
# Values that a line leaves out first where it is too long for the terminal, in this order.
_DROPPED_IF_NARROW = ("padding_share", "epoch", "gradient_norm", "learning_rate")


class MetricsWriter:
    """Writer of the metrics of each logged step and each evaluation.

    A record has the step, the elapsed seconds and the values that are passed to `write_and_print_step`.
    """

    def __init__(self, recipe: Recipe, run: RunDir, first_step: int) -> None:
        self.max_steps = recipe.train.steps
        self.first_step = first_step
        self.earlier_seconds = _cut_metrics_and_read_elapsed_seconds(run, first_step)
        # Line buffered, so that other processes can follow the file.
        self.file = run.metrics.open("a", encoding="utf-8", buffering=1)
        self.trackers = [
            TrackerThread(name, recipe, run, first_step) for name in recipe.log.trackers
        ]
        self.started = time.perf_counter()

    def write_and_print_step(
        self, completed_steps: int, value_by_name: Mapping[str, object]
    ) -> None:
        """Record and print the values of one step. Steps count from 1."""
        elapsed = time.perf_counter() - self.started
        # Elapsed time is the sum over all starts of the run, without steps that a resume repeats.
        record = {
            "step": completed_steps,
            **value_by_name,
            "elapsed_seconds": round(self.earlier_seconds + elapsed, 3),
        }
        try:
            self.file.write(json_text(record) + "\n")
        except OSError as error:
            # The OSError of a failed write does not name the file.
            error.filename = self.file.name
            raise
        for tracker in self.trackers:
            tracker.queue_values(completed_steps, value_by_name)
        self._print_step_fitting_terminal(completed_steps, value_by_name, elapsed)

    def _print_step_fitting_terminal(
        self, completed_steps: int, value_by_name: Mapping[str, object], elapsed_seconds: float
    ) -> None:
        # The speed of this start only: an earlier one may have had other hosts.
        remaining_seconds = (
            elapsed_seconds
            / max(1, completed_steps - self.first_step)
            * (self.max_steps - completed_steps)
        )
        head, last = (
            f"step {completed_steps}/{self.max_steps}",
            f"ETA {clock_duration(remaining_seconds)}",
        )
        columns = terminal_columns_of_command()
        parts = [head, *_formatted_value_texts(value_by_name), last]
        # metrics.jsonl has what a narrow terminal has no room for.
        for name in _DROPPED_IF_NARROW:
            if columns is not None and len("  ".join(parts)) > columns:
                value_by_name = {**value_by_name, name: None}
                parts = [head, *_formatted_value_texts(value_by_name), last]
        print("  ".join(parts), flush=True)

    def close_file_and_trackers(self, training_failed: bool = False) -> None:
        """Close the file and the trackers; `training_failed`: whether an error ended the training."""
        # After a failed write, its error comes again.
        with contextlib.suppress(*([OSError] if training_failed else [])):
            self.file.close()
        for tracker in self.trackers:
            tracker.end_and_wait_for_limited_time(training_failed)


def _formatted_value_texts(value_by_name: Mapping[str, object]) -> list[str]:
    forms = {
        "epoch": "epoch {:.2f}", "loss": "loss {:.4f}",
        "learning_rate": "lr {:.3g}", "gradient_norm": "grad norm {:.3g}", "tokens_per_second": "{:,.0f} tokens/s",
        "padding_share": "{:.0%} padding",
        "samples_per_second": "{:,.1f} samples/s", "mfu": "MFU {:.1%}",
        **{EVALUATION + name: metric.shown for name, metric in METRICS.items()},
    }  # fmt: skip
    # A line has one speed: samples only if tokens are not counted.
    if value_by_name.get("tokens_per_second") is not None:
        del forms["samples_per_second"]
    user_values = (
        f"{name.replace(EVALUATION, 'evaluation ')} {value_by_name[name]:.4g}"
        for name in names_of_present_user_values(value_by_name)
    )
    return [
        *(
            form.format(value_by_name[name])
            for name, form in forms.items()
            if value_by_name.get(name) is not None
        ),
        *user_values,
    ]


def names_of_present_user_values(value_by_name: Mapping[str, object]) -> list[str]:
    """Return the names of the values that come from the user's model or metrics and are not None."""
    known_names = {
        *(field.name for field in fields(MetricsLine)),
        *(EVALUATION + name for name in METRICS),
    }
    return [
        name
        for name, value in value_by_name.items()
        if name not in known_names and value is not None
    ]


def _cut_metrics_and_read_elapsed_seconds(run: RunDir, last_kept_step: int) -> float:
    """Remove the lines after step `last_kept_step` from metrics.jsonl, because these steps are repeated.

    Returns:
        The elapsed seconds of the last line that is left.
    """
    lines = read_json_lines_with_keys(run.metrics, "step", "elapsed_seconds")
    if lines.unreadable:
        print(*lines.unreadable, sep="\n", flush=True)
    kept = [record for record in lines.values if record["step"] <= last_kept_step]
    if run.metrics.exists():
        write_text_atomically(run.metrics, "".join(json_text(record) + "\n" for record in kept))
    return float(kept[-1]["elapsed_seconds"]) if kept else 0.0


def readable_metrics_records(run: RunDir) -> list[Json]:
    """Return the readable lines of metrics.jsonl that have a step."""
    return read_json_lines_with_keys(run.metrics, "step").values
