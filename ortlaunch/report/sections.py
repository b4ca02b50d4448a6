"""Values of the report's sections, which page.html draws. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

import yaml
from markupsafe import Markup

from ortlaunch.evaluation_metrics import METRICS
from ortlaunch.json_types import Json
from ortlaunch.recipe.text.place import leaves
from ortlaunch.report.curves import Curve, chart
from ortlaunch.report.records import Record, command, number
from ortlaunch.report.tables import Fact, cards, cell, facts, warning
from ortlaunch.run_folder import cause_text
from ortlaunch.run_folder.profile_record import profile_lines
from ortlaunch.units import clock_duration, count_with_noun, human_bytes

# (title, name in metrics.jsonl, whether the axis begins at 0), in the order of the page.
_CURVES = (
    ("Loss", "loss", False),
    ("Learning rate", "learning_rate", True),
    ("Tokens per second", "tokens_per_second", True),
    ("Samples per second", "samples_per_second", True),
    ("Gradient norm", "gradient_norm", True),
    ("Model FLOPs utilization", "mfu", True),
)
# Classes up to which the table has a column for each predicted one.
_MOST_COLUMNS = 12
# Values in metrics.jsonl that are not drawn. All others are, including those of a user's own model.
_NO_CURVES = (
    "padding_share",
    "step",
    "samples",
    "epoch",
    "skipped_steps",
    "left_out_steps",
    "elapsed_seconds",
)
# Parts of memory.json in the order of the table.
_PARTS = ("weights", "gradients", "optimizer", "activations", "buckets", "other", "model", "peak")


def content(records: Sequence[Record]) -> Json:
    """Return all values that page.html uses."""
    return {
        "records": records,
        "several": len(records) > 1,
        "failures": [(one, *_failure(one)) for one in records if _has_failed(one)],
        "overview": facts(records, _OVERVIEW),
        "charts": _curves(records),
        "classes": cards(records, _classes),
        "engine": facts(records, _ENGINE),
        "profiles": cards(
            records, lambda one: "\n".join(profile_lines(one.profile)) if one.profile else None
        ),
        "memories": cards(records, _memory),
        "saves": cards(records, _checkpoints),
        "attempts": cards(records, _starts),
        "differences": _differences(records),
        "recipes": [
            (one, yaml.safe_dump(one.recipe, sort_keys=False, width=110)) for one in records
        ],
    }


def _state(one: Record) -> str:
    code = (
        "" if one.status.job.exit_status is None else f", exit status {one.status.job.exit_status}"
    )
    took = (
        ""
        if one.status.seconds is None
        else f", {clock_duration(one.status.seconds)} since its last start"
    )
    # Another host's processes cannot be checked: the state is the last recorded one.
    sure = "" if one.status.certain else " (as recorded last; its host is another)"
    return f"{one.status.state_name}{code}{took}{sure}"


def _end(one: Record) -> str | None:
    """Return the text of an end that is neither a success nor a failure with a known cause."""
    is_known = _has_failed(one) or one.status.state.value == "succeeded"
    return None if is_known else one.status.job.verdict


def _has_failed(one: Record) -> bool:
    # A pruned trial is a result of its sweep: there is nothing to mend, or to continue.
    return one.status.job.failure is not None and one.status.state_name != "pruned"


def _failure(one: Record) -> tuple[str, tuple[str, ...]]:
    """Return the cause of a failed run, and what to try."""
    failure = one.status.job.failure
    assert failure is not None
    return cause_text.diagnosis_verdict(failure), cause_text.advice_for_failure(failure)


def _evaluation(one: Record) -> dict[str, object]:
    """Return the last evaluation's metrics."""
    last: Json = next((line for line in reversed(one.lines) if "evaluation_loss" in line), {})
    return {
        name.removeprefix("evaluation_"): value
        for name, value in last.items()
        if name.startswith("evaluation_")
    }


def _newest(one: Record, name: str) -> object:
    return next((line[name] for line in reversed(one.lines) if line.get(name) is not None), None)


def _median(one: Record, name: str) -> float | None:
    """Return the median of a value over the logged lines.

    The first line, which includes compilation and exports, is left out where there are others.
    """
    values = [value for line in one.logged if (value := number(line.get(name))) is not None]
    return statistics.median(values[1:] or values) if values else None


