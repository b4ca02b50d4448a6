"""The parts of a report, from records to markup. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from ortlaunch.report.curves import Curve, chart
from ortlaunch.report.markup import Html, tag, together
from ortlaunch.report.records import Record, command, leaves, number
from ortlaunch.report.tables import Fact, cards, facts, listing, told
from ortlaunch.units import counted, duration, human

Section = tuple[str, "Html | None"]
_ROWS = 12
_CURVES = (
    ("Training loss", "loss", False),
    ("Evaluation loss", "evaluation_loss", False),
    ("Learning rate", "learning_rate", True),
    ("Tokens per second", "tokens_per_second", True),
    ("Samples per second", "samples_per_second", True),
    ("Gradient norm before clipping", "gradient_norm", True),
    ("Model FLOPs utilization", "mfu", True),
)
# Of metrics.jsonl's lines, what is no curve; all others are, also those that a model of the user's own brings.
_NO_CURVES = ("step", "samples", "epoch", "skipped_steps", "left_out_steps", "elapsed_seconds")
_PARTS = ("weights", "gradients", "optimizer", "activations", "buckets", "other", "model", "peak")


def sections(records: Sequence[Record]) -> Iterator[Section]:
    """(heading, content) of each part, None where no run has anything of it."""
    several = len(records) > 1
    yield "How it went", facts(records, _overview())
    yield "Curves", _curves(records)
    yield "What ran on which engine", facts(records, _engine())
    yield "Memory of a rank", cards(((record, told(_memory, record)) for record in records), several)
    yield "Checkpoints", cards(((record, told(_checkpoints, record)) for record in records), several)
    yield "Starts and bad steps", cards(((record, told(_starts, record)) for record in records), several)
    yield "Where the recipes differ", _differences(records) if several else None
    yield "Recipes" if several else "Recipe", together(_recipe(record, several) for record in records)


def _overview() -> Iterator[tuple[str, Any]]:
    yield "state", _state
    yield "why it ended", lambda one: one.status.job.verdict
    yield "started", lambda one: one.status.job.started.replace("T", " ")
    yield "steps", lambda one: _of(one.status.step, one.status.steps)
    yield "samples", lambda one: one.summary.get("samples") or _newest(one, "samples")
    yield "epochs", lambda one: number(one.summary.get("epochs") or _newest(one, "epoch"))
    yield "training loss", lambda one: _newest(one, "loss")
    yield "evaluation", _evaluation
    yield "best evaluation", lambda one: one.summary.get("best")
    yield "stopped early", lambda one: one.summary.get("stopped_early")
    yield "tokens per second, median", lambda one: _median(one, "tokens_per_second")
    yield "samples per second, median", lambda one: _median(one, "samples_per_second")
    yield (
        "time of training, all starts",
        lambda one: _time(one.summary.get("training_seconds") or _newest(one, "elapsed_seconds")),
    )
    yield (
        "where the last start's time went",
        lambda one: {k: f"{v:,.1f} s" for k, v in one.summary.get("seconds", {}).items()},
    )
    yield "ranks", _ranks
    yield "export", lambda one: str(one.run.export) if one.run.export.exists() else None
    yield "cannot be read", lambda one: [tag("span", each + "\n", class_="warn") for each in one.unreadable] or None


def _state(one: Record) -> str:
    code = "" if one.status.job.exit_status is None else f", exit status {one.status.job.exit_status}"
    took = "" if one.status.seconds is None else f", {duration(one.status.seconds)} since its last start"
    sure = "" if one.status.certain else " (as recorded last; its host is another)"
    return f"{one.status.state.value}{code}{took}{sure}"


def _evaluation(one: Record) -> dict[str, Any]:
    """The last evaluation's metrics."""
    last: dict[str, Any] = next((line for line in reversed(one.lines) if "evaluation_loss" in line), {})
    return {name.removeprefix("evaluation_"): value for name, value in last.items() if name.startswith("evaluation_")}


def _newest(one: Record, name: str) -> Any:
    return next((line[name] for line in reversed(one.lines) if line.get(name) is not None), None)


def _median(one: Record, name: str) -> float | None:
    """Without the first logged line, which has compilation and exports in it, where there are more."""
    values = [value for line in one.logged if (value := number(line.get(name))) is not None]
    return statistics.median(values[1:] or values) if values else None


def _time(seconds: Any) -> str | None:
    return duration(seconds) if seconds else None


def _ranks(one: Record) -> str | None:
    if one.status.ranks is None or one.status.hosts is None:
        return None
    return f"{counted(one.status.ranks, 'rank')} on {counted(one.status.hosts, 'host')}"


