"""Every path of a run, writing that never leaves half a file, and reading what is left of one. Standard library only.

runs/<name>-<timestamp>/
  recipe.yaml plan.json deepspeed.json environment.json request.sh     written before a rank starts
  commands.jsonl modules/                                              each start's command and commit; the user's code
  vocabulary.json tokenizer/                                           what words and classes the numbers stand for
  store                                                                how ranks of one host meet, without a port
  rendezvous launcher_error.json                                       of torchrun on several hosts; why torchrun failed
  submitted.yaml job.{sh,yaml} logs/slurm-12.out                       of a queued run: recipe, script or manifest
  agents.json meeting                                                  of torchrun on several hosts
  logs/rank_00003.{out,err}  errors/rank_00003.json                    one pair a rank; errors of failed ranks
  errors/stall.json errors/stacks_00003.txt                            the run stood still: who, and where each rank was
  errors/lost.json errors/accounts                                     a host that is lost; the rank of each account
  slow_ranks.jsonl                                                     ranks that hold the others up, each named once
  attempts/1/{logs,errors}                                             of a failed start, once another has begun
  metrics.jsonl parity.jsonl engine.json memory.json tensorboard/      written by rank 0
  steps.json summary.json                                              train.epochs in steps; the end of the run
  checkpoints/step_00000500/{..., manifest.json, COMPLETE}  export/
  exports/step_00000500{,_onnx,_ondevice}/  exports.jsonl              checkpoints as models, by `ortlaunch export`
  evaluations/step_00000500/{..., evaluation.json}                     a run of its own, by `ortlaunch evaluate`
  checkpoints/step_00000500.{partial,broken}                           while it is written; found damaged, set aside
  saves.jsonl                                                          each save
  bad_steps.jsonl                                                      losses and gradients that were not trained on
  resume.json                                                          where the last start began, and what had changed
  micro_size.json micro_size/8/{..., trial.json}                       tries of `micro_size: auto`
  requests/{stop,save}.json stopped.json                               asked for from outside; how a stop ended
  lock job.json                                                        held while the run lives; state and verdict
  choice.json                                                          how engine.name: auto was decided
  bench.json order.json results.jsonl                                  of a variant of `ortlaunch bench`
  report.html                                                          a page of it all, by `ortlaunch report`
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from ortlaunch.cause import Cause
from ortlaunch.errors import DamagedFile
from ortlaunch.json_types import Json

# Files of a checkpoint: its list of files with their checksums, and the mark that it was written to its end.
MANIFEST = "manifest.json"
COMPLETE = "COMPLETE"
PROGRESS_VARIABLE = "ORTLAUNCH_PROGRESS"  # the terminal's columns, where the command's output is one


_FULL_BYTES = 1 << 20
_COUNTED = 8  # bytes of a line of `accounts`
_STEP = re.compile(r"step_(\d+)")
_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}")


class _File:
    """The path of a file or folder in a run's folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, _: type[RunDir]) -> Path:
        return run.path / self.name