def _time(seconds: Any) -> str | None:
    return clock_duration(seconds) if seconds else None


def _ranks(one: Record) -> str | None:
    if one.status.ranks is None or one.status.hosts is None:
        return None
    return f"{count_with_noun(one.status.ranks, 'rank')} on {count_with_noun(one.status.hosts, 'host')}"


def _of(one: int | None, whole: int | None) -> str | None:
    if one is None or whole is None:
        return None if one is None else f"{one:,}"
    return f"{one:,} of {whole:,}"


def _curves(records: Sequence[Record]) -> list[dict[str, object]]:
    # A dict instead of a set: it keeps the order of first appearance.
    known = dict.fromkeys(name for record in records for line in record.lines for name in line)
    shown = (*_NO_CURVES, "evaluation_loss", *(name for _, name, _ in _CURVES))
    more = [
        (name.capitalize().replace("_", " "), name, False) for name in known if name not in shown
    ]
    is_clipped = any((one.recipe.get("train") or {}).get("max_grad_norm") for one in records)
    drawn = []
    # The evaluation's metrics come after the loss, before the rates.
    for title, name, from_zero in (_CURVES[0], *more, *_CURVES[1:]):
        curves = _values(records, name)
        if name == "loss":
            curves += _values(records, "evaluation_loss", part="evaluation")
        clipping = " before clipping" if name == "gradient_norm" and is_clipped else ""
        metric = METRICS.get(name.removeprefix("evaluation_"))
        drawn.append(
            chart(title + clipping, curves, from_zero, metric is not None and metric.is_share)
        )
    return [each for each in drawn if each is not None]


def _values(records: Sequence[Record], name: str, part: str = "") -> list[Curve]:
    return [
        Curve(
            one.label,
            at,
            [
                (line["step"], number(line[name]))
                for line in one.lines
                if name in line and isinstance(line["step"], int)
            ],
            one.starts,
            part,
        )
        for at, one in enumerate(records)
    ]


def _requested(choice: Any, why: str) -> str | None:
    """Return the choice in use; if it replaces the requested one, also that one and the reason."""
    if not choice:
        return None
    return (
        f"{choice['used']} in place of {choice['asked']}: {choice[why]}"
        if choice.get(why)
        else str(choice["used"])
    )


def _precision(one: Record) -> str | None:
    """Return the precision of the passes, and that of float32 matmuls if it differs.

    Passes in bf16 or fp16 have no float32 matmuls to report.
    """
    passes = one.engine.get("precision")
    products = (one.engine.get("matmul_precision") or {}).get("format")
    return f"{passes}, matmul in {products}" if products and passes == "fp32" else passes


def _passes(one: Record) -> str | None:
    if not one.ort:
        return None
    names = ("forward", "backward", "evaluation")
    return ", ".join(f"{one.ort[f'{name}_passes']:,} {name}" for name in names)


def _fallbacks(one: Record) -> str | None:
    if "fallbacks" not in one.ort:
        return None
    return "\n".join([f"{one.ort['fallbacks']:,}", *one.ort.get("fallback_reasons", [])])


def _exports(one: Record) -> str | None:
    if "exports" not in one.ort:
        return None
    return (
        f"{one.ort['exports']}, including {one.ort['re_exports']} re-exports, in "
        f"{one.ort['export_seconds']:.1f} s"
    )


def _nodes(one: Record) -> str | None:
    graph = one.ort.get("training_graph")
    if not graph:
        return None
    inside = {"ATen": graph["aten"], "PythonOp": graph["python"], "Triton": graph["triton"]}
    said = [
        f"{name} {sum(calls.values())}: {', '.join(sorted(calls))}"
        for name, calls in inside.items()
        if calls
    ]
    both = f"{graph['forward_nodes']:,} forward, {graph.get('backward_nodes') or 0:,} backward"
    return "\n".join([both, *said])


def _torch(one: Record) -> str | None:
    calls = one.ort.get("torch_calls") or {}
    said = [
        f"{name}: {call['forward'] + call['backward']:,} calls, {call['seconds']:.2f} s"
        for name, call in calls.items()
    ]
    return (
        "\n".join([f"{one.ort.get('torch_share', 0):.1%} of the forward and backward time", *said])
        if said
        else None
    )


