"""Trackers that get the metrics besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Rank 0 only. Each runs in a thread of its own, because no server may delay training. If one fails,
the run continues.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ortlaunch.recipe import Recipe
from ortlaunch.recipe.text.source_location import path_and_leaf_value_pairs
from ortlaunch.run_folder.folder import RunDir, write_text_atomically

# Seconds for sending the rest at the end.
_LEAVE_SECONDS = 60.0


class Tracker(Protocol):
    """A receiver of values by name."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send the values of one step."""

    def close(self, has_failed: bool) -> None:
        """Send all that is left; `has_failed` marks a training that did not reach its end."""


class TrackerThread:
    """A tracker in its own thread."""

    def __init__(self, name: str, recipe: Recipe, run: RunDir, first_step: int) -> None:
        self.name = name
        self._queued_values = queue.SimpleQueue[Any]()
        # A daemon thread: a server that hangs must not keep the process alive.
        self._thread = threading.Thread(
            target=self._send_queued_values_until_closed,
            args=(recipe, run, first_step),
            daemon=True,
        )
        self._thread.start()

    def queue_values(self, step: int, values: Mapping[str, object]) -> None:
        """Queue the values of a step, without waiting."""
        # Trackers accept numbers only.
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        self._queued_values.put((step, numbers))

    def end_and_wait_for_limited_time(self, training_failed: bool) -> None:
        """Wait for the tracker, for a limited time."""
        self._queued_values.put(training_failed)
        self._thread.join(_LEAVE_SECONDS)
        if self._thread.is_alive():
            print(
                f"log.trackers: {self.name} did not accept all values within "
                f"{_LEAVE_SECONDS:.0f} s; metrics.jsonl has all values"
            )

    def _send_queued_values_until_closed(
        self, recipe: Recipe, run: RunDir, first_step: int
    ) -> None:
        try:
            tracker = TRACKERS[self.name](recipe, run, first_step)
            # close() puts a bool into the queue, as the last item.
            while not isinstance(queued_item := self._queued_values.get(), bool):
                tracker.log(*queued_item)
            tracker.close(queued_item)
        # A tracker's library may raise anything, and some call sys.exit.
        except (Exception, SystemExit) as error:
            message_lines = str(error).strip().splitlines() or [""]
            print(
                f"log.trackers: {self.name} FAILED, {type(error).__name__}: {message_lines[0]}; training "
                "continues without it, and metrics.jsonl has all values",
                flush=True,
            )


class TensorBoardTracker:
    """Event files in the run folder.

    Events that an earlier start wrote after its checkpoint are no longer shown.
    """

    def __init__(self, recipe: Recipe, run: RunDir, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides older events from purge_step on.
        self._board = SummaryWriter(
            str(run.tensorboard), purge_step=first_step + 1 if first_step else None
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            # Hugging Face's Trainer names the groups so.
            is_evaluation = name.startswith("evaluation_")
            self._board.add_scalar(
                f"eval/{name[11:]}" if is_evaluation else f"train/{name}", value, step
            )

    def close(self, has_failed: bool) -> None:
        self._board.close()


class WandbTracker:
    """One wandb run for all starts in a run folder.

    Account, server and mode come from WANDB_* or `wandb login`.
    """

    def __init__(self, recipe: Recipe, run: RunDir, first_step: int) -> None:
        import wandb

        run.trackers.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=recipe.log.project or recipe.name,
            name=run.path.name,
            id=_read_or_create_id_file(run.trackers / "wandb_id", lambda: os.urandom(6).hex()),
            # Continue the run of this id if it exists.
            resume="allow",
            dir=str(run.trackers),
            config=_recipe_without_secrets(recipe),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step")
        # wandb's own step only counts up; ours returns to a checkpoint's step.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))


class MlflowTracker:
    """One MLflow run for all starts in a run folder.

    It is stored at MLFLOW_TRACKING_URI, else in files of the run folder.
    """

    def __init__(self, recipe: Recipe, run: RunDir, first_step: int) -> None:
        tracking_uri = os.environ.get("MLFLOW_TRACKING_URI")
        if tracking_uri is None:
            # MLflow refuses plain files by default, in favour of a database.
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri or (run.trackers / "mlruns").absolute().as_uri())
        self._run = _read_or_create_id_file(
            run.trackers / "mlflow_id",
            lambda: self._create_mlflow_run_and_return_its_id(recipe, run),
        )
        self._client.update_run(self._run, "RUNNING")
        if first_step == 0:
            # Some versions of MLflow limit a parameter's value to 500 characters.
            settings = {
                f"{name}": str(value)[:500]
                for name, value in path_and_leaf_value_pairs(_recipe_without_secrets(recipe))
            }
            # MLflow refuses another value for a parameter that an earlier start has set.
            with contextlib.suppress(Exception):
                self._client.log_batch(
                    self._run, params=[Param(*item) for item in settings.items()]
                )

    def _create_mlflow_run_and_return_its_id(self, recipe: Recipe, run: RunDir) -> str:
        name = recipe.log.project or recipe.name
        existing_experiment = self._client.get_experiment_by_name(name)
        experiment = (
            existing_experiment.experiment_id
            if existing_experiment
            else self._client.create_experiment(name)
        )
        return str(self._client.create_run(experiment, run_name=run.path.name).info.run_id)

    def log(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        # Milliseconds since the epoch.
        timestamp_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._run,
            metrics=[Metric(name, value, timestamp_ms, step) for name, value in values.items()],
        )

    def close(self, has_failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if has_failed else "FINISHED")


TRACKERS: dict[str, Callable[[Recipe, RunDir, int], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def _read_or_create_id_file(id_path: Path, create_id: Callable[[], str]) -> str:
    """Return the id in this file; the first start in a run folder makes and stores it."""
    if not id_path.exists():
        id_path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(id_path, create_id())
    return id_path.read_text(encoding="utf-8")


def _recipe_without_secrets(recipe: Recipe) -> dict[str, object]:
    """Return the recipe without the values of environment variables, which may be secrets."""
    settings = recipe.model_dump(mode="json")
    settings["launch"]["env"] = sorted(settings["launch"]["env"])
    return settings
