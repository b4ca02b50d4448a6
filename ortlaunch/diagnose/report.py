"""The diagnosis of a run.

`ortlaunch diagnose` prints it. `train` prints a short form after a failure.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ortlaunch.cause import Cause, Failure
from ortlaunch.diagnose import evidence
from ortlaunch.diagnose.causes import advice_for, cause_of
from ortlaunch.diagnose.evidence import Evidence
from ortlaunch.diagnose.memory import what_would_fit
from ortlaunch.launch.failure import RunEnd
from ortlaunch.other_runs import status
from ortlaunch.run_folder.cause_text import (
    ADVICE_PREFIX,
    COMMAND_PREFIX,
    CONTINUE_PREFIX,
    VERDICT_PREFIX,
    diagnosis_verdict,
)
from ortlaunch.run_folder.folder import RunDir, json_text
from ortlaunch.units import human_bytes, number_or_none

# Free disk space below this is listed as evidence, in bytes.
_FEW_BYTES = 1 << 30
# If fp16 skipped more than this share of the last steps, the evidence mentions its loss scale.
_SKIPPED_OFTEN = 0.5
_PLAIN = (Cause.ENDED_WELL, Cause.STOPPED, Cause.RUNNING)  # nothing went wrong


@dataclass(frozen=True)
class Diagnosis:
    """Why a run ended, with the evidence and advice."""

    run: str
    state: str
    exit_status: int | None
    kind: str
    verdict: str
    advice: tuple[str, ...]
    evidence: tuple[str, ...]

    def to_json(self) -> str:
        """Return one JSON object."""
        return json_text(asdict(self), indent=2)

    def __str__(self) -> str:
        """Return verdict, evidence and advice as text."""
        lines = [
            f"{VERDICT_PREFIX}{self.verdict}",
            *(["", "evidence:"] if self.evidence else []),
            *self.evidence,
        ]
        return "\n".join(
            [*lines, *(["", "try:"] if self.advice else []), *(f"  {each}" for each in self.advice)]
        )


def diagnose(run: RunDir) -> Diagnosis:
    """Diagnose a run, which may still be running.

    Raises:
        InputError: the folder is no run folder, or this user cannot read its files.
    """
    found = status.read_status(run)
    exit_status = found.job.exit_status if found.state.is_end else None
    about = evidence.read(
        run, found.state_name, exit_status, found.job.verdict or "", found.job.failure
    )
    failure = cause_of(about)
    return Diagnosis(
        run=str(run),
        state=found.state_name,
        exit_status=exit_status,
        kind=failure.memory_aware_cause.value,
        verdict=diagnosis_verdict(failure),
        advice=() if found.state_name == "pruned" else advice_for(failure, about),
        evidence=(
            *_evidence(about, failure),
            *filter(
                None, (f"  {line}" if line else "" for line in (found.fallback, found.best_line))
            ),
        ),
    )


def with_verdict(run: RunDir, end: RunEnd) -> str:
    """Return the final output of a command whose run failed.

    Verdict and advice stand before its last line. If nothing went wrong, the text is unchanged.
    """
    about = evidence.read(run, "failed", end.status, end.text, end.failure)
    failure = cause_of(about)
    if failure.memory_aware_cause in _PLAIN:
        return end.text
    what = diagnosis_verdict(failure)
    before = end.text_before.rstrip("\n")
    more = what_would_fit(about) if failure.memory_aware_cause is Cause.OUT_OF_MEMORY else []
    first = before.partition("\n")[0]
    # Where one text repeats the start of the other, `before` itself becomes the verdict.
    whole = " ".join(before.split())
    repeats = whole.startswith(what.removesuffix(" ...")) or what.startswith(first)
    if first and (repeats or first in failure.detail):
        before, what = "", before
    lines = [
        f"{VERDICT_PREFIX}{what}",
        *more,
        *(f"{ADVICE_PREFIX}{each}" for each in advice_for(failure, about)),
    ]
    return "\n".join(
        [*([before] if before.strip() else []), *lines, f"{COMMAND_PREFIX}{end.last_output}"]
    )


def _evidence(found: Evidence, failure: Failure) -> Iterator[str]:
    code = found.status
    yield f"  {found.state}" + (f", exit status {code}{_meaning(code)}" if code is not None else "")
    # Original failures come first, then by time. The first record is most likely the cause.
    for record in found.records[:1]:
        yield f"  {record.get('summary')}"
        # The command prints a traceback with the frames of packages left out.
        short = found.text.partition(f"\n{VERDICT_PREFIX}")[0]
        log = evidence.last_lines(found.run, record["rank"])
        shown = short.splitlines() if short.startswith("Traceback") else log
        yield from (f"    | {line}" for line in shown)
    if others := [f"{record['rank']}" for record in found.records[1:]]:
        yield f"  rank {', '.join(others[:16])} ended later: {len(others)} in all"
    if not found.records and found.text:
        said = [
            line for line in found.text.strip().splitlines() if not line.startswith(CONTINUE_PREFIX)
        ]
        yield f"  last message of the command: {said[-1] if code else said[0]}"
    yield from _progress(found)
    yield from _storage(found, failure)
    yield from (
        f"  {line}"
        for line in (
            what_would_fit(found) if failure.memory_aware_cause is Cause.OUT_OF_MEMORY else ()
        )
    )
    prefix = found.run.flight_recorder
    # An empty dump holds nothing to analyze.
    recorders = [path for path in prefix.parent.glob(f"{prefix.name}*") if path.stat().st_size]
    if recorders:
        yield (
            f"  NCCL's flight recorder: {len(recorders)} files; torchfrtrace "
            f"{prefix.parent} -p {prefix.name}"
        )


def _meaning(code: int) -> str:
    """Return the meaning of an exit status: 85, or 128 + a signal's number; else ""."""
    if code == 85:
        return " (saved; the same command continues the run)"
    try:
        return f" (128 + {code - 128}: {signal.Signals(code - 128).name})" if code > 128 else ""
    except ValueError:
        return ""


