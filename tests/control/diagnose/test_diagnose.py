"""`ortlaunch diagnose` on recorded run folders: the verdict, its evidence and the advice."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.cause import Cause, Failure
from ortlaunch.base.errors import InputError
from ortlaunch.base.units import shorten_to_one_line
from ortlaunch.cli import app
from ortlaunch.diagnose import memory as diagnose_memory
from ortlaunch.diagnose.conclude import add_cause_explanation_and_advice, conclude_run
from ortlaunch.launch import JobState
from ortlaunch.launch.record import JobRecord
from ortlaunch.launch_plan import USUAL_PROCESS
from ortlaunch.recipe import dump_recipe_yaml
from ortlaunch.run_folder.cause_text import command_end_sentence
from ortlaunch.run_folder.error_record import first_error_record
from ortlaunch.run_folder.folder import (
    COMPLETE,
    RunDir,
    write_json_atomically,
    write_text_atomically,
)
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.started_runs.diagnosis import diagnose_run
from tests.makers import bert, host, plan, recipe

GiB = 1 << 30


def made(folder: Path, made_recipe: Any = None, **ranks: Any) -> RunDir:
    """Write a run folder of 2 ranks, with a failed job and the error record of rank 1.

    Args:
        ranks: Fields of the error record of rank 1. Without them no error records are written.
    """
    run = RunDir(folder / "run")
    chosen = made_recipe or recipe()
    write_text_atomically(run.plan, plan(chosen, [host("a", 2)], "torchrun").to_json())
    write_text_atomically(run.recipe, dump_recipe_yaml(chosen))
    write_text_atomically(run.request, "")
    for rank in range(2):
        write_text_atomically(run.rank_log_path(rank, "err"), "first\nlast words\n")
    if ranks:
        account = {"rank": 1, "host": "a", "exit_status": 1, "signal": None, "type": "Signal", "message": "",
                   "traceback": "", "summary": "rank 1 on host a failed", "secondary": False, "time": 2.0,
                   "cause": "raised", "detail": "x"}  # fmt: skip
        write_json_atomically(run.rank_error_path(1), {**account, **ranks})
        # Rank 0 has the earlier time, but it failed only because it lost rank 1 (secondary).
        write_json_atomically(
            run.rank_error_path(0),
            {**account, "rank": 0, "secondary": True, "time": 1.0, "type": "RuntimeError"},
        )
    conclude(run, ranks.get("exit_status", 1))
    return run


def conclude(run: RunDir, status: int = 1, failure: Failure | None = None) -> Verdict:
    """Record that the run ended so, and return the verdict."""
    verdict = (
        conclude_run(run, status)
        if failure is None
        else add_cause_explanation_and_advice(
            run, Verdict.of_failure_detected_by_command(status, failure)
        )
    )
    record(run, verdict)
    return verdict


def record(run: RunDir, verdict: Verdict) -> None:
    job = JobRecord.for_this_process("torchrun", JobState.RUNNING)
    job.copy_ended_now(JobState.state_of_exit_status(verdict.exit_status), verdict).write(run)


KILLED = {"type": "Signal", "signal": 9, "exit_status": 137}
NAN = "step 3: the loss is nan on rank 1, samples 4, 5 of x"
# Cause -> fields of the error record of rank 1, and the verdict.
RANKS: dict[str, tuple[dict[str, Any], str]] = {
    "left-early": (
        {"exit_status": 7},
        "rank 1 on host a exited early with exit status 7 before the end",
    ),
    "host-lost": (
        {"detail": "ssh to b ended with status 255: x"},
        "ssh to b ended with status 255: x",
    ),
    "raised": ({"detail": "ValueError: planted"}, "rank 1 on host a raised ValueError: planted"),
    "bad-input": (
        {"exit_status": 2, "detail": "a.jsonl:3: x", "raised_at": "b.py:1"},
        "a.jsonl:3: x, at b.py:1",
    ),
    "crash": (
        {"signal": 11, "exit_status": 139, "detail": "what(): y"},
        "rank 1 on host a crashed in native code (SIGSEGV, invalid memory access): what(): y",
    ),
    "graph-crash": (
        {"signal": 8, "exit_status": 136, "detail": "in its backward pass"},
        "rank 1 on host a crashed in ONNX Runtime's graph (SIGFPE, an arithmetic error): in its "
        "backward pass",
    ),
    "killed": (
        KILLED,
        "rank 1 on host a was killed (SIGKILL); its control group reports no lack of memory",
    ),
    "out-of-memory": (
        {"detail": "RuntimeError: can't allocate"},
        "out of memory: rank 1 on host a could not allocate: RuntimeError: can't allocate",
    ),
    "not-finite": ({"detail": NAN}, NAN),
    "loss-spike": ({"detail": "step 9: the loss jumped"}, "step 9: the loss jumped"),
    "disk-full": (
        {"detail": "OSError: x"},
        "the disk is full, detected by rank 1 on host a: OSError: x",
    ),
    "missing-file": ({"detail": "'a.bin'"}, "rank 1 on host a lacks a file: 'a.bin'"),
    "no-gpu": ({"detail": "x"}, "rank 1 on host a has no GPU to train on: x"),
    "hang": ({"detail": "the run has stalled for 9 s"}, "the run has stalled for 9 s"),
}


@pytest.mark.parametrize("kind", RANKS)
def test_the_account_of_a_rank(kind: str, tmp_path: Path) -> None:
    """The verdict names the first failure, not the failures of ranks that lost that rank."""
    account, said = RANKS[kind]
    found = diagnose_run(made(tmp_path, cause=kind, **account))
    assert (found.kind, found.verdict) == (kind, said)
    assert "    | last words" in found.evidence
    assert "  rank 0 ended later: 1 in all" in found.evidence


@pytest.mark.parametrize("saved", [True, False])
def test_a_crash_of_onnx_runtime_offers_eager(saved: bool, tmp_path: Path) -> None:
    """The advice has the other engine, and where the run goes on."""
    run = made(tmp_path, cause="graph-crash", signal=8)
    if saved:
        run.checkpoint_folder(7).mkdir(parents=True)
        (run.checkpoint_folder(7) / COMPLETE).touch()
        conclude(run)
    advice = diagnose_run(run).advice[0]
    assert advice.startswith("engine.name=eager trains in PyTorch")
    assert ("after step 7" in advice, "no checkpoint yet" in advice) == (saved, not saved)


def test_the_evidence_is_the_short_traceback(tmp_path: Path) -> None:
    """The evidence has the traceback that the command printed, without frames of packages."""
    run = made(
        tmp_path,
        type="ValueError",
        cause="raised",
        detail="ValueError: x",
        traceback="Traceback\n  all frames\nValueError: x",
        folded="Traceback (most recent call last):\n  ... 18 frames\nValueError: x",
    )
    found = diagnose_run(run)
    assert "    |   ... 18 frames" in found.evidence
    assert not [line for line in found.evidence if "last words" in line or "verdict" in line]


def test_a_rank_that_the_kernel_ended(tmp_path: Path) -> None:
    """A rank whose record counts a kill for memory gets a verdict that names the kernel."""
    found = diagnose_run(made(tmp_path, **KILLED, cause="out-of-memory", memory_kills=1))
    assert (found.kind, found.verdict) == (
        "out-of-memory",
        "out of memory: the kernel ended rank 1 on host a (SIGKILL)",
    )


@pytest.mark.parametrize(
    ("precision", "kind"), [("fp16", "loss-scale-collapse"), ("fp32", "not-finite")]
)
def test_a_gradient_that_is_not_finite(precision: str, kind: str, tmp_path: Path) -> None:
    """A non-finite gradient with finite losses is a loss scale collapse in fp16 only."""
    chosen = recipe(engine={"name": "eager"}, precision=precision, launch={"device": "cuda"})
    assert (
        diagnose_run(made(tmp_path, chosen, cause="gradient-not-finite", detail="x")).kind == kind
    )


WHO = "rank 1 on host a"
# Causes that the command records itself because no rank left an error record.
ENDS = {
    "launcher-killed": Failure(Cause.LAUNCHER_KILLED, who="mpirun", signal=9),
    "no-locks": Failure(Cause.NO_LOCKS, "DistError: flock: No locks available", who="torchrun"),
    "launcher-failed": Failure(Cause.LAUNCHER_FAILED, "EOFError: Ran out of input", who="torchrun"),
    "command-killed": Failure(Cause.COMMAND_KILLED, who="process 7 on host a"),
    "rank-vanished": Failure(Cause.RANK_VANISHED, who=WHO, memory_kills=0),
    "never-began": Failure(Cause.NEVER_BEGAN, who=WHO, status=213),
    "disk-full": Failure(Cause.DISK_FULL, "run"),
    "signalled": Failure(Cause.SIGNALLED, who=WHO, signal=15),
    "stopped": Failure(Cause.STOPPED, "stopped by SIGTERM; the newest checkpoint is after step 4"),
    "unknown": Failure(Cause.UNKNOWN, "something new"),
}


@pytest.mark.parametrize("kind", ENDS)
def test_ends_of_which_no_rank_tells(kind: str, tmp_path: Path) -> None:
    """The verdict is the failure that the command recorded, in the same sentence."""
    run = made(tmp_path)
    conclude(run, failure=ENDS[kind])
    assert (diagnose_run(run).kind, diagnose_run(run).verdict) == (
        kind,
        command_end_sentence(ENDS[kind]),
    )


def test_processes_that_the_kernel_ended(tmp_path: Path) -> None:
    """Memory is the cause if only the kernel's count of kills explains a vanished rank."""
    run = made(tmp_path)
    conclude(run, failure=Failure(Cause.RANK_VANISHED, who=WHO, memory_kills=1))
    assert diagnose_run(run).kind == "out-of-memory"
    assert (
        diagnose_run(run).verdict
        == "out of memory: the kernel's out-of-memory killer ended 1 of this run's processes"
    )