class RunDir:
    """The folder of one run; the only thing that crosses from the control side to the worker."""

    recipe = _File("recipe.yaml")
    plan = _File("plan.json")
    deepspeed = _File("deepspeed.json")
    environment = _File("environment.json")
    request = _File("request.sh")
    commands = _File("commands.jsonl")
    modules = _File("modules")
    vocabulary = _File("vocabulary.json")  # what the model's numbers stand for
    tokenizer = _File("tokenizer")  # that the weights are trained with
    hostfile = _File("hostfile")
    store = _File("store")
    rendezvous = _File("rendezvous")
    meeting = _File("meeting")
    agents = _File("agents.json")
    launcher_error = _File("launcher_error.json")  # as torchrun writes it
    submitted = _File("submitted.yaml")
    job_script = _File("job.sh")
    manifest = _File("job.yaml")
    logs = _File("logs")
    errors = _File("errors")
    flight_recorder = _File("errors/nccl_trace_rank_")  # with the rank's number
    failure_printed = _File("errors/printed")
    stall = _File("errors/stall.json")
    lost = _File("errors/lost.json")  # a host that is lost
    accounts = _File("errors/accounts")  # a line of `_COUNTED` bytes for each account of an end
    slow_ranks = _File("slow_ranks.jsonl")
    attempts = _File("attempts")
    ready = _File("ready")
    fabric = _File("fabric.json")  # what the ranks of `ortlaunch selftest` measured
    requests = _File("requests")
    stop_request = _File("requests/stop.json")
    restart_request = _File("requests/restart.json")  # another start, beside a stop
    requeue_request = _File("requests/requeue")  # another turn of a batch script
    save_request = _File("requests/save.json")
    cancelled = _File("requests/cancel")
    stopped = _File("stopped.json")
    lock = _File("lock")
    job = _File("job.json")
    metrics = _File("metrics.jsonl")
    steps = _File("steps.json")
    bad_steps = _File("bad_steps.jsonl")
    summary = _File("summary.json")
    parity = _File("parity.jsonl")
    engine = _File("engine.json")
    memory = _File("memory.json")
    micro_size = _File("micro_size.json")
    trials = _File("micro_size")
    trial = _File("trial.json")
    evaluation = _File("evaluation.json")
    tensorboard = _File("tensorboard")
    trackers = _File("trackers")  # what W&B and MLflow keep
    checkpoints = _File("checkpoints")
    resume = _File("resume.json")
    saves = _File("saves.jsonl")
    export = _File("export")
    exports = _File("exports.jsonl")
    choice = _File("choice.json")
    bench = _File("bench.json")
    order = _File("order.json")
    results = _File("results.jsonl")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def log(self, rank: int, stream: str) -> Path:
        """Log of one rank; `stream` is `out` or `err`."""
        return self.logs / f"rank_{rank:05d}.{stream}"

    def error(self, rank: int) -> Path:
        """What ended one rank, written by that rank."""
        return self.errors / f"rank_{rank:05d}.json"

    @property
    def told(self) -> list[Path]:
        """Accounts of ends that are there: of ranks, of a run that stood still, of a lost host."""
        others = [path for path in (self.stall, self.lost) if path.exists()]
        return [*sorted(self.errors.glob("rank_*.json")), *others]

    def count_account(self, rank: int = -1) -> int:
        """Count an account of this rank (-1: of the run) that is about to be written; returns the number before it."""
        with contextlib.suppress(OSError):
            self.errors.mkdir(parents=True, exist_ok=True)
            with open(self.accounts, "ab") as file:
                file.write(b"%07d\n" % rank)
                file.flush()  # so that `tell` counts those of other hosts
                return file.tell() // _COUNTED - 1
        return 0

    def first_counted(self) -> list[int]:
        """Ranks of the first accounts; nothing where a full disk kept them from being counted."""
        with contextlib.suppress(OSError, ValueError), open(self.accounts, "rb") as file:
            return list(map(int, file.read(8 * _COUNTED).split()))
        return []

    def stacks(self, rank: int) -> Path:
        """Where a rank stood when the run stood still."""
        return self.errors / f"stacks_{rank:05d}.txt"

    def attempt(self, number: int) -> Path:
        """What a failed attempt left in logs/ and errors/, from 1."""
        return self.attempts / str(number)

    def asked(self, rank: int) -> Path:
        """There once a rank was asked to end by a signal: `NUMBER TIME`."""
        return self.errors / f"asked_{rank:05d}"

    def spare(self, rank: int) -> Path:
        """Room on the disk for the account of a rank's end."""
        return self.errors / f"spare_{rank:05d}"

    def checkpoint(self, step: int) -> Path:
        """Folder of the checkpoint after `step` optimizer steps."""
        return self.checkpoints / f"step_{step:08d}"

    def partial(self, step: int) -> Path:
        """Where that checkpoint is while it is written."""
        return self.checkpoints / f"step_{step:08d}.partial"

    def exported(self, step: int, form: str) -> Path:
        """Where `ortlaunch export` writes a checkpoint as a model."""
        return self.path / "exports" / (f"step_{step:08d}" + ("" if form == "huggingface" else f"_{form}"))

    def evaluation_of(self, step: int) -> RunDir:
        """Folder of `ortlaunch evaluate`: a run of its own."""
        return RunDir(self.path / "evaluations" / f"step_{step:08d}")

    def trial_of(self, micro_size: int) -> RunDir:
        """Folder of one try of `micro_size: auto`: a run of its own, which writes trial.json."""
        return RunDir(self.trials / str(micro_size))

    def complete_checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder) of every checkpoint that was written to its end, oldest first.

        Raises:
            OSError: the folder cannot be read; a run that took it for empty would begin anew.
        """
        names = os.listdir(self.checkpoints) if _exists(self.checkpoints) else []
        found = [(int(match[1]), self.checkpoints / match[0]) for match in map(_STEP.fullmatch, names) if match]
        return sorted((step, path) for step, path in found if _exists(path / COMPLETE))


def _exists(path: Path) -> bool:
    """Like Path.exists, which takes errors of reading for an absent file on Python 3.14."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def progress_width() -> int | None:
    """Columns of the terminal that the command was typed in; None: its output is none."""
    text = os.environ.get(PROGRESS_VARIABLE, "")
    return int(text) if text.isdigit() and int(text) else None


