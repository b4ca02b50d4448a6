"""The record of a run's compared steps: over a restart, over the ranks, and in JSON."""

from __future__ import annotations

import contextlib
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ortlaunch.base.errors import EngineError, ParityError
from ortlaunch.launch_plan import Mesh
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.engine.divided_comparison import ReferencePass
from ortlaunch.worker.session import Session
from ortlaunch.worker.training.parity_steps import ParitySteps
from tests.makers import engine_report, plan, recipe

NO_DATA: Any = None
NO_MODEL: Any = None
BATCH = {"x": torch.ones(2, 4)}


class Net(nn.Module):
    """A linear layer, inside a module as LossModule has it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean() + 1


def engine(factor: float = 1.0) -> Any:
    """Return an engine whose loss is `factor` times the right one."""
    net = Net()
    record = engine_report("inductor")
    return SimpleNamespace(
        plain=net,
        reference_pass=None,
        module_without_dropout_for_comparison=lambda: lambda x: net(x) * factor,
        record=record,
        to_device=lambda batch: batch,
        engine_report_so_far=lambda: record,
        exclude_passes_from_counts=lambda with_compilations: contextlib.nullcontext(),
    )


def print_lines(*lines: str) -> None:
    """Print the lines, as rank 0 does."""
    for line in lines:
        print(line)


def group(*others: dict[str, Any]) -> Any:
    """Return the group of rank 0, with the messages of the other ranks."""
    return SimpleNamespace(
        rank=0,
        mesh=None,
        data_parallel=SimpleNamespace(rank=0),
        size=1 + len(others),
        gather=lambda mine: [mine, *others],
        print_on_rank_0=print_lines,
    )


def steps(
    run: RunDir,
    first_step: int = 0,
    factor: float = 1.0,
    ranks: Any = None,
    with_table: bool = False,
    **settings: Any,
) -> ParitySteps:
    made = recipe(engine={"name": "inductor", "parity_steps": 2, **settings})
    batches: Any = SimpleNamespace(
        read_micro_batch_and_count_tokens=lambda step, accumulation, rank: BATCH
    )
    session = Session(
        made, plan(made), run, ranks or group(), NO_DATA, batches, NO_MODEL, engine(factor)
    )
    return ParitySteps(session, first_step, with_table)


def lines(run: RunDir) -> list[dict[str, Any]]:
    # NaN and Infinity, which Python's json would accept.
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in run.parity.read_text().splitlines()]


def test_only_the_first_steps_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three steps are compared, with one line each and one at the end."""
    run = RunDir(tmp_path)
    compared = steps(run)
    for step in range(3):
        compared.compare_and_record_step_if_due(step)
    assert [line["step"] for line in lines(run)] == [1, 2]
    assert json.loads(run.engine.read_text())["parity"]["steps"] == [1, 2]
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["parity, step 1", "parity, step 2", "parity"]
    assert max(map(len, said[:2])) <= 100
    # The table is for `ortlaunch parity`.
    alone = steps(run, with_table=True)
    for step in range(2):
        alone.compare_and_record_step_if_due(step)
    assert "largest relative differences of 2 gradients:" in capsys.readouterr().out


def test_a_loss_of_nan_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss that is nan in PyTorch, too, is the training's to report; `parity` has no verdict."""
    run = RunDir(tmp_path)
    for with_table in (False, True):
        compared = steps(run, with_table=with_table)
        with torch.no_grad():
            compared.engine.plain.model.weight.fill_(float("nan"))
        compared.compare_and_record_step_if_due(0)
        said = "parity, step 1: not judged: the loss is nan in plain PyTorch, too"
        assert capsys.readouterr().out.splitlines() == [said]
        ends = pytest.raises(EngineError, match="no step could be judged")
        with ends if with_table else contextlib.nullcontext():
            compared.compare_and_record_step_if_due(1)
        assert json.loads(run.engine.read_text())["parity"]["verdict"] == "not compared"
        assert lines(run)[0]["passed"]
        capsys.readouterr()


def test_the_comparisons_module_is_freed_after_the_last_step(tmp_path: Path) -> None:
    """A module in a reference cycle, as an ORTModule is, does not stay until the end of the run."""
    compared = steps(RunDir(tmp_path))
    module = compared._engine_module_without_dropout()
    module.itself = module
    alive = weakref.ref(module)
    del module
    compared.compare_and_record_step_if_due(0)
    assert alive() is not None
    compared.compare_and_record_step_if_due(1)
    assert alive() is None


def test_a_resumed_run_goes_on_with_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run keeps the comparisons before its checkpoint, and repeats the later ones."""
    run = RunDir(tmp_path)
    before = steps(run)
    before.compare_and_record_step_if_due(0)
    before.compare_and_record_step_if_due(1)
    kept = lines(run)[0]
    # A line that is not whole is left out, and said once.
    run.parity.write_bytes(run.parity.read_bytes() + b'{"step": 1, "los\n')
    again = steps(run, first_step=1)
    assert capsys.readouterr().out.count("parity.jsonl:3 is left out") == 1
    assert again.engine.record.parity.steps == [1]
    again.compare_and_record_step_if_due(1)
    assert [line["step"] for line in lines(run)] == [1, 2]
    assert lines(run)[0] == kept
    assert steps(run, first_step=2).engine.record.parity.verdict == "passed"
    # A start without a checkpoint begins the record again.
    new = steps(run)
    new.compare_and_record_step_if_due(0)
    assert [line["step"] for line in lines(run)] == [1]


def test_a_difference_stops_and_is_recorded(tmp_path: Path) -> None:
    """A difference of 1 % is above fp32's tolerance; the error names parameter and both values."""
    run = RunDir(tmp_path)
    with pytest.raises(ParityError) as caught:
        steps(run, factor=1.01).compare_and_record_step_if_due(0)
    text = str(caught.value)
    assert "engine inductor and plain PyTorch differ by more than 0.0001 in step 1" in text
    assert "\n  weight  0.01  (norm " in text or "\n  bias    0.01  (norm " in text
    # The name is the model's own, without the prefix of LossModule.
    assert "model.weight" not in text
    assert lines(run)[0]["passed"] is False
    assert json.loads(run.engine.read_text())["parity"]["verdict"] == "failed"
    # Within a larger tolerance, the same difference passes.
    steps(run, factor=1.01, parity_tolerance=0.02).compare_and_record_step_if_due(0)