def _without(values: Any, *names: str) -> dict[str, object] | None:
    """Return a mapping without empty values and without `names`; None if nothing remains."""
    return {
        k: v for k, v in (values or {}).items() if v not in (None, [], {}) and k not in names
    } or None


def _folded(values: Any, noun: str) -> Markup | None:
    if not values:
        return None
    each = (
        [f"{name}: {why}" for name, why in values.items()] if isinstance(values, dict) else values
    )
    head = count_with_noun(len(each), noun)
    lines = "\n".join(map(str, each))
    # Markup.format escapes its arguments.
    return Markup("<details><summary>{}</summary>{}</details>").format(head, lines)


def _classes(one: Record) -> dict[str, object] | None:
    """Return a row for each class: scores, and samples by predicted class if they are few."""
    if not one.confusion:
        return None
    names, counts = one.confusion["classes"], one.confusion["counts"]
    columns = names if len(names) <= _MOST_COLUMNS else []
    rows = []
    for class_number, (name, row) in enumerate(zip(names, counts)):
        right, samples = row[class_number], sum(row)
        predicted = sum(each[class_number] for each in counts)
        # Precision, recall and their harmonic mean.
        wholes = (predicted, samples, (samples + predicted) / 2)
        rows.append({
            "name": name, "number": class_number, "samples": samples,
            "scores": [right / whole if whole else None for whole in wholes],
            "counts": row if columns else [],
        })  # fmt: skip
    note = "The last columns count the samples by predicted class." if columns else ""
    return {"rows": rows, "predicted": columns, "note": f"Of the last evaluation. {note}"}


def _memory(one: Record) -> dict[str, object] | None:
    measured = one.memory.get("measured")
    # A run without a plan still has measured values.
    planned = one.memory.get("planned") or {}
    if not measured:
        return None
    peaks = ", ".join(human_bytes(size) for size in one.memory.get("peak_by_rank", []))
    return {
        "rows": [
            (p, (planned.get(p), measured.get(p))) for p in _PARTS if p in measured or p in planned
        ],
        # The length of bars is relative to the largest; 1 avoids a division by 0.
        "most": max([*measured.values(), *planned.values(), 1]),
        "said": f"The peak is {one.memory.get('peak_is', 'not described')}. By rank: {peaks}.",
    }


def _checkpoints(one: Record) -> dict[str, object] | None:
    said = {line.get("step") for line in one.saves}
    found = {
        "saves": [_save(line, one.kept) for line in one.saves]
        + [(step, "kept", None) for step in one.kept if step not in said],
        "evaluated": [_evaluated(each) for each in one.evaluations],
        "exported": [
            (each.get("step"), each.get("format"), _exported(each)) for each in one.exports
        ],
    }
    return found if any(found.values()) else None


def _exported(line: Json) -> object:
    return warning(line["error"]) if line.get("error") else line.get("folder")


def _save(line: Json, kept: Sequence[int]) -> tuple[object, ...]:
    state = "kept" if line.get("step") in kept else "removed"
    return (
        line.get("step"),
        warning(line["error"]) if line.get("error") else state,
        line.get("seconds"),
    )


def _values_of(lines: Sequence[Json], *names: str) -> list[list[object]]:
    return [[line.get(name) for name in names] for line in lines]


def _evaluated(found: dict[str, object]) -> str:
    said = ", ".join(
        f"{name.replace('_', ' ')} {cell(value)}" for name, value in found.items() if name != "step"
    )
    return f"step {found.get('step')}: {said}"


def _starts(one: Record) -> dict[str, object]:
    attempts = one.status.job.attempts
    return {
        "commands": [(line.get("time"), command(line)) for line in one.commands],
        "attempts": [
            (a.number, a.resumed, a.step, round(a.seconds, 1), a.verdict) for a in attempts
        ],
        "bad_steps": _values_of(one.bad_steps, "step", "kind", "action", "message"),
        "slow_ranks": "\n".join(map(json.dumps, one.slow_ranks)),
    }


