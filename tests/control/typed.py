"""Run the command line in this process, and return its exit status and output."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from ortlaunch import cli
from tests.makers import BERT, CUSTOM, OWN_MODULE, WORDS


class Ended(NamedTuple):
    """The exit status, standard output and standard error of a command."""

    status: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def ortlaunch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """A function that runs a command in a folder with valid recipes and a bad one."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN_MODULE)
    Path("good.yaml").write_text(yaml.safe_dump(CUSTOM))
    Path("bert.yaml").write_text(
        yaml.safe_dump(
            {
                **CUSTOM,
                "name": "bert",
                "model": {"task": "masked-lm", "config": BERT},
                "data": WORDS,
            }
        )
    )
    Path("bad.yaml").write_text(
        yaml.safe_dump({**CUSTOM, "presicion": "fp32", "seed": "x", "train": {}})
    )

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["ortlaunch", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        # The command line freezes and disables garbage collection: undo that for the next tests.
        gc.unfreeze()
        gc.enable()
        code = caught.value.code
        return Ended(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run
