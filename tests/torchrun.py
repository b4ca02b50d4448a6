"""Ranks that a test starts by torchrun, in the folder of this repository."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ortmodule_tests.torchrun import torchrun as torchrun_in

torchrun = partial(torchrun_in, cwd=Path(__file__).parents[1])