def _progress(found: Evidence) -> Iterator[str]:
    """Yield the last logged step, skipped and bad steps, and the newest complete checkpoint."""
    if steps := evidence.json_lines(found.run.metrics, "step", "loss"):
        loss = number_or_none(steps[-1]["loss"])
        first = steps[0]
        last = steps[-1]
        yield f"  the last logged step is {steps[-1]['step']}" + (
            "" if loss is None else f", loss {loss:.4g}"
        )
        skipped = (number_or_none(last.get("skipped_steps")) or 0) - (
            number_or_none(first.get("skipped_steps")) or 0
        )
        between = steps[-1]["step"] - steps[0]["step"]
        if between and skipped / between > _SKIPPED_OFTEN:
            yield (f"  fp16 skipped {skipped:.0f} of the last {between} steps: no loss scale works")
    for line in evidence.json_lines(found.run.bad_steps, "step", "action", "message")[-3:]:
        message = str(line["message"]).partition("\n")[0]
        yield f"  bad step {line['step']} ({line['action']}): {message}"
    saved = found.run.complete_checkpoints()
    yield (
        f"  the newest complete checkpoint is after step {saved[-1][0]}"
        if saved
        else "  no complete checkpoint"
    )


def _storage(found: Evidence, failure: Failure) -> Iterator[str]:
    for line in [
        line for line in evidence.json_lines(found.run.saves, "step") if line.get("error")
    ][-1:]:
        yield f"  the save after step {line['step']} failed: {line['error']}"
    free = shutil.disk_usage(found.run.path).free
    if free < _FEW_BYTES or failure.cause is Cause.DISK_FULL:
        yield f"  {human_bytes(free)} free now on the disk of {found.run}"