def _of(one: int | None, whole: int | None, between: str = "of") -> str | None:
    if one is None or whole is None:
        return None if one is None else f"{one:,}"
    return f"{one:,} {between} {whole:,}"


def _curves(records: Sequence[Record]) -> Html | None:
    known = dict.fromkeys(name for record in records for line in record.lines for name in line)
    others = [name for name in known if name not in (*_NO_CURVES, *(each for _, each, _ in _CURVES))]
    more = [(name.capitalize().replace("_", " "), name, False) for name in others]
    drawn = (chart(title, _values(records, name), zero) for title, name, zero in (*_CURVES, *more))
    found = [each for each in drawn if each is not None]
    return tag("div", *found, class_="grid") if found else None


def _values(records: Sequence[Record], name: str) -> list[Curve]:
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
        )
        for at, one in enumerate(records)
    ]


def _engine() -> Iterator[tuple[str, Any]]:
    yield "engine", lambda one: _asked(one.engine.get("engine"), "fallback_reason")
    yield "chosen by measurement", lambda one: (one.engine.get("engine") or {}).get("why")
    yield "device", lambda one: one.engine.get("device")
    yield "precision", _precision
    yield "optimizer", lambda one: _asked(one.engine.get("optimizer"), "why")
    yield "sharding", lambda one: one.engine.get("sharding")
    yield "threads of a rank", lambda one: one.engine.get("threads_per_rank")
    yield (
        "parameters",
        lambda one: _of(one.engine.get("trained_parameters"), one.engine.get("parameters"), "trained of"),
    )
    yield "passes by ONNX Runtime", _passes
    yield "passes that fell back to PyTorch", _fallbacks
    yield "exports", _exports
    yield "nodes of a training step", _nodes
    yield "torch inside the graph", _torch
    yield "torch.compile", lambda one: one.engine.get("inductor")
    yield "held against plain PyTorch", lambda one: _without(one.engine.get("parity"), "worst")
    yield "head and loss in chunks", lambda one: _without(one.engine.get("chunked_loss"))
    yield "attention", lambda one: one.engine.get("attention")
    yield "gradient checkpointing", lambda one: one.engine.get("gradient_checkpointing")
    yield "gradient norm", lambda one: _without(one.engine.get("fp16_optimizer"))
    yield "pretrained weights", lambda one: _without(one.engine.get("pretrained"))
    yield "unused parameters", lambda one: one.engine.get("unused_parameters")
    yield "settings of engine ort", lambda one: one.ort.get("settings")
    yield "ORTModule's variables", lambda one: one.ort.get("variables")
    yield "notes", lambda one: one.ort.get("notes")
    yield "repairs of ORTModule", lambda one: _folded(one.ort.get("repairs"), "repair")
    yield "repairs not applied", lambda one: _folded(one.ort.get("repairs_not_applied"), "repair")
    yield "versions", lambda one: one.engine.get("versions")
    yield "machine", lambda one: _without({k: one.environment.get(k) for k in ("host", "platform", "cores", "python")})


def _asked(choice: Any, why: str) -> str | None:
    """What runs; where it stands in for something else, for what and why."""
    if not choice:
        return None
    return f"{choice['used']} in place of {choice['asked']}: {choice[why]}" if choice.get(why) else str(choice["used"])


def _precision(one: Record) -> str | None:
    """Of the passes; products of float32 matrices may be of another, which says nothing of passes in bf16 or fp16."""
    passes, products = one.engine.get("precision"), (one.engine.get("matmul_precision") or {}).get("format")
    return f"{passes}, matrix products in {products}" if products and passes == "fp32" else passes


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
    return f"{one.ort['exports']}, {one.ort['re_exports']} of them again, in {one.ort['export_seconds']:.1f} s"


def _nodes(one: Record) -> str | None:
    graph = one.ort.get("training_graph")
    if not graph:
        return None
    inside = {"ATen": graph["aten"], "PythonOp": graph["python"], "Triton": graph["triton"]}
    said = [f"{name} {sum(calls.values())}: {', '.join(sorted(calls))}" for name, calls in inside.items() if calls]
    both = f"{graph['forward_nodes']:,} forward, {graph.get('backward_nodes') or 0:,} backward"
    return "\n".join([both, *said])


def _torch(one: Record) -> str | None:
    calls = one.ort.get("torch_calls") or {}
    said = [
        f"{name}: {call['forward'] + call['backward']:,} calls, {call['seconds']:.2f} s" for name, call in calls.items()
    ]
    return "\n".join([f"{one.ort.get('torch_share', 0):.1%} of the time of the passes", *said]) if said else None


def _without(values: Any, *names: str) -> dict[str, Any] | None:
    """A mapping without what is absent in it."""
    return {k: v for k, v in (values or {}).items() if v not in (None, [], {}) and k not in names} or None


