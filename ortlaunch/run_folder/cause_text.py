"""Render a cause of failure: the command's sentence, the verdict of a diagnosis, and advice.

The only module that renders causes; nothing parses its sentences. Standard library only.
"""

from __future__ import annotations

import signal

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.base.units import shorten_to_one_line

# Prefixes of the lines that a command prints at its end.
COMMAND_PREFIX = "ortlaunch: "
VERDICT_PREFIX = "verdict: "
ADVICE_PREFIX = "try: "
CONTINUE_PREFIX = "to continue: "
# For ends without a rank's own error record; the command prints these itself.
_COMMAND_SENTENCES = {
    Cause.LAUNCHER_FAILED: (
        "{who} failed with {detail}, and the other ranks were stopped; its traceback is above"
    ),
    Cause.NO_LOCKS: "{who} failed with {detail}, and the other ranks were stopped; its traceback is above",
    Cause.COMMAND_KILLED: "the command ({who}) disappeared without an error record (usually "
    "SIGKILL, often out of "
    "memory), and its ranks ended with it",
    Cause.LAUNCHER_KILLED: (
        "{who} was stopped by {name}, and the ranks with it; no rank had failed before{memory}"
    ),
    Cause.DISK_FULL: "no space left on device ({detail}), so no rank could write its error record",
    Cause.RANK_VANISHED: (
        "{who} disappeared without an error record (usually SIGKILL, often out of memory{memory})"
    ),
    Cause.NEVER_BEGAN: "{absent}, and the launcher ended with status {status}{memory}",
    Cause.SIGNALLED: (
        "{who} was ended by {name}, sent to it{launcher} from outside this "
        "run; no rank had failed before"
    ),
}
# For diagnoses; `_fill_sentence_template` inserts the fields.
_VERDICTS = {
    Cause.RUNNING: "the run has not ended: {detail}",
    Cause.ENDED_WELL: "the run ended well",
    Cause.LOSS_SCALE_COLLAPSE: "fp16's loss scale collapsed: {detail}",
    Cause.DISK_FULL: "the disk is full, detected by {place}: {detail}",
    Cause.KILLED: ("{place} was killed (SIGKILL); its control group reports no lack of memory"),
    Cause.SIGNALLED: "{place} was ended by {name}, sent from outside this run",
    Cause.PORT_TAKEN: "{place} failed because a port is in use: {detail}{at}",
    Cause.NO_GPU: "{place} has no GPU to train on: {detail}{at}",
    Cause.OTHER_WORLD: "the launcher started another world than the plan's: {detail}{at}",
    Cause.INDEX_OUT_OF_RANGE: (
        "{place} used a label, token or position outside the model's range: {detail}{at}"
    ),
    Cause.MISSING_MODULE: "{place} lacks a Python module: {detail}{at}",
    Cause.MISSING_FILE: "{place} lacks a file: {detail}{at}",
    Cause.UNREADABLE_FILE: "{place} has no permission to open a file: {detail}{at}",
    Cause.NO_LOCKS: "{place} needs file locks, which a disk lacks: {detail}{at}",
    Cause.DAMAGED_CHECKPOINT: "{place} could not use a checkpoint: {detail}{at}",
    Cause.LEFT_EARLY: "{place} exited early with exit status {status} before the end",
    Cause.BAD_INPUT: "{detail}{at}",
    Cause.RAISED: "{place} raised {detail}{at}",
    Cause.STOPPED: "{place} {detail}",
    Cause.LOST_PEERS: "ranks lost their connections, and no rank recorded a cause: {detail}",
}
# The usual source of each signal when no other process sent it.
_CRASH_MEANINGS = {
    signal.SIGSEGV: "invalid memory access",
    signal.SIGABRT: "an assertion or an uncaught C++ exception",
    signal.SIGBUS: "a mapped file was truncated, or memory is faulty",
    signal.SIGILL: "an instruction that this processor lacks",
    signal.SIGFPE: "an arithmetic error",
}
CRASH_SIGNALS = tuple(_CRASH_MEANINGS)
"""Signals of a crash in native code."""
_OUTSIDE_SIGNAL_ADVICE = (
    (
        "find the sender of the signal (a person, a scheduler's limit, a watchdog) in the "
        "scheduler's log and dmesg"
    ),
)
# A stopped run continues from its newest checkpoint when it gets its own folder again.
_CONTINUE_ADVICE = ("start the same command with --run-dir to continue",)
_BAD_NUMBERS_ADVICE = (("check these samples"), "a lower optimizer.learning_rate, a warm-up (schedule.warmup_steps), "
            "stronger clipping (train.max_grad_norm)")  # fmt: skip
