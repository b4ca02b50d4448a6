"""`ortlaunch evaluate`: a checkpoint's weights on the evaluation corpus; nothing is trained or saved."""

from __future__ import annotations

from dataclasses import fields

from ortlaunch.run.folder import write_json
from ortlaunch.run.records import Evaluation, as_json
from ortlaunch.worker import checkpoint
from ortlaunch.worker.evaluation import evaluate
from ortlaunch.worker.session import Session
from ortlaunch.worker.summary import plan_lines

_FIELDS = [each.name for each in fields(Evaluation) if each.name != "own"]


def run(session: Session) -> None:
    """Measure, write evaluation.json, print it."""
    found, samples, group = session.checkpoint, session.data.evaluation, session.group
    assert found is not None, "the control side gives a checkpoint"
    assert samples is not None, "the control side has looked for data.evaluation"
    if group.rank == 0:
        print(*plan_lines(session.engine.report()), *session.engine.notes, sep="\n", flush=True)
    checkpoint.load(found.folder, session.engine.stepper.named_state(), group)
    with session.progress.during("evaluating"):
        found_metrics = evaluate(session, samples)
        assert found_metrics is not None, "nobody was asked to stop"
    if group.rank == 0:
        measured = record_of(found.step, len(samples), found_metrics)
        write_json(session.run.evaluation, as_json(measured))
        write_json(session.run.engine, session.engine.report().to_json())
        print(*table(measured), f"written to {session.run.evaluation}", sep="\n", flush=True)


def record_of(step: int | None, samples: int, found: dict[str, float]) -> Evaluation:
    """What was measured, numbers of the user's own apart."""
    known = {name: value for name, value in found.items() if name in _FIELDS}
    own = {name: value for name, value in found.items() if name not in _FIELDS}
    return Evaluation(step, samples, **known, own=own or None)


def table(measured: Evaluation) -> list[str]:
    """A line for each number that there is."""
    rows = [(name.replace("_", " "), getattr(measured, name)) for name in _FIELDS]
    rows += (measured.own or {}).items()
    return [f"  {name:24}{value:>14,.6g}" for name, value in rows if value is not None]