def _folded(values: Any, noun: str) -> Html | None:
    if not values:
        return None
    each = [f"{name}: {why}" for name, why in values.items()] if isinstance(values, dict) else values
    return tag("details", tag("summary", counted(len(each), noun)), "\n".join(map(str, each)))


def _memory(one: Record) -> Html | None:
    measured, planned = one.memory.get("measured"), one.memory.get("planned") or {}
    if not measured:
        return None
    most = max([*measured.values(), *planned.values(), 1])
    rows = [
        (part, _size(planned.get(part), most), _size(measured.get(part), most))
        for part in _PARTS
        if part in measured or part in planned
    ]
    peaks = ", ".join(human(size) for size in one.memory.get("peak_by_rank", []))
    said = f"The peak is {one.memory.get('peak_is', 'not described')}. By rank: {peaks}."
    return together([listing(("part", "planned", "measured"), rows), tag("p", said, class_="soft")])


def _size(size: int | None, most: int) -> Html | None:
    if size is None:
        return None
    bar = tag("div", class_="bar", style=f"width:{100 * size / most:.1f}%") if size else None
    return together([tag("div", human(size)), bar])


def _checkpoints(one: Record) -> Html | None:
    said = {line.get("step") for line in one.saves}
    rows = [_save(line, one.kept) for line in one.saves] + [
        (step, "kept", None) for step in one.kept if step not in said
    ]
    pieces = [*_newest_rows(("step", "checkpoint", "seconds that training waited"), rows)] if rows else []
    if one.after_saves:
        rows = [(line.get("step"), line.get("status"), line.get("seconds")) for line in one.after_saves]
        pieces += [tag("h3", "Commands after them"), listing(("step", "exit status", "seconds"), rows)]
    if one.evaluations:
        pieces += [tag("h3", "Evaluated"), *(_evaluated(each) for each in one.evaluations)]
    if one.exports:
        rows = [(line.get("step"), line.get("format"), line.get("folder")) for line in one.exports]
        pieces += [tag("h3", "Exported"), listing(("step", "format", "folder"), rows)]
    return together(pieces) if pieces else None


def _save(line: dict[str, Any], kept: Sequence[int]) -> tuple[object, ...]:
    if line.get("error"):
        return line.get("step"), tag("span", line["error"], class_="warn"), line.get("seconds")
    return (
        line.get("step"),
        "kept" if line.get("step") in kept else "taken away",
        line.get("seconds"),
    )


def _evaluated(found: dict[str, Any]) -> Html:
    said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items() if name != "step")
    return tag("p", f"step {found.get('step')}: {said}")


def _starts(one: Record) -> Html | None:
    pieces = [listing(("started", "command"), [(line.get("time"), command(line)) for line in one.commands])]
    if one.status.job.attempts:
        rows: list[tuple[object, ...]]
        rows = [(a.number, a.resumed, a.step, round(a.seconds, 1), a.cause) for a in one.status.job.attempts]
        head = ("attempt", "from step", "to step", "seconds", "how it failed")
        pieces += [tag("h3", "Starts of the ranks that failed"), *_newest_rows(head, rows)]
    if one.bad_steps:
        rows = [(line.get("step"), line.get("kind"), line.get("action"), line.get("message")) for line in one.bad_steps]
        pieces += [tag("h3", "Bad steps"), *_newest_rows(("step", "kind", "what followed", "what"), rows)]
    if one.slow_ranks:
        pieces += [tag("h3", "Slow ranks"), tag("pre", "\n".join(map(json.dumps, one.slow_ranks)))]
    return together(pieces)


def _newest_rows(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[Html]:
    """The newest as they are, those before them folded."""
    if len(rows) > _ROWS:
        yield tag("details", tag("summary", f"{len(rows) - _ROWS:,} before these"), listing(head, rows[:-_ROWS]))
    yield listing(head, rows[-_ROWS:])


def _differences(records: Sequence[Record]) -> Html:
    flat = {record.label: dict(leaves(record.recipe)) for record in records}
    names = dict.fromkeys(name for each in flat.values() for name in each)
    differ = [name for name in names if len({_json(each.get(name)) for each in flat.values()}) > 1]

    def fact(name: str) -> Fact:
        return name, lambda one: _json(flat[one.label].get(name))

    return facts(records, map(fact, differ)) or tag("p", "They do not.", class_="soft")


def _json(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _recipe(one: Record, name: bool) -> Html:
    body = tag("pre", yaml.safe_dump(one.recipe, sort_keys=False, width=110))
    return tag("details", tag("summary", f"{one.label}: every field" if name else "every field"), body)
