"""A run by its folder: its status, output and results, and requests to it."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ortlaunch.api.inputs import dotted_assignments_from_section_overrides
from ortlaunch.api.run_wait import wait_for_run_end_or_raise
from ortlaunch.base.json_types import Json
from ortlaunch.launch.record import current_time_iso
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lines import read_json_lines_with_keys
from ortlaunch.started_runs import listing, logs, requests, status
from ortlaunch.started_runs import runs_table as table
from ortlaunch.started_runs.registry import run_folder_by_name_or_path
from ortlaunch.started_runs.requests import StopResult
from ortlaunch.started_runs.status import Status

if TYPE_CHECKING:
    import pandas

    from ortlaunch.search.parallel import Picture
    from ortlaunch.started_runs.diagnosis import Diagnosis

# Pixels of a report in a notebook.
_HEIGHT = 600


class Run:
    """A run, which may be alive; everything is read from its folder at each call."""

    def __init__(self, path: str | os.PathLike[str] = "latest") -> None:
        """Find a run.

        Args:
            path: its folder, its name, or `latest`: the newest training of this user in the
                current folder or below it.

        Raises:
            InputError: there is no such folder or run.
        """
        self._folder = RunDir(run_folder_by_name_or_path(Path(path)))
        status.require_existing_run_folder(self._folder)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The run folder; docs/reference/run-folder.md describes its files."""
        return self._folder.path

    def status(self) -> Status:
        """Return the state, the last step, loss and speed, and after the end the verdict.

        Raises:
            InputError: the folder is no run's, or this user may not read it.
        """
        return status.read_status(self._folder)

    def metrics(self) -> list[Json]:
        """Return a mapping for each logged step and each evaluation, in order.

        The names are those of metrics.jsonl; `step` is in each. Damaged lines are left out.
        """
        return read_json_lines_with_keys(self._folder.metrics, "step").values

    def frame(self) -> pandas.DataFrame:
        """Return the metrics as a table of pandas, one row for each mapping."""
        import pandas

        return pandas.DataFrame(self.metrics())

    def logs(self, rank: int = 0, follow: bool = False) -> Iterator[str]:
        """Yield the output of a rank in pieces; of a queued run, that of its job.

        Args:
            rank: whose output.
            follow: whether to continue until the run has ended.

        Raises:
            InputError: there is no run or no such rank.
        """
        return logs.iterate_rank_output_text(self._folder, rank, follow)

    def wait(self, progress: bool = False, check: bool = True) -> Status:
        """Wait for the end of the run, and return its last status.

        An interrupt ends the waiting, not the run.

        Args:
            progress: whether to show a bar of tqdm.
            check: whether to raise an error if the run failed.

        Raises:
            RunError: the run failed; the message is its verdict.
            InputError: the end cannot be detected from this host.
        """
        return wait_for_run_end_or_raise(self._folder, progress, check)

    def stop(self, wait: bool = True) -> StopResult:
        """Request the run to finish its step, save and end; `train` on its folder continues it.

        Args:
            wait: whether to wait for its end.

        Raises:
            InputError: it has nothing to save, or is another user's.
        """
        return requests.request_stop_and_wait_if_asked(self._folder, wait)

    def checkpoint(self) -> Path:
        """Request a checkpoint after the next step, wait for it, and return its folder.

        Raises:
            InputError: the run does not train now.
            LaunchError: it ended, or could not save.
        """
        return self._folder.checkpoint_folder(requests.request_checkpoint_and_wait(self._folder))

    def restart(self) -> str:
        """Request an elastic run to save and start again; return a line with its hosts."""
        return requests.request_restart_and_wait(self._folder)

    def cancel(self) -> str:
        """End the run with all its processes, without saving; return a text with the result."""
        from ortlaunch.started_runs.cancel import cancel_run_and_wait_for_its_end

        return cancel_run_and_wait_for_its_end(self._folder)

    def evaluate(
        self,
        *assignments: str,
        step: int | Literal["best"] | None = None,
        options: LaunchOptions | None = None,
        progress: bool = False,
        **overrides: object,
    ) -> Json:
        """Measure a checkpoint on data.evaluation, in processes of its own, and wait.

        Args:
            assignments, overrides: changes of the recipe, as in `load`.
            step: which checkpoint; best: that of checkpoint.keep_best; None: the newest.
            options: launcher, hosts and ranks.
            progress: whether to show a bar of tqdm.

        Returns:
            The contents of evaluation.json: loss, and the metrics of the task.

        Raises:
            InputError: there is no checkpoint or no evaluation data, or an override is wrong.
            RunError: the evaluation failed.
        """
        from ortlaunch.api.evaluate import start_evaluation_and_await_result

        all_assignments = (*assignments, *dotted_assignments_from_section_overrides(overrides))
        return start_evaluation_and_await_result(
            self._folder, all_assignments, step, options or LaunchOptions(), progress
        )

    def export(
        self,
        format: str = "huggingface",
        step: int | Literal["best"] | None = None,
        to: str | os.PathLike[str] | None = None,
        push: str | None = None,
        lora: str | None = None,
        progress: bool = False,
    ) -> Path:
        """Write a checkpoint as a model for other programs, and return its folder.

        Args:
            format: `huggingface`, `onnx` or `ondevice`.
            step: which checkpoint; best: that of checkpoint.keep_best; None: the newest.
            to: a new folder; None: `exports/step_N` of the run folder.
            push: the repository `OWNER/NAME` to upload to.
            lora: `merged` or `alone`; None: as `model.lora.merge` sets it.
            progress: whether to show the output of the process that writes.

        Raises:
            InputError: the checkpoint or the format does not exist, or the folder exists.
            RunError: the process failed.
        """
        from ortlaunch.api.export import ExportOptions, export_checkpoint_and_push_if_requested

        options = ExportOptions(step, None if to is None else Path(to), format, push, lora)
        return export_checkpoint_and_push_if_requested(
            self._folder, options, ("stdout", "stderr") if progress else ()
        )

    def generate(
        self,
        prompt: str,
        step: int | Literal["best"] | None = None,
        tokens: int = 50,
        temperature: float = 0.0,
        seed: int = 0,
        raw: bool = False,
    ) -> str:
        """Return a prompt with its continuation by a causal model, computed on the CPU.

        Args:
            prompt: the text to continue.
            step: which checkpoint; best: that of checkpoint.keep_best; None: the newest, or its export.
            tokens: the largest number of new tokens.
            temperature: 0: the most probable token each time.
            seed: seeds the draws.
            raw: whether to leave out the chat template.

        Raises:
            InputError: the run's model does not generate text, or there is no checkpoint.
            RunError: the process failed.
        """
        from ortlaunch.api.generate import GenerationRequest, generate_text_in_process

        return generate_text_in_process(
            GenerationRequest(str(self.path), prompt, step, tokens, temperature, seed, raw)
        )

    def compare(self, other: Run) -> list[str]:
        """Return a line for each difference from this run to another one.

        Recipe, world, data, code and packages are compared, then state, step and newest metrics.

        Raises:
            InputError: one of them has not begun.
        """
        from ortlaunch.api.compare import compare_runs

        return compare_runs(self._folder, other._folder)

    def diagnose(self) -> Diagnosis:
        """Return why the run ended: a verdict, the evidence and advice.

        Raises:
            InputError: the folder is no run's.
        """
        from ortlaunch.started_runs.diagnosis import diagnose_run

        return diagnose_run(self._folder)

    def _repr_html_(self) -> str:
        """Return the report of the run, for a notebook."""
        from ortlaunch.report import report_page_html
        from ortlaunch.report.records import read_run_records_or_refuse

        # In a frame: the page's styles must not change the notebook.
        text = html.escape(
            report_page_html(read_run_records_or_refuse([self.path]), current_time_iso())
        )
        return f'<iframe srcdoc="{text}" width="100%" height="{_HEIGHT}" style="border:0"></iframe>'


def runs(
    newest: int | None = 20, name: str = "", state: str | None = None, metric: str | None = None
) -> list[Run]:
    """Return the runs that this user started or queued, the newest first.

    Args:
        newest: the largest number; None: all of them.
        name: a part of the folder's path or of the run's name, with `*` and `?` as in a shell.
        state: the state as `status` prints it, as `failed`.
        metric: a limit of a newest value, as `evaluation_loss<1.5`.

    Raises:
        InputError: there is no such state, or the limit is no limit.
    """
    return [Run(found_status.run) for found_status in statuses(newest, name, state, metric)]


statuses = listing.newest_statuses_that_match
runs_table = table.runs_table_text


def write_report(paths: Sequence[Path], to: Path | None, sweep: Picture | None = None) -> Path:
    """Write one HTML page of runs, with the picture of their sweep, and return its path."""
    from ortlaunch.report import write_report_page

    return write_report_page(paths, to, current_time_iso(), sweep)