@pytest.fixture
def _usual_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run has measured the process's own memory."""
    monkeypatch.setattr(
        diagnose_memory, "cached_or_usual_process_memory", lambda recipe: USUAL_PROCESS
    )


@pytest.mark.usefixtures("_usual_process")
def test_out_of_memory_says_what_would_fit(tmp_path: Path) -> None:
    """The evidence compares the plan, and settings that need less memory, with the rank's limit."""
    big = {"batch": {"global_size": 64, "micro_size": 32}}
    # Two ranks share the limit of the host: 434 MiB for each.
    limit = {"memory_limit": {"name": "control group", "bytes": 2 * (434 << 20)}}
    found = diagnose_run(made(tmp_path, bert(**big, zero=None), cause="out-of-memory", **limit))
    rows = [line.strip() for line in found.evidence]
    assert any(line.startswith("->DDP") for line in rows)
    head = (
        "what would fit (by the plan, with 410.0 MiB for the process): 434.0 MiB per rank is "
        "the limit there"
    )
    assert head in rows
    fits = {
        line.partition("  ")[0]: line.rpartition(", ")[2]
        for line in rows
        if line.endswith(("fit", "fits"))
    }
    assert fits["as it is"] == "does not fit"
    sizes = [f"batch.micro_size: {size}" for size in (16, 8, 4, 2, 1)]
    assert [name for name in fits if name.startswith("batch")] == sizes
    assert fits["batch.micro_size: 1"] == "fits"
    assert "model.gradient_checkpointing: true" in fits
    # The buckets of ZeRO 3 need more memory than they save in such a small model.
    assert "zero.stage: 3" not in fits


