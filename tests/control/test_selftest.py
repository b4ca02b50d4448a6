"""What `ortlaunch selftest` calls equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortlaunch.errors import InputError
from ortlaunch.run import selftest
from ortlaunch.run.selftest import Outcome, Trial

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
