"""The command line in this process: what is typed, the exit status, and what it writes."""

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
    """A command's exit status and what it wrote."""

    status: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def ortlaunch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs the command in a folder with a good recipe and a bad one."""
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
        gc.unfreeze()
        gc.enable()
        code = caught.value.code
        return Ended(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run