def test_out_of_memory_never_says_that_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan below the limit that the run reached is scaled up to that limit."""
    # Without the measurements of other runs here, which may exceed the limit by themselves.
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(tmp_path / "cache"))
    limit = {"memory_limit": {"name": "control group", "bytes": 2 * (1 << 30)}}
    asked = bert(batch={"global_size": 64, "micro_size": 32})
    rows = [
        line.strip()
        for line in diagnose_run(made(tmp_path, asked, cause="out-of-memory", **limit)).evidence
    ]
    assert any(
        re.search(
            r"\d\.\d\d times as much, because the run reached the limit: 1.0 GiB per rank is", line
        )
        for line in rows
    )
    assert next(line for line in rows if line.startswith("as it is")).endswith(
        "1.0 GiB, does not fit"
    )
    assert any(line.startswith("batch.micro_size: 1 ") and line.endswith(", fits") for line in rows)


def test_train_says_the_verdict_before_its_last_line(tmp_path: Path) -> None:
    """The last line of train stays the same; an end by a signal from outside gets no verdict."""
    run = made(
        tmp_path,
        cause="index-out-of-range",
        detail="IndexError: Target 7 is out of bounds.",
        traceback="Traceback\nIndexError: Target 7\n",
    )
    lines = conclude(run).render().splitlines()
    assert lines[:3] == ["Traceback", "IndexError: Target 7", ""]
    assert lines[3].startswith(
        "verdict: rank 1 on host a used a label, token or position outside the model's range: Index"
    )
    assert lines[4].startswith("try: compare the labels")
    assert lines[-1] == "ortlaunch: rank 1 on host a failed"
    stopped = conclude(made(tmp_path / "other"), 143, Failure(Cause.STOPPED, "stopped by SIGTERM"))
    assert stopped.render() == "ortlaunch: stopped by SIGTERM"


@pytest.mark.parametrize("kind", ["not-finite", "loss-spike"])
def test_a_message_is_printed_once(kind: str, tmp_path: Path) -> None:
    """Each sentence and each advice is printed once for a non-finite loss and for a loss spike."""
    message = f"{NAN}\nThe run ends here."
    run = made(
        tmp_path, type="BadStepError", cause=kind, detail=NAN, message=message, traceback=message
    )
    lines = conclude(run).render().splitlines()
    assert lines[0] == f"verdict: {NAN}"
    assert lines[1:2] == message.splitlines()[1:]
    assert [line.partition(" ")[0] for line in lines[2:]] == ["try:", "try:", "try:", "ortlaunch:"]


def test_numbers_beside_the_verdict(tmp_path: Path) -> None:
    """The evidence has the last step, skipped and bad steps, failed saves and NCCL's recorder."""
    run = made(tmp_path, type="ValueError", message="x")
    lines = [{"step": step, "loss": 2.0, "skipped_steps": step} for step in (1, 5, 9)]
    # The last line is cut, as after a kill in the middle of a write.
    write_text_atomically(
        run.metrics, "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 10, "lo'
    )
    write_text_atomically(
        run.bad_steps,
        json.dumps({"step": 4, "action": "skip", "message": "step 4: the loss is nan\nw"}) + "\n",
    )
    write_text_atomically(
        run.saves, json.dumps({"step": 8, "seconds": 1.0, "error": "full"}) + "\n"
    )
    write_text_atomically(run.errors / "nccl_trace_rank_0", "x")
    said = "\n".join(diagnose_run(run).evidence)
    assert "the last logged step is 9, loss 2" in said
    assert "fp16 skipped 8 of the last 8 steps" in said
    assert "bad step 4 (skip): step 4: the loss is nan" in said
    assert "the save after step 8 failed: full" in said
    assert "NCCL's flight recorder: 1 files" in said


