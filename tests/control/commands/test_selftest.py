"""Tests of the findings of `ortlaunch selftest`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ortlaunch.base.errors import InputError
from ortlaunch.commands import selftest
from ortlaunch.commands.selftest import SelftestRequest, Training, TrainingResult
from ortlaunch.doctor.finding import FAILED, OK, WARNING, Finding
from ortlaunch.planning.world import LaunchOptions

LOSSES = (2.0, 1.0)
CHECKED = Finding("localhost", "disk", OK, "1 GiB free")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A login node with mpirun and Slurm, on which trainings by mpirun have another last loss.

    Returns:
        The names of the trainings, which grow with each one.
    """
    names: list[str] = []

    def train(folder: Path, training: Training, overrides: Sequence[str]) -> TrainingResult:
        names.append(training.name)
        # A difference far beyond the tolerance.
        last = 1.5 if "mpi" in training.name else 1.0
        return TrainingResult(training.name, "a:0-0", (2.0, last), 1.0, folder / "log")

    monkeypatch.setattr(selftest, "check_hosts_or_this_machine", lambda *_: [CHECKED])
    monkeypatch.setattr(
        selftest,
        "_measure_fabric_by_ranks_and_return_findings",
        lambda *_: [Finding("a", "link", OK, "to b")],
    )
    monkeypatch.setattr(selftest, "_has_mpirun", lambda: True)
    monkeypatch.setattr(selftest, "_slurm_node_count_or_zero", lambda: 3)
    monkeypatch.setattr(selftest, "_train_or_submit_and_summarize_result", train)
    return names


def run(folder: Path, answer: bool = False, **launch: str | int) -> dict[str, Finding]:
    """Run the selftest, and return its findings by their check."""
    request = SelftestRequest(folder, launch_options=LaunchOptions(**launch))  # type: ignore[arg-type]
    return {
        one.check: one
        for one in selftest.check_hosts_and_train_with_each_launcher(
            request, lambda question: answer, {}
        )
    }


def test_a_backend_with_other_losses_fails_it(place: list[str], tmp_path: Path) -> None:
    """A training with other losses fails, and its finding names the log."""
    found = run(tmp_path / "st")
    assert list(found) == [
        "disk",
        "link",
        "train local",
        "train torchrun",
        "train mpi",
        "train slurm",
    ]
    # Slurm is not tested without a yes, which is a warning.
    assert [one.verdict for one in found.values()] == [OK, OK, OK, OK, FAILED, WARNING]
    assert found["train mpi"].what.startswith(
        "LOSSES DIFFER by 0.5: a:0-0, losses 2.000000 -> 1.500000"
    )
    assert found["train mpi"].mend == f"see {tmp_path}/st/log"


def test_no_rank_is_started_where_a_check_failed(
    place: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank is started after a failed check, and a finding notes that."""
    monkeypatch.setattr(
        selftest, "check_hosts_or_this_machine", lambda *_: [replace(CHECKED, verdict=FAILED)]
    )
    assert run(tmp_path / "st", answer=True)["ranks"].what == "not started, because a check failed"
    assert place == []


@pytest.mark.parametrize("answer", [False, True])
def test_a_job_is_queued_on_request(answer: bool, place: list[str], tmp_path: Path) -> None:
    """A job is queued only after a yes; otherwise a finding notes that."""
    found = run(tmp_path / "st", answer)["train slurm"]
    assert ("slurm" in place) is answer
    assert found.verdict == (OK if answer else WARNING)
    assert found.what.startswith("equal" if answer else "not tested: this would queue a job")


def test_a_launcher_of_choice(place: list[str], tmp_path: Path) -> None:
    """With a chosen launcher no other is tested, and only the included hosts are used."""
    # Without b, all hosts have the same number of slots, as torchrun requires.
    (tmp_path / "hosts").write_text("a slots=1\nb slots=2\nc slots=1\n")
    run(tmp_path / "st", launcher="torchrun", hostfile=str(tmp_path / "hosts"), exclude="b")
    assert place == ["local", "torchrun", "torchrun, hosts"]


@pytest.mark.parametrize(
    ("losses", "wrong", "start"),
    [
        # Within the tolerance of 1e-5.
        ((2.0, 1.0 + 9e-6), "", "equal: "),
        ((2.0,), "", "1 STEPS, not 2: "),
        ((), "", "0 STEPS, not 2: "),
        (LOSSES, "RANKS DIFFER from the plan (1)", "RANKS DIFFER from the plan (1): "),
    ],
)
def test_verdicts(losses: tuple[float, ...], wrong: str, start: str) -> None:
    """Losses within 1e-5, as many steps, and ranks as planned count as equal."""
    found = TrainingResult(
        "mpi", "a:0-1", losses, 1.0, Path("log"), wrong
    ).finding_compared_with_first_losses(LOSSES)
    assert found.what.startswith(start)
    assert found.verdict == (OK if start == "equal: " else FAILED)


def test_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    """A folder that is not empty is refused: an earlier selftest's runs would be continued."""
    (tmp_path / "x").write_text("")
    with pytest.raises(InputError, match="is not empty; give a new folder with --dir"):
        run(tmp_path)


def test_a_signal_leaves_no_job_and_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a signal the waiting command ends and the job is cancelled."""
    called: list[str] = []

    def call(argv: Sequence[str], log: Path) -> int:
        called.append(next(word for word in argv if word in ("submit", "status", "cancel")))
        if called[-1] == "status":
            # As the handler of a signal does.
            raise SystemExit(143)
        return 0

    monkeypatch.setattr(selftest, "_run_command_with_output_in_log", call)
    with pytest.raises(SystemExit):
        selftest._train_or_submit_and_summarize_result(
            tmp_path, Training("slurm", (), "submit"), ()
        )
    assert called == ["submit", "status", "cancel"]


def test_a_signal_ends_the_command_that_runs(tmp_path: Path) -> None:
    """After a signal the child gets SIGTERM, and the selftest waits for its end."""
    script = (
        "import signal, sys\nfrom pathlib import Path\nfrom ortlaunch.commands import selftest\n"
        "signal.signal(signal.SIGALRM, lambda *_: sys.exit(143))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.3)\n"
        "selftest._run_command_with_output_in_log((sys.executable, '-c', "
        "'import os,time;print(os.getpid(),flush=True);time.sleep(60)'), "
        "Path('log'))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=50, check=False)
    assert ended.returncode == 143
    assert not Path("/proc", (tmp_path / "log").read_text().strip() or "none").exists()
