"""What `ortlaunch selftest` calls equal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ortlaunch.commands import selftest
from ortlaunch.commands.selftest import Outcome, Trial
from ortlaunch.errors import InputError

LOSSES = (2.0, 1.0)


@pytest.fixture
def comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second backend whose losses are the first word of its command."""
    trials = [Trial("local", ("1.0",)), Trial("mpi", ("1.5",))]
    monkeypatch.setattr(selftest, "_trials", lambda hostfile, hosts: iter(trials))
    monkeypatch.setattr(
        selftest, "_run", lambda folder, trial, _: Outcome(trial.name, "a:0-0", (2.0, float(trial.words[0])), 1.0)
    )


def test_a_backend_with_other_losses_fails_it(
    comes_to: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named in its line, and counted."""
    assert not selftest.selftest(tmp_path / "st", None, ())
    said = capsys.readouterr().out.splitlines()
    assert [line.split("s  ")[-1] for line in said[1:3]] == ["equal", "LOSSES DIFFER by 0.5"]
    assert said[3].startswith("1 of 2 backends differ or failed; see ")


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome("mpi", "", (2.0, 1.0 + 9e-6), 1.0), "equal"),
        (Outcome("mpi", "", (2.0,), 1.0), "1 STEPS, not 2"),
        (Outcome("mpi", "", (), 1.0), "0 STEPS, not 2"),
        (Outcome("mpi", "", LOSSES, 1.0, "RANKS DIFFER from the plan: 1"), "RANKS DIFFER from the plan: 1"),
    ],
)
def test_verdicts(outcome: Outcome, verdict: str) -> None:
    """Within 1e-5, as many steps, and ranks where the plan has them."""
    assert outcome.verdict(LOSSES) == verdict


def test_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    """An earlier selftest's runs would be continued."""
    (tmp_path / "x").write_text("")
    with pytest.raises(InputError, match="is not empty; give a new folder with --dir"):
        selftest.selftest(tmp_path, None, ())


def test_a_job_is_queued_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --slurm nothing is submitted, and that is printed."""
    queued: list[str] = []
    monkeypatch.setattr(selftest, "_has_mpirun", lambda: False)
    monkeypatch.setattr(selftest, "_slurm_nodes", lambda: 2)
    monkeypatch.setattr(
        selftest, "_run", lambda folder, trial, _: queued.append(trial.verb) or Outcome(trial.name, "", LOSSES, 1.0)
    )
    for slurm in (False, True):
        queued.clear()
        assert selftest.selftest(tmp_path / str(slurm), None, (), slurm)
        assert ("submit" in queued) is slurm
        assert ("not tested: it queues a job" in capsys.readouterr().out) is not slurm


def test_a_signal_leaves_no_job_and_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the job is ended, and the job is cancelled."""
    called: list[str] = []

    def call(argv: Sequence[str], log: Path) -> int:
        called.append(next(word for word in argv if word in ("submit", "status", "cancel")))
        if called[-1] == "status":
            raise SystemExit(143)
        return 0

    monkeypatch.setattr(selftest, "_call", call)
    with pytest.raises(SystemExit):
        selftest._run(tmp_path, Trial("slurm", (), "submit"), ())
    assert called == ["submit", "status", "cancel"]


def test_a_signal_ends_the_command_that_runs(tmp_path: Path) -> None:
    """The child gets SIGTERM, and is waited for."""
    script = (
        "import signal, sys\nfrom pathlib import Path\nfrom ortlaunch.commands import selftest\n"
        "signal.signal(signal.SIGALRM, lambda *_: sys.exit(143))\nsignal.setitimer(signal.ITIMER_REAL, 0.3)\n"
        "selftest._call((sys.executable, '-c', 'import os,time;print(os.getpid(),flush=True);time.sleep(60)'), "
        "Path('log'))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=50, check=False)
    assert ended.returncode == 143
    assert not Path("/proc", (tmp_path / "log").read_text().strip() or "none").exists()