def test_a_loss_that_is_nan_by_the_learning_rate(tmp_path: Path) -> None:
    """At a rate that breaks every batch, the rate alone is the advice."""
    for rate, first in ((2e9, "a lower optimizer.learning_rate: got 2e+09: adamw changes each"),
                        (1e-3, "check these samples")):  # fmt: skip
        chosen = recipe(optimizer={"name": "adamw", "learning_rate": rate})
        advice = diagnose_run(
            made(tmp_path / str(rate), chosen, cause="not-finite", detail=NAN)
        ).advice
        assert advice[0].startswith(first)
        assert ("rollback" in " ".join(advice)) == (rate < 1)


def test_a_long_verdict_is_cut_at_a_word(tmp_path: Path) -> None:
    """A text of a library is one line, which ends at a word with a mark."""
    found = diagnose_run(made(tmp_path, detail="ValueError: planted\n" + "words " * 90))
    assert found.verdict.endswith(" words ...")
    assert "planted words" in found.verdict
    # A word that is longer than the line, as a path, is cut where it must be.
    assert shorten_to_one_line("/a/" * 9, 12) == "/a//a//a ..."


def test_a_long_message_is_printed_once(tmp_path: Path) -> None:
    """A message of a rank that is longer than a verdict is printed in full, as the verdict."""
    message = f"cannot run: {'word ' * 120}end"
    for detail, text in ((f"EngineError: {message}", f"{message}\nTry eager"), (message, message)):
        run = made(
            tmp_path / detail[:3],
            type="EngineError",
            cause="raised",
            detail=detail,
            message=text,
            traceback=text,
        )
        lines = conclude(run).render().splitlines()
        assert lines[: len(text.splitlines())] == f"verdict: {text}".splitlines()
        assert "\n".join(lines).count("cannot run") == 1