def _differences(records: Sequence[Record]) -> list[tuple[str, list[object]]]:
    # Compare single settings instead of whole sections.
    flat = {record.label: dict(leaves(record.recipe)) for record in records}
    names = dict.fromkeys(name for each in flat.values() for name in each)
    # JSON text, because lists and mappings cannot be members of a set.
    differ = [name for name in names if len({_json(each.get(name)) for each in flat.values()}) > 1]

    def fact(name: str) -> Fact:
        return name, lambda one: _json(flat[one.label].get(name))

    return facts(records, map(fact, differ))


def _json(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


# The rows of the tables of facts: a name, and a function from a record to its value.
# They are at the end of the file, because they refer to the functions above.
_OVERVIEW: tuple[Fact, ...] = (
    ("state", _state),
    ("end", _end),
    ("started", lambda one: one.status.job.started.replace("T", " ")),
    ("steps", lambda one: _of(one.status.step, one.status.steps)),
    ("samples", lambda one: one.summary.get("samples") or _newest(one, "samples")),
    ("epochs", lambda one: number(one.summary.get("epochs") or _newest(one, "epoch"))),
    ("training loss", lambda one: _newest(one, "loss")),
    ("evaluation", _evaluation),
    ("seconds a step", lambda one: number(one.summary.get("step_seconds"))),
    ("predicted", lambda one: one.summary.get("predicted") or one.summary.get("not_predicted")),
    ("best evaluation", lambda one: one.summary.get("best")),
    ("stopped early", lambda one: one.summary.get("stopped_early")),
    ("tokens per second, median", lambda one: _median(one, "tokens_per_second")),
    ("samples per second, median", lambda one: _median(one, "samples_per_second")),
    (
        "training time, all starts",
        lambda one: _time(one.summary.get("training_seconds") or _newest(one, "elapsed_seconds")),
    ),
    (
        "time of the last start",
        lambda one: {k: f"{v:,.1f} s" for k, v in one.summary.get("seconds", {}).items()},
    ),
    ("ranks", _ranks),
    ("export", lambda one: str(one.run.export) if one.run.export.exists() else None),
    ("cannot be read", lambda one: Markup().join(map(warning, one.unreadable)) or None),
)
_ENGINE: tuple[Fact, ...] = (
    ("engine", lambda one: _requested(one.engine.get("engine"), "fallback_reason")),
    ("chosen by measurement", lambda one: (one.engine.get("engine") or {}).get("why")),
    ("device", lambda one: one.engine.get("device")),
    ("precision", _precision),
    ("optimizer", lambda one: _requested(one.engine.get("optimizer"), "why")),
    ("sharding", lambda one: one.engine.get("sharding")),
    ("threads of a rank", lambda one: one.engine.get("threads_per_rank")),
    (
        "trained parameters",
        lambda one: _of(one.engine.get("trained_parameters"), one.engine.get("parameters")),
    ),
    ("forward and backward passes by ONNX Runtime", _passes),
    ("forward and backward passes that fell back to PyTorch", _fallbacks),
    ("exports", _exports),
    ("nodes of a training step", _nodes),
    ("torch inside the graph", _torch),
    ("torch.compile", lambda one: one.engine.get("inductor")),
    ("compared with plain PyTorch", lambda one: _without(one.engine.get("parity"), "worst")),
    ("output layer and loss in chunks", lambda one: _without(one.engine.get("chunked_loss"))),
    ("attention", lambda one: one.engine.get("attention")),
    ("gradient checkpointing", lambda one: one.engine.get("gradient_checkpointing")),
    ("gradient norm", lambda one: _without(one.engine.get("fp16_optimizer"))),
    ("pretrained weights", lambda one: _without(one.engine.get("pretrained"))),
    ("unused parameters", lambda one: one.engine.get("unused_parameters")),
    ("settings of engine ort", lambda one: one.ort.get("settings")),
    ("ORTModule's variables", lambda one: one.ort.get("variables")),
    ("notes", lambda one: one.ort.get("notes")),
    ("repairs of ORTModule", lambda one: _folded(one.ort.get("repairs"), "repair")),
    ("repairs not applied", lambda one: _folded(one.ort.get("repairs_not_applied"), "repair")),
    ("versions", lambda one: one.engine.get("versions")),
    (
        "machine",
        lambda one: _without(
            {k: one.environment.get(k) for k in ("host", "platform", "cores", "python")}
        ),
    ),
)