def is_full(path: Path) -> bool:
    """Whether the disk of an existing folder has hardly a file's room left for this user."""
    with contextlib.suppress(OSError):
        disk = os.statvfs(path)
        return (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) * disk.f_frsize < _FULL_BYTES
    return False


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; readers never see half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, whose files are their owner's alone whatever the umask says; "x" takes no file that is there.
    name = path.parent / f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with open(name, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException as error:
        name.unlink(missing_ok=True)
        if isinstance(error, OSError):  # it names the temporary file; a full disk is met in a write, which has no name
            error.filename = str(path)
        raise


def is_temporary(path: Path) -> bool:
    """Whether `write_text` was killed while it wrote that file."""
    return _TEMPORARY.fullmatch(path.name) is not None


def write_json(path: Path, value: object) -> None:
    """Write JSON whole or not at all."""
    write_text(path, json_text(value, indent=2) + "\n")


def json_text(value: object, indent: int | None = None) -> str:
    """JSON of a value; it has no inf and nan, which become words that float() reads."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_text(path: Path) -> str:
    """Text of ours.

    Raises:
        DamagedFile: it is none.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{path}: is damaged: no text ({error.reason} at byte {error.start})") from None


def read_json(path: Path, kind: type[Any] = dict) -> Any:
    """Read JSON that `write_json` wrote; a name that a mapping lacks is told with the file's.

    Raises:
        DamagedFile: it is none, or of another kind.
    """
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise DamagedFile(f"{path}: is damaged: {_no_json(path, error)}") from None
    if not isinstance(value, kind):
        raise DamagedFile(f"{path}: is damaged: it holds no {'mapping' if kind is dict else kind.__name__}")
    return _Mapping(path, value) if kind is dict else value


class _Mapping(dict[str, object]):
    """What a file of ours holds: another version may have written it, or less of it be left."""

    def __init__(self, path: Path, values: dict[str, object]) -> None:
        super().__init__(values)
        self._path = path

    def __missing__(self, name: str) -> object:
        raise DamagedFile(f"{self._path}: has no {name!r}: it is damaged, or of another version of ortlaunch")


def account(path: Path) -> Json:
    """What ended a rank, or the whole run (`RunDir.told`); of a damaged one that something ended."""
    number, said = path.stem.removeprefix("rank_"), f"{path} tells no more"
    try:
        found = read_json(path)
    except DamagedFile as error:
        found, said = {}, f"an account of an end cannot be read: {error}"
    known = {
        "rank": int(number) if number.isdecimal() else 0, "host": "?", "type": "Unknown", "message": "",
        "traceback": "", "exit_status": 1, "secondary": False, "time": 0.0, "summary": said,
        "cause": "", "detail": said,
    }  # fmt: skip
    kinds = {name: (int, float) if name == "time" else type(usual) for name, usual in known.items()}
    wrong = {name for name, kind in kinds.items() if not isinstance(found.get(name), kind)}
    signal = found.get("signal")
    record = {**found, **{name: known[name] for name in wrong}}
    return {**record, "cause": Cause(record["cause"]), "signal": signal if isinstance(signal, int) else None}


def _no_json(path: Path, error: json.JSONDecodeError) -> str:
    return f"no JSON at line {error.lineno}, column {error.colno}" if path.stat().st_size else "it is empty"