def test_a_run_that_goes_on_and_one_that_ended_well(tmp_path: Path) -> None:
    """A running or successful run has no failure; a folder that is no run is refused."""
    run = RunDir(tmp_path)
    record(run, Verdict(0, "done: run, in 0:09", continue_command="ortlaunch train x.yaml"))
    assert diagnose_run(run).kind == "ended-well"
    assert "  last message of the command: done: run, in 0:09" in diagnose_run(run).evidence
    replace(JobRecord.for_this_process("torchrun", JobState.RUNNING)).write(run)
    assert diagnose_run(run).kind == "running"
    with pytest.raises(InputError):
        diagnose_run(RunDir(tmp_path / "nothing"))


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict is printed first; --json prints all fields."""
    run = made(tmp_path, cause="crash", signal=int(signal.SIGSEGV))
    for arguments in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            app(["diagnose", str(run), *arguments])
        assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("verdict: rank 1 on host a crashed in native code (SIGSEGV")
    assert json.loads(said[said.index("\n{") :])["kind"] == "crash"


def test_a_stop_is_the_cause_where_the_command_says_so(tmp_path: Path) -> None:
    """A rank that was stopped is the cause only if the command recorded that too.

    Before its first step a rank stops at once, also when the launcher stops it because another rank
    was lost. Then that other rank is the cause.
    """
    detail = "was stopped by SIGTERM before its first"
    run = made(tmp_path, cause="stopped", signal=15, exit_status=85, detail=detail)
    stop = Failure(Cause.STOPPED, detail, 1, "a")
    verdict = conclude(run, 85, stop)
    assert (diagnose_run(run).kind, diagnose_run(run).verdict) == (
        "stopped",
        f"rank 1 on host a {detail}",
    )
    assert verdict.render() == f"ortlaunch: {detail}"
    conclude(run, 137, Failure(Cause.RANK_VANISHED, who="rank 0 on host a"))
    assert diagnose_run(run).kind == "rank-vanished"


def test_ranks_of_two_hosts_are_ordered_as_the_command_orders_them(tmp_path: Path) -> None:
    """The record that counted no earlier ones is the cause, also if its host's clock is late."""
    run = made(tmp_path, type="ValueError", summary="rank 1 failed", time=9.0, after=0)
    earlier = json.loads(run.rank_error_path(1).read_text())
    write_json_atomically(
        run.rank_error_path(0),
        {**earlier, "rank": 0, "summary": "rank 0 failed", "time": 1.0, "after": 1},
    )
    first = first_error_record(run)
    assert first is not None
    assert first.rank == 1
    failure = conclude_run(run, 1).failure
    assert failure is not None
    assert failure.rank == 1
