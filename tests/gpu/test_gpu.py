"""Tests of ortlaunch on a GPU, the most valuable parts first: `make gpu` (docs/evidence/gpu.md).

`--device cpu` rehearses every part at a tiny size. A case is one or more commands with a judge.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ortlaunch.base.units import human_bytes
from tests.gpu.cases import (
    FOLDER,
    PARTS,
    ROOT,
    Case,
    Form,
    cases,
    form,
    plan_command,
    planned_bytes,
)
from tests.gpu.smoke import run
from tests.gpu.verdicts import FAILED, SKIPPED, Ended, Verdict
from tests.page import CASE_SECONDS, Results

# Figures that judges use and the page of results leaves out.
NOT_SHOWN = {"varied", "samples_per_second", "why", "used", "matmul"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Add the cases of the options --device and --ranks."""
    shape = form(metafunc.config.getoption("--device"), metafunc.config.getoption("--ranks"))
    made = [case for part in PARTS for case in cases(part, shape)]
    metafunc.parametrize("case", [pytest.param(case, id=case.key) for case in made])


@pytest.mark.gpu
@pytest.mark.timeout(2 * CASE_SECONDS)
def test_gpu(
    case: Case,
    device: str,
    results: Results,
    losses_of: Callable[[str], list[float]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    """The commands of a case satisfy its judge."""
    record_property("part", case.part)
    record_property("case", case.name)
    if refused := refusal(
        case, form(device, request.config.getoption("--ranks")), results.machine["memory"]
    ):
        pytest.skip(refused)
    if case.part == "ort" or case.name.startswith(("ort, ", "dropout, ort")):
        request.getfixturevalue("extensions")
    reference = losses_of(case.reference) if case.reference else []
    folder = tmp_path / "case"
    seconds = results.remaining
    try:
        if case.forked:
            output = run(case.forked, folder, seconds, request.getfixturevalue("cold"))
        else:
            folder.mkdir()
            output = in_process(
                [word.replace(FOLDER, str(folder)) for word in case.command], tmp_path, seconds
            )
        verdict = judged(case, Ended(*output, folder, reference, results.machine["capability"]))
    except subprocess.TimeoutExpired:
        results.out_of_time(f"was not done in {seconds:.0f} s")
    finally:
        # The checkpoints of a BERT-large are gigabytes.
        shutil.rmtree(folder, ignore_errors=True)
    for row in verdict.rows:
        record_property(
            "row", {name: value for name, value in row.items() if name not in NOT_SHOWN}
        )
    if verdict.status == SKIPPED:
        pytest.skip("; ".join(verdict.why))
    if verdict.status == FAILED:
        pytest.fail("; ".join(verdict.why), pytrace=False)
    for why in verdict.why:
        record_property("note", why)


def judged(case: Case, ended: Ended) -> Verdict:
    """Return the judge's verdict; failed if a file or a field that it reads is missing."""
    try:
        return case.judge(ended)
    except (OSError, KeyError, IndexError, ValueError) as error:
        return Verdict(FAILED, (f"{type(error).__name__}: {error}",))


def refusal(case: Case, shape: Form, memory: int | None) -> str:
    """Return the reason not to start a case (the card is too small), or an empty text."""
    if case.recipe and memory is not None:
        status, stdout, _ = in_process(plan_command(case, shape), ROOT, 60)
        # A recipe that cannot be planned is started: its run reports the error.
        planned = planned_bytes(stdout) if status == 0 else None
        if planned is not None and planned > memory:
            return f"the plan takes {human_bytes(planned)} of a card, and this one has {human_bytes(memory)}"
    return ""


def in_process(
    command: list[str] | tuple[str, ...], folder: Path, seconds: float
) -> tuple[int, str, str]:
    """Run a command in a folder; return its exit status, stdout and stderr.

    Raises:
        TimeoutExpired: it took more than `seconds`; the command was ended.
    """
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, cwd=folder, env={**os.environ, **settings}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except BaseException:
        # As a launcher does: ortlaunch ends its ranks on SIGTERM; SIGKILL could leave them running.
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        raise
    return process.returncode, stdout, stderr