def test_what_is_not_finite_is_a_word_in_json(tmp_path: Path) -> None:
    """Values that are not finite become strings, so every line and engine.json are valid JSON."""
    run = RunDir(tmp_path)
    with pytest.raises(ParityError):
        steps(run, factor=float("nan")).compare_and_record_step_if_due(0)
    assert lines(run)[0]["loss_difference"] == "inf"
    assert lines(run)[0]["loss"] == "nan"
    assert "Infinity" not in run.engine.read_text()


def test_the_worst_rank_decides(tmp_path: Path) -> None:
    """A rank within tolerance stops with the one above it, and the error names that rank."""
    run = RunDir(tmp_path)
    with pytest.raises(ParityError):
        steps(run, factor=1.01).compare_and_record_step_if_due(0)
    other = {**lines(run)[0], "rank": 1}
    with pytest.raises(ParityError, match="rank 1"):
        steps(run, ranks=group(other)).compare_and_record_step_if_due(0)
    with pytest.raises(
        EngineError, match="rank 1 could not compare with plain PyTorch: out of memory"
    ):
        steps(
            run, ranks=group({"rank": 1, "error": "out of memory"})
        ).compare_and_record_step_if_due(0)


def test_a_comparison_that_raises_reaches_every_rank(tmp_path: Path) -> None:
    """A failed pass is sent to the other ranks before it ends the run."""
    sent = []
    ranks = SimpleNamespace(
        rank=0,
        mesh=None,
        data_parallel=SimpleNamespace(rank=0),
        size=1,
        gather=lambda mine: sent.append(mine) or [mine],
        print_on_rank_0=print_lines,
    )
    compared = steps(RunDir(tmp_path), ranks=ranks)
    # Shapes that do not fit.
    compared.engine.module_without_dropout_for_comparison = lambda: lambda x: torch.ones(2) @ x  # type: ignore[return-value]
    with pytest.raises(EngineError, match="rank 0 could not compare"):
        compared.compare_and_record_step_if_due(0)
    assert sent[0]["rank"] == 0


def test_one_module_is_made_for_all_compared_steps(tmp_path: Path) -> None:
    """One module is made for all compared steps, and released after the last step."""
    made = []
    compared = steps(RunDir(tmp_path))
    # A graph without dropout takes an export of its own.
    compared.engine.module_without_dropout_for_comparison = lambda: (
        made.append(1) or compared.engine.plain
    )
    compared.compare_and_record_step_if_due(0)
    assert compared.comparison_module is not None
    compared.compare_and_record_step_if_due(1)
    assert (made, compared.comparison_module) == ([1], None)


def divided(run: RunDir, first_step: int = 0, **changed: Any) -> ParitySteps:
    """Return the comparison of a model that two ranks divide, in eager."""
    made = recipe(
        engine={"name": "eager"},
        parallel={"tensor": 2, "tensor_plan": {"model": "colwise"}},
    )
    built = engine()
    built.record = engine_report("eager")
    vars(built).update(changed)
    ranks = group()
    ranks.mesh = Mesh(1, 1, 2)
    batches: Any = None
    checkpoint: Any = SimpleNamespace(step=first_step) if first_step else None
    session = Session(
        made, plan(recipe()), run, ranks, NO_DATA, batches, NO_MODEL, built, checkpoint=checkpoint
    )
    return ParitySteps(session, first_step)


def test_a_whole_model_that_a_cpu_cannot_run_is_trained_divided(tmp_path: Path) -> None:
    """A comparison that nobody requested does not end the run; a requested one does."""
    failed = ReferencePass(BATCH, None, "FlashAttention only supports CUDA")
    compared = divided(RunDir(tmp_path), reference_pass=failed)
    compared.compare_and_record_step_if_due(0)
    parity = compared.engine.record.parity
    assert parity is not None
    assert (parity.verdict, parity.why) == ("not compared", failed.error)
    compared = divided(RunDir(tmp_path), reference_pass=failed)
    compared.automatic_reason = ""
    with pytest.raises(EngineError, match="could not compare with plain PyTorch: FlashAttention"):
        compared.compare_and_record_step_if_due(0)


def test_a_resumed_divided_run_keeps_its_comparison(tmp_path: Path) -> None:
    """It has the verdict of its first step, also after a rollback, and compares no other."""
    run = RunDir(tmp_path)
    steps(run).compare_and_record_step_if_due(0)
    resumed = divided(run, first_step=3)
    parity = resumed.engine.record.parity
    assert parity is not None
    assert (parity.verdict, resumed.end_step) == ("passed", 0)
    compared = ReferencePass(BATCH, None, is_compared=True)
    assert divided(run, reference_pass=compared).end_step == 0
