"""`ortlaunch evaluate`: a checkpoint's weights on the evaluation corpus; nothing is trained or saved."""

from __future__ import annotations

import math
from dataclasses import fields

from ortlaunch.run.folder import write_json
from ortlaunch.run.records import Evaluation, as_json
from ortlaunch.worker import checkpoint
from ortlaunch.worker.evaluation import count, evaluate, f1_macro
from ortlaunch.worker.session import Session
from ortlaunch.worker.summary import plan_lines

_WITH_LOGITS = ("pretraining", "masked-lm", "sequence-classification")


def run(session: Session) -> None:
    """Measure, write evaluation.json, print it."""
    found, samples, group = session.checkpoint, session.data.evaluation, session.group
    assert found is not None, "the control side gives a checkpoint"
    assert samples is not None, "the control side has looked for data.evaluation"
    if group.rank == 0:
        print(*plan_lines(session.engine.report()), *session.engine.notes, sep="\n", flush=True)
    checkpoint.load(found.folder, session.engine.stepper.named_state(), group)
    with session.progress.during("evaluating"):
        loss = evaluate(session, samples)
        assert loss is not None, "nobody was asked to stop"
        counts = count(session, samples) if session.recipe.model.task in _WITH_LOGITS else {}
    if group.rank == 0:
        measured = Evaluation(found.step, len(samples), loss, **_measures(session, loss, counts))
        write_json(session.run.evaluation, as_json(measured))
        write_json(session.run.engine, session.engine.report().to_json())
        print(*_table(measured), f"written to {session.run.evaluation}", sep="\n", flush=True)


def _measures(session: Session, loss: float, counts: dict[str, list[float]]) -> dict[str, float]:
    """By the names of `Evaluation`."""
    found = {}
    if session.recipe.model.task == "causal-lm" and session.engine.loss_weight.by == "labels":
        found["perplexity"] = _exp(loss)
    if "words" in counts:
        right, words, lost = counts["words"]
        found |= {"perplexity": _exp(lost / words), "masked_word_accuracy": right / words} if words else {}
    if "pairs" in counts:
        found["next_sentence_accuracy"] = counts["pairs"][0] / counts["pairs"][1]
    if "meant" in counts:
        found["classification_accuracy"] = sum(counts["right"]) / sum(counts["meant"])
        found["f1_macro"] = f1_macro(counts["right"], counts["given"], counts["meant"])
    return found


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _table(measured: Evaluation) -> list[str]:
    rows = [(each.name.replace("_", " "), getattr(measured, each.name)) for each in fields(measured)]
    return [f"  {name:24}{value:>14,.6g}" for name, value in rows if value is not None]