_ROLLBACK_ADVICE = "train.on_nonfinite: rollback leaves such a batch out, and training continues"
_ADVICE: dict[Cause, tuple[str, ...]] = {
    Cause.RUNNING: ("ortlaunch status RUN shows its progress",),
    Cause.STOPPED: _CONTINUE_ADVICE,
    Cause.HANG: (
        (
            "a rank that is stopped (SIGSTOP, a debugger) or waits for a disk or network "
            "blocks all others"
        ),
        "if a step may take that long, raise train.stall_seconds",
    ),
    Cause.HOST_LOST: (
        "check the host and its network: ssh to it, and read dmesg there",
        "restart it with --run-dir",
    ),
    Cause.OUT_OF_MEMORY: (
        "batch.micro_size: auto determines by trial runs what fits, and keeps batch.global_size",
    ),
    Cause.DISK_FULL: (
        "free disk space (df -h; checkpoints and the cache use most)",
        "set checkpoint.keep lower",
        *_CONTINUE_ADVICE,
    ),
    Cause.LOSS_SPIKE: (
        *_BAD_NUMBERS_ADVICE,
        "train.on_spike: {action: rollback} leaves such a batch out",
    ),
    Cause.NOT_FINITE: (*_BAD_NUMBERS_ADVICE, _ROLLBACK_ADVICE),
    Cause.LOSS_SCALE_COLLAPSE: ("precision: bf16", _BAD_NUMBERS_ADVICE[1], _ROLLBACK_ADVICE),
    Cause.PORT_TAKEN: (
        (
            "ss -ltnp shows the process; set another MASTER_PORT, in the shell or launch.env, "
            "or let ortlaunch choose"
        ),
    ),
    Cause.NO_GPU: ("run nvidia-smi there", "or launch.device: cpu"),
    Cause.OTHER_WORLD: (
        "set hosts and ranks in one place: the host file, or the launcher's options",
    ),
    Cause.INDEX_OUT_OF_RANGE: (
        (
            "compare the labels with the number of classes (model.config.num_labels), and token "
            "ids with vocab_size"
        ),
    ),
    Cause.MISSING_MODULE: (
        ("install it in this environment on every host, or put your own module beside the recipe"),
    ),
    Cause.MISSING_FILE: (
        "relative paths start at the current folder; every host must see the file",
    ),
    Cause.UNREADABLE_FILE: ("check it with ls -l on that host, as the user of the run",),
    Cause.NO_LOCKS: (
        "run folder (--run-dir), ORTLAUNCH_CACHE and TMPDIR must be on disks with file "
        "locks (flock); NFS has them "
        "where its lock service runs",
    ),
    Cause.CRASH: (
        "the Python stack of the crash is in its log",
        "check your own libraries and extensions first; then run ortlaunch setup",
    ),
    Cause.GRAPH_CRASH: ("engine.torch_modules=[PATH] keeps one layer out of ONNX Runtime's graph",),
    Cause.KILLED: (
        "find the sender of the signal (a person, a scheduler, a watchdog) in dmesg or the "
        "scheduler's log",
    ),
    Cause.SIGNALLED: _OUTSIDE_SIGNAL_ADVICE,
    Cause.LEFT_EARLY: ("look for sys.exit and os._exit in the user's own code",),
    Cause.COMMAND_KILLED: (*_OUTSIDE_SIGNAL_ADVICE, "restart it with --run-dir"),
    Cause.LAUNCHER_KILLED: _OUTSIDE_SIGNAL_ADVICE,
    Cause.RANK_VANISHED: (
        "check dmesg on that host: it may have been out of memory",
        *_OUTSIDE_SIGNAL_ADVICE,
    ),
    Cause.NEVER_BEGAN: (
        (
            "the launcher's messages are above its last line; `ortlaunch doctor` checks the "
            "hosts, --dry-run shows the command"
        ),
    ),
    Cause.LOST_PEERS: ("check the network between the hosts",),
}


