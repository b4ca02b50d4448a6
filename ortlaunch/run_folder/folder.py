"""Every path of a run folder, with atomic writing and tolerant reading of its files.

The rows of RunDir are the table of the files: a row gives a path, and a line of docs/reference/run-folder.md.
Standard library only.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

from ortlaunch.base.errors import DamagedFile
from ortlaunch.base.json_types import (
    parse_json_or_raise_decode_error,
    read_regular_file_bytes_or_refuse,
)

# Files of a checkpoint: its list of files with checksums, and the mark that it is complete.
MANIFEST = "manifest.json"
COMPLETE = "COMPLETE"
# Environment variable of the ranks: the width of the command's terminal; empty if it has none.
PROGRESS_VARIABLE = "ORTLAUNCH_PROGRESS"


_FULL_BYTES = 1 << 20  # a disk with less free space counts as full
# Bytes of a line of `accounts` and `ended_ranks`: 7 digits and a newline. All lines have this length, so that the
# number of lines follows from the size of the file.
RANK_LINE_BYTES = 8
_STEP = re.compile(r"step_(\d+)")
# Names of the temporary files of `write_text_atomically`.
_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}")

# Files whose contents are of one start of the ranks, and the folder for those of an earlier one.
_FILES_OF_ONE_START = ("errors", "ended_ranks")
_LATE_FOLDER = "attempts/late"


class _FileRow:
    """A row of the table: a file or folder, its writer, its contents, and their record class."""

    def __init__(self, name: str, writer: str, contents: str, record: str = "") -> None:
        self.name = name
        self.writer = writer
        self.contents = contents
        self.record = record

    # A descriptor: `run.plan` is the path in the folder of that run.
    def __get__(self, run: RunDir, _: type[RunDir]) -> Path:
        if self.name.startswith(_FILES_OF_ONE_START) and run.is_superseded:
            return run.path / _LATE_FOLDER / self.name
        return run.path / self.name


class RunDir:
    """The folder of one run, the only channel between the control side and the worker."""

    recipe = _FileRow("recipe.yaml", "command", "the resolved recipe")
    plan = _FileRow("plan.json", "command", "hosts, ranks, batch and memory", "Plan")
    deepspeed = _FileRow("deepspeed.json", "command", "DeepSpeed's configuration")
    environment = _FileRow("environment.json", "command", "host, versions of packages, variables")
    request = _FileRow("request.sh", "command", "command and files sent to the launcher")
    commands = _FileRow("commands.jsonl", "command", "each start's command line and commit")
    modules = _FileRow("modules", "rank 0", "the user's code")
    vocabulary = _FileRow(
        "vocabulary.json",
        "rank 0",
        "names of the class numbers, and how the tokenizer was trained",
        "VocabularyRecord",
    )
    tokenizer = _FileRow("tokenizer", "rank 0", "the tokenizer that the weights are trained with")
    hostfile = _FileRow("hostfile", "command", "hosts and slots, for mpirun")
    # Three ways for ranks to meet: a file on one host, torchrun's agents, or rank 0's address.
    store = _FileRow("store", "command", "a file by which the ranks of one host connect")
    rendezvous = _FileRow("rendezvous", "command", "the file by which torchrun's agents connect")
    meeting = _FileRow("meeting", "command", "address of rank 0, for ranks of several hosts")
    agents = _FileRow(
        "agents.json", "command", "command that ssh starts on each host, with torchrun"
    )
    launcher_error = _FileRow("launcher_error.json", "torchrun", "error of torchrun itself")
    submitted = _FileRow("submitted.yaml", "command", "recipe of a queued run")
    job_script = _FileRow("job.sh", "command", "batch script of a queued run")
    manifest = _FileRow("job.yaml", "command", "manifest of a queued run")
    output = _FileRow("output.txt", "command", "the output of a run that was started from Python")
    logs = _FileRow(
        "logs", "supervisors", "`rank_00003.{out,err}` of each rank; `slurm-12.out` of a queued run"
    )
    errors = _FileRow(
        "errors", "supervisors", "`rank_00003.json` of failed ranks; `stacks_00003.txt`"
    )
    flight_recorder = _FileRow(
        "errors/nccl_trace_rank_", "NCCL", "NCCL's flight recorder; the rank's number is added"
    )
    failure_printed = _FileRow(
        "errors/printed", "supervisors", "empty: a rank has printed the failure"
    )
    stall = _FileRow("errors/stall.json", "supervisors", "a stall: its ranks, since when")
    lost = _FileRow("errors/lost.json", "supervisors", "a host that was lost")
    accounts = _FileRow(
        "errors/accounts", "supervisors", "the rank of each error record, in the order of time"
    )
    ended_ranks = _FileRow("ended_ranks", "supervisors", "the ranks of this start that have ended")
    slow_ranks = _FileRow(
        "slow_ranks.jsonl", "supervisors", "slow ranks that delay the others, each once"
    )
    attempts = _FileRow(
        "attempts",
        "command",
        "`1/{logs,errors}` of a failed start, moved here by the next one; `late/errors` of "
        "processes that came back after it",
    )
    ready = _FileRow(
        "ready", "rank 0", "marks of prepared starts, if the user's own launcher starts the ranks"
    )
    fabric = _FileRow("fabric.json", "rank 0", "measurements of the ranks of `ortlaunch doctor`")
    requests = _FileRow("requests", "other commands", "requests of other commands")
    stop_request = _FileRow(
        "requests/stop.json", "any command", "request to save and stop, with its sender"
    )
    restart_request = _FileRow(
        "requests/restart.json", "other commands", "request to start again after a stop"
    )
    requeue_request = _FileRow("requests/requeue", "command", "request to queue the job again")
    save_request = _FileRow("requests/save.json", "other commands", "request to save")
    cancelled = _FileRow(
        "requests/cancel", "other commands", "empty: request to end without saving"
    )
    stopped = _FileRow("stopped.json", "rank 0", "result of a stop", "Stopped")
    lock = _FileRow("lock", "command", "held while the run lives")
    job = _FileRow("job.json", "command", "state, verdict and cause; failed starts")
    metrics = _FileRow(
        "metrics.jsonl", "rank 0", "a line for each logged step and each evaluation", "MetricsLine"
    )
    steps = _FileRow(
        "steps.json", "rank 0", "training and intervals that the recipe gives in epochs, as steps"
    )
    bad_steps = _FileRow(
        "bad_steps.jsonl", "rank 0", "steps with bad losses or gradients", "BadStep"
    )
    summary = _FileRow("summary.json", "rank 0", "the end of the training", "Summary")
    parity = _FileRow(
        "parity.jsonl", "rank 0", "steps that were compared with plain PyTorch", "ParityLine"
    )
    engine = _FileRow(
        "engine.json", "rank 0", "engine, sharding and optimizer that run", "EngineReport"
    )
    profile = _FileRow(
        "profile.json", "rank 0", "where the time of a step goes (log.profile_steps)", "Profile"
    )
    confusion = _FileRow(
        "confusion.json",
        "rank 0",
        "samples of the last evaluation by class and predicted class",
        "Confusion",
    )
    trace = _FileRow(
        "trace.json.gz", "rank 0", "the profiled steps, for Perfetto or chrome://tracing"
    )
    memory = _FileRow("memory.json", "rank 0", "memory, planned and measured", "MemoryReport")
    micro_size = _FileRow("micro_size.json", "command", "the size that `micro_size: auto` found")
    trials = _FileRow("micro_size", "command", "`8/`: a trial run of `micro_size: auto`")
    trial = _FileRow("trial.json", "rank 0", "the memory that a trial run used")
    evaluation = _FileRow(
        "evaluation.json",
        "rank 0",
        "results of `ortlaunch evaluate`, in `evaluations/step_00000500/`",
        "Evaluation",
    )
    tensorboard = _FileRow("tensorboard", "rank 0", "TensorBoard's events")
    trackers = _FileRow("trackers", "rank 0", "files of W&B and MLflow")
    stream = _FileRow("stream", "ranks", "the next tokens of streamed data (data.train.stream)")
    checkpoints = _FileRow(
        "checkpoints",
        "ranks",
        "`step_00000500{,.partial,.broken}/`; a complete one has COMPLETE",
    )
    resume = _FileRow(
        "resume.json", "command", "step of the last start, and changed settings", "ResumeRecord"
    )
    saves = _FileRow("saves.jsonl", "rank 0", "each save", "SaveLine")
    export = _FileRow("export", "rank 0", "the trained model")
    exports = _FileRow(
        "exports.jsonl",
        "`ortlaunch export`, rank 0",
        "models in `exports/step_00000500{,_onnx,_ondevice}/`",
        "ExportLine",
    )
    choice = _FileRow("choice.json", "command", "decision of engine.name: auto", "Choice")
    bench = _FileRow("bench.json", "command", "settings of a variant of `ortlaunch bench`")
    order = _FileRow("order.json", "command", "next command for the ranks of such a variant")
    report = _FileRow("report.html", "`ortlaunch report`", "a page of the whole run")
    results = _FileRow("results.jsonl", "rank 0", "measurements of such a variant")

    def __init__(self, path: str | os.PathLike[str], start_number: int = 0) -> None:
        """Name the files of a run.

        Args:
            path: the folder.
            start_number: the start that a rank belongs to, as `start_number` returns it; 0: any.
        """
        self.path = Path(path)
        self._start = start_number

    @property
    def start_number(self) -> int:
        """A number of the current start of the ranks; 0 before the first."""
        # The command writes the request anew for each start.
        return self.request.stat().st_mtime_ns if self.request.exists() else 0

    @property
    def is_superseded(self) -> bool:
        """Whether the ranks have been started again since the start that this process belongs to.

        A host that was cut off or suspended comes back later; its ranks record their ends aside.
        """
        return self._start > 0 and self.start_number != self._start

    def __str__(self) -> str:
        return str(self.path)

    def rank_log_path(self, rank: int, stream: str) -> Path:
        """Return the path of a rank's log; `stream` is `out` or `err`."""
        return self.logs / f"rank_{rank:05d}.{stream}"

    def rank_error_path(self, rank: int) -> Path:
        """Return the path of a rank's error record, which that rank writes."""
        return self.errors / f"rank_{rank:05d}.json"

    @property
    def error_record_paths(self) -> list[Path]:
        """Paths of the error records that exist: of ranks, of a stall, of a lost host."""
        others = [path for path in (self.stall, self.lost) if path.exists()]
        return [*sorted(self.errors.glob("rank_*.json")), *others]

    def append_rank_and_return_earlier_error_count(self, rank: int = -1) -> int:
        """Count an error record that is about to be written.

        Args:
            rank: its rank; -1 for a record of the whole run.

        Returns:
            The number of records counted before it; 0 if the disk is full.
        """
        with contextlib.suppress(OSError):
            self.errors.mkdir(parents=True, exist_ok=True)
            return _append_rank_and_count_lines(self.accounts, rank) - 1
        return 0

    def count_ended_rank(self, rank: int) -> None:
        """Count a rank that has ended."""
        # On a full disk nothing limits the launcher.
        with contextlib.suppress(OSError):
            _append_rank_and_count_lines(self.ended_ranks, rank)

    def first_failed_ranks(self) -> list[int]:
        """Return the ranks of the first 8 error records; empty if a full disk prevented counting."""
        with contextlib.suppress(OSError, ValueError), open(self.accounts, "rb") as file:
            # The first few decide; a job of thousands of ranks may have counted all of them.
            return list(map(int, file.read(8 * RANK_LINE_BYTES).split()))
        return []

    def rank_stacks_path(self, rank: int) -> Path:
        """Return the path of a rank's stack trace during a hang."""
        return self.errors / f"stacks_{rank:05d}.txt"

    def attempt_folder(self, attempt_number: int) -> Path:
        """Return the folder for logs/ and errors/ of a failed attempt, numbered from 1."""
        return self.attempts / str(attempt_number)

    def signal_mark_path(self, rank: int) -> Path:
        """Return the path of the record that a signal requested a rank's end: `NUMBER TIME`."""
        return self.errors / f"asked_{rank:05d}"

    def reserved_space_path(self, rank: int) -> Path:
        """Return the path of a file that reserves disk space for a rank's error record."""
        # Without it a full disk would prevent the record of a failure. A rank that ends removes the
        # file, so that one that is left shows a rank that was killed.
        return self.errors / f"spare_{rank:05d}"

    def checkpoint_folder(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step` optimizer steps."""
        return self.checkpoints / f"step_{step:08d}"

    def partial_checkpoint_folder(self, step: int) -> Path:
        """Return the folder of that checkpoint while it is written."""
        return self.checkpoints / f"step_{step:08d}.partial"

    def export_folder(self, optimizer_step: int, export_format: str) -> Path:
        """Return the folder to which `ortlaunch export` writes a checkpoint as a model."""
        return (
            self.path
            / "exports"
            / (
                f"step_{optimizer_step:08d}"
                + ("" if export_format == "huggingface" else f"_{export_format}")
            )
        )

    def evaluation_folder(self, step: int) -> RunDir:
        """Return the folder of an `ortlaunch evaluate`, a run of its own."""
        return RunDir(self.path / "evaluations" / f"step_{step:08d}")

    def micro_size_trial_folder(self, micro_size: int) -> RunDir:
        """Return the folder of one trial of `micro_size: auto`, a run that writes trial.json."""
        return RunDir(self.trials / str(micro_size))

    @property
    def has_plan_and_recipe(self) -> bool:
        """Whether a start of the run has written what another command needs to read it."""
        return self.plan.exists() and self.recipe.exists()

    def was_stop_requested_by_user_or_hook(self) -> bool:
        """Return whether `ortlaunch stop` or a hook requested the end."""
        # On a signal the command of a single rank writes the same file, with the signal's name.
        if not self.stop_request.exists():
            return False
        try:
            return (
                read_json_or_raise_damaged(self.stop_request).get("by")
                not in signal.Signals.__members__
            )
        except DamagedFile:
            return True

    def has_only_run_files_and_no_checkpoints(self) -> bool:
        """Return whether everything in the folder has a name of the table, without checkpoints."""
        # A person may create `checkpoints`, also as a link to another disk.
        if self.checkpoints.exists() and any(self.checkpoints.iterdir()):
            return False
        names = {row.name.partition("/")[0] for row in FILES}
        return all(path.name in names or is_temporary_file(path) for path in self.path.iterdir())

    def complete_checkpoints(self) -> list[tuple[int, Path]]:
        """Return (step, folder) of every complete checkpoint, oldest first.

        Raises:
            OSError: the folder cannot be read.
        """
        # An error must not look like an empty folder: the run would restart at step 0.
        names = (
            os.listdir(self.checkpoints)
            if _path_exists_raising_other_errors(self.checkpoints)
            else []
        )
        step_folders = [
            (int(match[1]), self.checkpoints / match[0])
            for match in map(_STEP.fullmatch, names)
            if match
        ]
        return sorted(
            (step, path)
            for step, path in step_folders
            if _path_exists_raising_other_errors(path / COMPLETE)
        )

    def newest_complete_checkpoint(self) -> tuple[int, Path] | None:
        """Return (step, folder) of the newest complete checkpoint; None if there is none."""
        return next(reversed(self.complete_checkpoints()), None)

    def newest_checkpoint_step_or_zero(self) -> int:
        """Return the step of the newest complete checkpoint; 0 if there is none."""
        return max((step for step, _ in self.complete_checkpoints()), default=0)


FILES = tuple(row for row in vars(RunDir).values() if isinstance(row, _FileRow))
"""Every row of the table of files."""


def _append_rank_and_count_lines(lines_file: Path, rank: int) -> int:
    # Appended without a lock: a local disk appends one short line atomically.
    with open(lines_file, "ab") as file:
        file.write(b"%07d\n" % rank)
        # Only after a flush does `tell` include the lines of other processes.
        file.flush()
        return file.tell() // RANK_LINE_BYTES


def _path_exists_raising_other_errors(path: Path) -> bool:
    # Path.exists returns False for such errors on Python 3.14.
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def terminal_columns_of_command() -> int | None:
    """Return the columns of the command's terminal; None if its output is no terminal."""
    text = os.environ.get(PROGRESS_VARIABLE, "")
    return int(text) if text.isdigit() and int(text) else None


def is_disk_nearly_full(existing_folder: Path) -> bool:
    """Return whether the disk of an existing folder has less than 1 MiB left for this user."""
    with contextlib.suppress(OSError):
        # Only root may use the blocks that a file system reserves.
        disk = os.statvfs(existing_folder)
        return (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) * disk.f_frsize < _FULL_BYTES
    return False


def write_text_atomically(file_path: Path, text_or_bytes: str | bytes) -> None:
    """Replace a file atomically: readers see the old text or the new one, never a part."""
    # No encoding has half of a surrogate pair, which is a byte of a file's name.
    data = (
        text_or_bytes
        if isinstance(text_or_bytes, bytes)
        else text_or_bytes.encode(errors="backslashreplace")
    )
    file_path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, whose files only their owner can read, whatever the umask is. Mode "x" fails
    # for an existing file.
    temporary_path = file_path.parent / f".{file_path.name}.{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with open(temporary_path, "xb") as file:
            file.write(data)
            file.flush()
            # Otherwise a crash of the host could leave an empty file under the final name.
            os.fsync(file.fileno())
        os.replace(temporary_path, file_path)
    except BaseException as error:
        temporary_path.unlink(missing_ok=True)
        # The error has the name of the temporary file or, if the disk is full, no name.
        if isinstance(error, OSError):
            error.filename = str(file_path)
        raise


def first_absent_path(path: Path) -> Path:
    """Return this path, or the first absent one with a number after it."""
    numbered_paths = (path.with_name(f"{path.name}{number or ''}") for number in itertools.count())
    return next(candidate for candidate in numbered_paths if not candidate.exists())


def is_temporary_file(path: Path) -> bool:
    """Return whether a file has the name of a temporary file of `write_text_atomically`."""
    return _TEMPORARY.fullmatch(path.name) is not None


def write_json_atomically(path: Path, value: object) -> None:
    """Write a value as JSON, atomically."""
    write_text_atomically(path, json_text(value, indent=2) + "\n")


def json_text(value: object, indent: int | None = None) -> str:
    """Return a value as JSON text; inf and nan become strings that float() reads."""
    # JSON has no inf and nan; `allow_nan=False` raises if `_finite` missed one.
    return json.dumps(_non_finite_floats_as_strings(value), indent=indent, allow_nan=False)


def _non_finite_floats_as_strings(value: object) -> object:
    """Return a value in which strings replace inf and nan, at any depth."""
    if isinstance(value, dict):
        return {key: _non_finite_floats_as_strings(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_non_finite_floats_as_strings(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_text_or_raise_damaged(file_path: Path) -> str:
    """Return the text of a file that ortlaunch wrote.

    Raises:
        DamagedFile: the file is not UTF-8, or no regular file.
    """
    try:
        return read_regular_file_bytes_or_refuse(file_path).decode()
    except UnicodeDecodeError as error:
        raise DamagedFile(
            f"{file_path}: is damaged: not text ({error.reason} at byte {error.start})"
        ) from None


def read_json_or_raise_damaged(file_path: Path, value_type: type[Any] = dict) -> Any:
    """Read JSON that `write_json_atomically` wrote.

    Args:
        file_path: the file.
        value_type: the Python type of the whole value.

    Returns:
        The value. If it is a mapping, a missing key raises DamagedFile with the file's name.

    Raises:
        DamagedFile: the file is not JSON, or its value has another type.
    """
    try:
        value = parse_json_or_raise_decode_error(read_text_or_raise_damaged(file_path))
    except json.JSONDecodeError as error:
        raise DamagedFile(
            f"{file_path}: is damaged: {_json_error_message(file_path, error)}"
        ) from None
    if not isinstance(value, value_type):
        raise DamagedFile(
            f"{file_path}: is damaged: it is not a {'mapping' if value_type is dict else value_type.__name__}"
        )
    return _FileMapping(file_path, value) if value_type is dict else value


class _FileMapping(dict[str, object]):
    """A mapping read from a file; a missing key raises DamagedFile instead of KeyError."""

    def __init__(self, path: Path, values: dict[str, object]) -> None:
        super().__init__(values)
        self._path = path

    def __missing__(self, name: str) -> object:
        raise DamagedFile(
            f"{self._path}: has no {name!r}: it is damaged, or of another version of ortlaunch"
        )


def _json_error_message(path: Path, error: json.JSONDecodeError) -> str:
    if not path.stat().st_size:
        return "it is empty"
    return f"not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
