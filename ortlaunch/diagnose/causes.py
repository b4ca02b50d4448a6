"""Evidence -> the cause: a table of looks, the most telling first. Pure but for the disk's room."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ortlaunch.diagnose import words
from ortlaunch.diagnose.evidence import Evidence


class Cause(NamedTuple):
    """One cause of an end."""

    kind: str
    """A word for programs, such as `out-of-memory`."""
    verdict: str
    """One line for a person."""
    advice: tuple[str, ...] = ()
    """What to try."""


def cause_of(found: Evidence) -> Cause:
    """The first look that recognises the end."""
    return next(cause for look in _LOOKS if (cause := look(found)))


def _alive(found: Evidence) -> Cause | None:
    if found.status is not None:
        return None
    return Cause("running", f"the run has not ended: {found.state}", ("ortlaunch status RUN says how far it is",))


def _well(found: Evidence) -> Cause | None:
    return Cause("ended-well", "the run ended well") if found.status == 0 else None


def _stopped(found: Evidence) -> Cause | None:
    again = ("start the same command with --run-dir to go on",)
    if found.first.get("type") == "Stopped":
        return Cause("stopped", f"{found.place} {found.first['message']}", again)
    said = re.search(r"^ortlaunch: (stopped by .*)$", found.text, re.MULTILINE)
    return Cause("stopped", said[1], again) if said and not found.first else None


def _stall(found: Evidence) -> Cause | None:
    if found.first.get("type") != "Stall":
        return None
    said = re.sub(r"; (exit status|stacks|log).*$", "", str(found.first.get("message") or found.first.get("summary")))
    advice = (
        f"read the stacks of all ranks: {found.run.errors}/stacks_*.txt",
        "a rank that is stopped (SIGSTOP, a debugger) or waits for a disk or a network keeps all others waiting",
        "where a step may truly take so long, set train.stall_seconds higher",
    )
    return Cause("hang", said.partition("\n")[0], advice)


def _host(found: Evidence) -> Cause | None:
    if found.first.get("type") != "LostHost":
        return None
    advice = ("ssh to it, and dmesg there: is it up, and is its network?", "start it again with --run-dir")
    return Cause("host-lost", str(found.first["message"]), advice)


def _memory(found: Evidence) -> Cause | None:
    killed = words.KERNEL_KILL.search(found.words)
    if killed and found.first.get("signal") == signal.SIGKILL:
        return Cause("out-of-memory", f"out of memory: the kernel ended {found.place} (SIGKILL)", _LESS)
    if killed:
        return Cause("out-of-memory", f"out of memory: the kernel's {killed[0]} of this run's processes", _LESS)
    line = _line_with(words.OUT_OF_MEMORY, found.words) if found.first else None
    if line is None or found.first.get("type") in _OF_NUMBERS:
        return None
    return Cause("out-of-memory", f"out of memory: {found.place} could not allocate: {line}", _LESS)


_OF_NUMBERS = ("NonFiniteError", "LossSpikeError")
_LESS = ("batch.micro_size: auto finds by trying what fits, and keeps batch.global_size",)


def _disk(found: Evidence) -> Cause | None:
    if not words.NO_SPACE.search(found.words):
        return None
    line = _line_with(words.NO_SPACE, found.words)
    advice = ("make room (df -h; ortlaunch's checkpoints and the cache take most)", "set checkpoint.keep lower")
    return Cause(
        "disk-full",
        f"the disk is full, met by {found.place}: {line}",
        (*advice, "start the same command with --run-dir to go on"),
    )


def _numbers(found: Evidence) -> Cause | None:
    kind = found.first.get("type")
    if kind not in _OF_NUMBERS:
        return None
    lines = str(found.first["message"]).splitlines()
    where = next((line for line in lines if line.startswith("the first parameter")), "")
    said = "; ".join([lines[0], where] if where else lines[:1])
    look = ("look at these samples", "a lower optimizer.learning_rate, a warm-up (schedule.warmup_steps), "
            "a lower train.max_grad_norm")  # fmt: skip
    if kind == "LossSpikeError":
        return Cause("loss-spike", said, (*look, "train.on_spike: {action: rollback} leaves such a batch out"))
    advice = (*look, "train.on_nonfinite: rollback leaves such a batch out, and training continues")
    if "every loss is finite" in said and _is_fp16(found):
        return Cause("loss-scale-collapse", f"fp16's loss scale collapsed: {said}", ("precision: bf16", *advice[1:]))
    return Cause("not-finite", said, advice)


def _is_fp16(found: Evidence) -> bool:
    with_precision = found.run.recipe
    return with_precision.exists() and "precision: fp16" in with_precision.read_text(encoding="utf-8", errors="replace")


def _known_words(found: Evidence) -> Cause | None:
    """What one regular expression tells."""
    for kind, expression, verdict, advice in _WORDS:
        line = _line_with(expression, found.words) if found.first else None
        if line:
            return Cause(kind, f"{verdict.format(found.place)}: {line}{found.raised_at}", advice)
    return None


_LOCKS = ("run folder (--run-dir), ORTLAUNCH_CACHE and TMPDIR must be on disks with file locks (flock); "
          "NFS has them where its lock service runs",)  # fmt: skip
_WORDS: tuple[tuple[str, re.Pattern[str], str, tuple[str, ...]], ...] = (
    ("port-taken", words.PORT_TAKEN, "{} met a port that is taken",
     ("ss -ltnp names who has it; MASTER_PORT or launch.env choose another, or let ortlaunch choose",)),
    ("no-gpu", words.NO_GPU, "{} has no GPU to train on", ("nvidia-smi there", "or launch.device: cpu")),
    ("other-world", words.OTHER_WORLD, "the launcher started another world than the plan's",
     ("give hosts and ranks in one place: the host file, or the launcher's own options",)),
    ("index-out-of-range", words.OUT_OF_RANGE, "{} met a label, token or position that the model has not",
     ("compare the labels with the number of classes (model.config.num_labels), and token ids with vocab_size",)),
    ("missing-module", re.compile(r"ModuleNotFoundError|no module '|No module named|ImportError"),
     "{} lacks a Python module",
     ("install it in this environment, on every host; a module of your own lies beside the recipe",)),
    ("missing-file", re.compile(r"FileNotFoundError|No such file or directory|Errno 2\b|matches no file"),
     "{} lacks a file", ("relative paths begin where you run the command; every host must see the file",)),
    ("unreadable-file", re.compile(r"PermissionError|(?<!cannot be made: )Permission denied|Errno 13\b"),
     "{} may not open a file", ("ls -l it, as the user of the run, on that host",)),
    ("no-locks", words.NO_LOCKS, "{} met a disk without file locks", _LOCKS),
    ("damaged-checkpoint", re.compile(r"CheckpointError"), "{} could not use a checkpoint", ()),
)  # fmt: skip


def _signalled(found: Evidence) -> Cause | None:
    number = found.first.get("signal")
    if not number:
        return None
    name = signal.Signals(number).name
    if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        line = _line_with(words.NATIVE, str(found.first.get("traceback", "")))
        said = f"{found.place} crashed in native code ({name}, {_CRASHES[name]})" + (f": {line}" if line else "")
        return Cause("crash", said, _CRASH_ADVICE)
    if number == signal.SIGKILL:
        said = f"{found.place} was killed (SIGKILL), and not for memory as far as its control group counts"
        return Cause("killed", said, ("who sends it: a person, a scheduler, a watchdog; dmesg, the scheduler's log",))
    return Cause("signalled", f"{found.place} was ended by {name}, sent from outside this run", ())


_CRASH_ADVICE = (
    "export PYTHONFAULTHANDLER=1 prints the Python stack of the crash",
    "a library or extension of your own is the first suspect; then ortlaunch setup",
)
_CRASHES = {"SIGSEGV": "invalid memory access", "SIGABRT": "an assertion or an uncaught C++ exception",
            "SIGBUS": "a mapped file that was cut, or bad memory", "SIGILL": "an instruction that this processor lacks",
            "SIGFPE": "an arithmetic error"}  # fmt: skip


def _left(found: Evidence) -> Cause | None:
    if found.first.get("type") == "Exit" or found.first.get("type") == "SystemExit":
        said = f"{found.place} left by itself with exit status {found.first['exit_status']} before the end"
        return Cause("left-early", said, ("look for sys.exit and os._exit in the user's own code",))
    return None


def _input(found: Evidence) -> Cause | None:
    """What the user wrote, or the data, is wrong."""
    if found.first.get("exit_status") != 2 or not found.first.get("message"):
        return None
    return Cause("bad-input", str(found.first["message"]).partition("\n")[0][:400] + found.raised_at)


def _raised(found: Evidence) -> Cause | None:
    if not found.first:
        return None
    kind, message = found.first.get("type"), str(found.first.get("message", "")).strip().partition("\n")[0]
    said = f"{found.place} raised {kind}: {message}"[:400]
    return Cause("raised", f"{said}{found.raised_at}", ("the whole traceback is in its log",))


def _launch_failures(found: Evidence) -> Cause | None:
    """Ends of which no rank tells a failure of its own: what the command saw."""
    last = _last_said(found.text)
    for kind, expression, advice in _ENDS:
        if expression.search(last):
            return Cause(kind, last, advice)
    return None


_OUTSIDE = ("who sends signals: a person, a scheduler's limit, a watchdog; see the scheduler's log and dmesg",)
_ENDS: tuple[tuple[str, re.Pattern[str], tuple[str, ...]], ...] = (
    ("command-killed", re.compile(r"the command .* disappeared"), (*_OUTSIDE, "start it again with --run-dir")),
    ("launcher-killed", re.compile(r"was ended by SIG\w+, and the ranks with it"), _OUTSIDE),
    ("no-locks", words.NO_LOCKS, _LOCKS),
    ("launcher-failed", re.compile(r"failed with .*, and ended the ranks"), ("its traceback is above its last line",)),
    ("signalled", re.compile(r"was ended by SIG\w+, sent to it"), _OUTSIDE),
    ("rank-vanished", re.compile(r"vanished without a word"), ("dmesg on that host: was it out of memory?", *_OUTSIDE)),
    ("never-began", re.compile(r"no rank began|ended before it began|no rank says why"),
     ("the launcher's own words are above its last line; `ortlaunch doctor` and --dry-run show what is sent",)),
)  # fmt: skip


def _only_echoes(found: Evidence) -> Cause | None:
    if not found.records:
        return None
    said = found.records[0].get("summary", "")
    return Cause("lost-peers", f"ranks lost each other, and none tells why: {said}", ("the network between the hosts",))


def _otherwise(found: Evidence) -> Cause:
    return Cause("unknown", _last_said(found.text) or f"the run ended with status {found.status}, without a word", ())


_LOOKS: tuple[Callable[[Evidence], Cause | None], ...] = (
    _alive, _well, _stopped, _stall, _host, _numbers, _memory, _disk, _signalled, _known_words, _left, _input, _raised,
    _launch_failures, _only_echoes, _otherwise,
)  # fmt: skip


def _last_said(text: str) -> str:
    """The command's last word."""
    return text.rpartition("ortlaunch: ")[2].strip().partition("\n")[0]


def _line_with(expression: re.Pattern[str], text: str) -> str | None:
    """The last line that has the words: a traceback's end before the summary."""
    lines: Iterator[str] = (line.strip() for line in reversed(text.splitlines()))
    found = next((line for line in lines if expression.search(line)), None)
    return found and found.removeprefix("ortlaunch: ")[:300]