def command_end_sentence(failure: Failure) -> str:
    """Return the line that a command prints at an end for which no rank recorded a failure."""
    return _fill_sentence_template(_COMMAND_SENTENCES.get(failure.cause, "{detail}"), failure)


def diagnosis_verdict_line(failure: Failure) -> str:
    """Return the verdict of a diagnosis, one line."""
    # OUT_OF_MEMORY also for a process that the kernel ended for memory.
    if failure.cause_or_out_of_memory_if_killed is Cause.OUT_OF_MEMORY:
        return _out_of_memory_verdict_line(failure)
    if failure.cause in (Cause.CRASH, Cause.GRAPH_CRASH) and failure.signal is not None:
        line = f": {failure.detail}" if failure.detail else ""
        meaning = _CRASH_MEANINGS.get(signal.Signals(failure.signal), "")
        crashed_code = "native code" if failure.cause is Cause.CRASH else "ONNX Runtime's graph"
        return f"{failure.rank_and_host} crashed in {crashed_code} ({_signal_name(failure)}, {meaning}){line}"
    # Without a rank the command's own sentence is the verdict.
    if failure.rank is None and failure.cause in (*_COMMAND_SENTENCES, Cause.STOPPED):
        return command_end_sentence(failure)
    return _fill_sentence_template(_VERDICTS.get(failure.cause, "{detail}"), failure)


def advice_for_failure(failure: Failure) -> tuple[str, ...]:
    """Return suggestions for a failure, possibly none."""
    return _ADVICE.get(failure.cause_or_out_of_memory_if_killed, ())


def _out_of_memory_verdict_line(failure: Failure) -> str:
    # The kernel's out-of-memory killer always uses SIGKILL.
    if failure.signal == signal.SIGKILL and failure.rank is not None:
        return f"out of memory: the kernel ended {failure.rank_and_host} (SIGKILL)"
    if failure.memory_kills:
        return (
            f"out of memory: the kernel's out-of-memory killer ended {failure.memory_kills} of "
            "this run's processes"
        )
    return f"out of memory: {failure.rank_and_host} could not allocate: {failure.detail}"


def kernel_memory_kills_clause_or_empty(failure: Failure) -> str:
    """Return the kernel's count of out-of-memory kills as a clause of a sentence, else ""."""
    # None: the control group could not be read, so a kill is only a guess.
    if failure.memory_kills is None and failure.cause is Cause.RANK_VANISHED:
        return ": see dmesg there"
    if not failure.memory_kills:
        return ""
    return (
        f"; the kernel's out-of-memory killer ended {failure.memory_kills} of this control group's "
        "processes meanwhile"
    )


def _fill_sentence_template(sentence_template: str, failure: Failure) -> str:
    absent = (
        "no rank recorded a cause"
        if not failure.who
        else f"{failure.who} ended before it started"
        if failure.began
        else f"no rank started ({failure.who})"
    )
    return sentence_template.format(
        place=failure.rank_and_host,
        # A verdict is one line, whatever a library printed.
        detail=shorten_to_one_line(failure.detail, 400),
        at=f", at {failure.raised_at}" if failure.raised_at else "",
        who=failure.who,
        name=_signal_name(failure),
        status=failure.status,
        memory=kernel_memory_kills_clause_or_empty(failure),
        launcher=f" or to {failure.detail}" if failure.detail else "",
        absent=absent,
    )


def _signal_name(failure: Failure) -> str:
    """Return the name of the failure's signal; "" if there is none."""
    return signal.Signals(failure.signal).name if failure.signal else ""
