"""Values of the report's sections, which page.html draws. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

import yaml
from markupsafe import Markup

from ortlaunch.base.units import clock_duration, count_with_noun, human_bytes
from ortlaunch.recipe.text.source_location import path_and_leaf_value_pairs
from ortlaunch.report.charts import Curve, line_chart_or_none
from ortlaunch.report.records import (
    Record,
    finite_number_or_none,
    typed_command_with_hidden_secrets,
)
from ortlaunch.report.tables import (
    Fact,
    fact_rows_with_any_value,
    formatted_cell_value,
    values_of_runs_with_some_value,
    warning_markup,
)
from ortlaunch.run_folder.profile_record import profile_text_lines
from ortlaunch.tables.metrics import METRICS

# (title, name in metrics.jsonl, whether the axis begins at 0), in the order of the page.
_CHARTS = (
    ("Loss", "loss", False),
    ("Learning rate", "learning_rate", True),
    ("Tokens per second", "tokens_per_second", True),
    ("Samples per second", "samples_per_second", True),
    ("Gradient norm", "gradient_norm", True),
    ("Model FLOPs utilization", "mfu", True),
)
# Classes up to which the table has a column for each predicted one.
_MAX_COLUMNS = 12
# Values in metrics.jsonl that are not drawn. All others are, including those of a user's own model.
_FIELDS_WITHOUT_CHART = (
    "padding_share",
    "step",
    "samples",
    "epoch",
    "skipped_steps",
    "left_out_steps",
    "elapsed_seconds",
)
# Parts of memory.json in the order of the table.
_MEMORY_PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "buckets",
    "other",
    "model",
    "peak",
)


def report_page_values(run_records: Sequence[Record]) -> dict[str, Any]:
    """Return all values that page.html uses."""
    return {
        "records": run_records,
        "several": len(run_records) > 1,
        "failures": [
            (record, *_failure_and_advice(record)) for record in run_records if _has_failed(record)
        ],
        "overview": fact_rows_with_any_value(run_records, _OVERVIEW_FACTS),
        "charts": _charts_of_logged_metrics(run_records),
        "classes": values_of_runs_with_some_value(
            run_records, _class_score_and_confusion_table_or_none
        ),
        "engine": fact_rows_with_any_value(run_records, _ENGINE_FACTS),
        "profiles": values_of_runs_with_some_value(
            run_records,
            lambda record: (
                "\n".join(profile_text_lines(record.profile)) if record.profile else None
            ),
        ),
        "memories": values_of_runs_with_some_value(run_records, _planned_and_measured_memory_table),
        "saves": values_of_runs_with_some_value(
            run_records, _save_evaluation_and_export_rows_or_none
        ),
        "attempts": values_of_runs_with_some_value(
            run_records, _command_attempt_bad_step_and_slow_rank_rows
        ),
        "differences": _differing_recipe_field_rows(run_records),
        "recipes": [
            (record, yaml.safe_dump(record.recipe, sort_keys=False, width=110))
            for record in run_records
        ],
    }


def _state_and_duration_text(run_record: Record) -> str:
    exit_status_text = (
        ""
        if run_record.status.job.exit_status is None
        else f", exit status {run_record.status.job.exit_status}"
    )
    duration_text = (
        ""
        if run_record.status.seconds is None
        else f", {clock_duration(run_record.status.seconds)} since its last start"
    )
    # Another host's processes cannot be checked: the state is the last recorded one.
    doubt_text = "" if run_record.status.certain else " (as recorded last; its host is another)"
    return f"{run_record.status.state_name}{exit_status_text}{duration_text}{doubt_text}"


def _unexplained_end(record: Record) -> str | None:
    """Return the text of an end that is neither a success nor a failure with a known cause."""
    is_known = _has_failed(record) or record.status.state.value == "succeeded"
    return None if is_known else record.status.end_text()


def _has_failed(record: Record) -> bool:
    # A pruned trial is a result of its sweep: there is nothing to mend, or to continue.
    verdict = record.status.job.verdict
    return verdict is not None and verdict.is_failure and not record.status.is_pruned


def _failure_and_advice(record: Record) -> tuple[str, tuple[str, ...]]:
    """Return the cause of a failed run, and what to try."""
    verdict = record.status.job.verdict
    assert verdict is not None
    return verdict.explanation or verdict.message, verdict.advice


def _last_evaluation_metrics(run_record: Record) -> dict[str, object]:
    last_evaluation_line: dict[str, object] = next(
        (line for line in reversed(run_record.lines) if "evaluation_loss" in line), {}
    )
    return {
        name.removeprefix("evaluation_"): value
        for name, value in last_evaluation_line.items()
        if name.startswith("evaluation_")
    }


def _newest_value(record: Record, metric_name: str) -> Any:
    return next(
        (line[metric_name] for line in reversed(record.lines) if line.get(metric_name) is not None),
        None,
    )


def _median_value_after_first_line(run_record: Record, metric_name: str) -> float | None:
    """Return the median of a value over the logged lines.

    The first line, which includes compilation and exports, is left out where there are others.
    """
    values = [
        value
        for line in run_record.logged
        if (value := finite_number_or_none(line.get(metric_name))) is not None
    ]
    return statistics.median(values[1:] or values) if values else None


def _ranks_text(record: Record) -> str | None:
    if record.status.ranks is None or record.status.hosts is None:
        return None
    return f"{count_with_noun(record.status.ranks, 'rank')} on {count_with_noun(record.status.hosts, 'host')}"


def _count_of_total_text(count: int | None, total: int | None) -> str | None:
    if count is None or total is None:
        return None if count is None else f"{count:,}"
    return f"{count:,} of {total:,}"


def _charts_of_logged_metrics(run_records: Sequence[Record]) -> list[dict[str, object]]:
    # A dict instead of a set: it keeps the order of first appearance.
    logged_names = dict.fromkeys(
        name for record in run_records for line in record.lines for name in line
    )
    known_names = (*_FIELDS_WITHOUT_CHART, "evaluation_loss", *(name for _, name, _ in _CHARTS))
    further_charts = [
        (name.capitalize().replace("_", " "), name, False)
        for name in logged_names
        if name not in known_names
    ]
    is_clipped = any(
        (run_record.recipe.get("train") or {}).get("max_grad_norm") for run_record in run_records
    )
    charts = []
    # The evaluation's metrics come after the loss, before the rates.
    for title, name, begins_at_zero in (_CHARTS[0], *further_charts, *_CHARTS[1:]):
        curves = _curves_of_metric(run_records, name)
        if name == "loss":
            curves += _curves_of_metric(run_records, "evaluation_loss", part_name="evaluation")
        clipping_text = " before clipping" if name == "gradient_norm" and is_clipped else ""
        metric = METRICS.get(name.removeprefix("evaluation_"))
        charts.append(
            line_chart_or_none(
                title + clipping_text,
                curves,
                begins_at_zero,
                metric is not None and metric.is_share,
            )
        )
    return [drawn_chart for drawn_chart in charts if drawn_chart is not None]


def _curves_of_metric(
    run_records: Sequence[Record], metric_name: str, part_name: str = ""
) -> list[Curve]:
    return [
        Curve(
            record.label,
            record_index,
            [
                (line["step"], finite_number_or_none(line[metric_name]))
                for line in record.lines
                if metric_name in line and isinstance(line["step"], int)
            ],
            record.starts,
            part_name,
        )
        for record_index, record in enumerate(run_records)
    ]


def _used_choice_and_reason_text(choice_record: Any, reason_key: str) -> str | None:
    """Return the choice in use; if it replaces the requested one, also that one and the reason."""
    if not choice_record:
        return None
    return (
        f"{choice_record['used']} in place of {choice_record['asked']}: {choice_record[reason_key]}"
        if choice_record.get(reason_key)
        else str(choice_record["used"])
    )


def _pass_and_matmul_precision_text(run_record: Record) -> str | None:
    """Return the precision of the passes, and that of float32 matmuls if it differs.

    Passes in bf16 or fp16 have no float32 matmuls to report.
    """
    pass_precision = run_record.engine.get("precision")
    matmul_precision = (run_record.engine.get("matmul_precision") or {}).get("format")
    return (
        f"{pass_precision}, matmul in {matmul_precision}"
        if matmul_precision and pass_precision == "fp32"
        else pass_precision
    )


def _ort_pass_counts_text(record: Record) -> str | None:
    if not record.ort:
        return None
    counts = {name: record.ort[f"{name}_passes"] for name in ("forward", "backward", "evaluation")}
    # The ranks count at log lines and at the end: a run that failed earlier has no count.
    if not any(counts.values()) and not record.summary:
        return None
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _fallbacks_text(record: Record) -> str | None:
    if "fallbacks" not in record.ort:
        return None
    return "\n".join([f"{record.ort['fallbacks']:,}", *record.ort.get("fallback_reasons", [])])


def _onnx_exports_text(run_record: Record) -> str | None:
    if "exports" not in run_record.ort:
        return None
    return (
        f"{run_record.ort['exports']}, including {run_record.ort['re_exports']} re-exports, in "
        f"{run_record.ort['export_seconds']:.1f} s"
    )


def _forward_backward_and_torch_node_counts_text(run_record: Record) -> str | None:
    graph_record = run_record.ort.get("training_graph")
    if not graph_record:
        return None
    calls_by_operator = {
        "ATen": graph_record["aten"],
        "PythonOp": graph_record["python"],
        "Triton": graph_record["triton"],
    }
    operator_texts = [
        f"{name} {sum(calls.values())}: {', '.join(sorted(calls))}"
        for name, calls in calls_by_operator.items()
        if calls
    ]
    node_counts_text = (
        f"{graph_record['forward_nodes']:,} forward, "
        f"{graph_record.get('backward_nodes') or 0:,} backward"
    )
    return "\n".join([node_counts_text, *operator_texts])


def _torch_calls_text(run_record: Record) -> str | None:
    torch_calls = run_record.ort.get("torch_calls") or {}
    call_texts = [
        f"{name}: {call['forward'] + call['backward']:,} calls, {call['seconds']:.2f} s"
        for name, call in torch_calls.items()
    ]
    return (
        "\n".join(
            [
                f"{run_record.ort.get('torch_share', 0):.1%} of the forward and backward time",
                *call_texts,
            ]
        )
        if call_texts
        else None
    )


def _mapping_without_empty_values(values: Any, *left_out_names: str) -> dict[str, object] | None:
    """Return a mapping without empty values and without `left_out_names`; None if nothing remains."""
    return {
        key: value
        for key, value in (values or {}).items()
        if value not in (None, [], {}) and key not in left_out_names
    } or None


def _collapsible_list_markup(items_or_mapping: Any, noun: str) -> Markup | None:
    if not items_or_mapping:
        return None
    item_texts = (
        [f"{name}: {reason}" for name, reason in items_or_mapping.items()]
        if isinstance(items_or_mapping, dict)
        else items_or_mapping
    )
    summary_text = count_with_noun(len(item_texts), noun)
    list_text = "\n".join(map(str, item_texts))
    # Markup.format escapes its arguments.
    return Markup("<details><summary>{}</summary>{}</details>").format(summary_text, list_text)


def _class_score_and_confusion_table_or_none(run_record: Record) -> dict[str, object] | None:
    """Return a row for each class: scores, and samples by predicted class if they are few."""
    if not run_record.confusion:
        return None
    class_names, confusion_counts = run_record.confusion["classes"], run_record.confusion["counts"]
    are_label_sets = run_record.confusion.get("are_label_sets")
    # No single class is predicted in place of another where there are sets.
    shown_columns = class_names if len(class_names) <= _MAX_COLUMNS and not are_label_sets else []
    rows = []
    for class_number, (name, row) in enumerate(zip(class_names, confusion_counts)):
        correct_count, sample_count, predicted_count = (
            row
            if are_label_sets
            else (row[class_number], sum(row), sum(each[class_number] for each in confusion_counts))
        )
        # Precision, recall and their harmonic mean.
        denominators = (predicted_count, sample_count, (sample_count + predicted_count) / 2)
        rows.append({
            "name": name, "number": class_number, "samples": sample_count,
            "scores": [correct_count / denominator if denominator else None for denominator in denominators],
            "counts": row if shown_columns else [],
        })  # fmt: skip
    columns_note = "The last columns count the samples by predicted class." if shown_columns else ""
    return {
        "rows": rows,
        "predicted": shown_columns,
        "note": f"Of the last evaluation. {columns_note}",
    }


def _planned_and_measured_memory_table(run_record: Record) -> dict[str, object] | None:
    measured_bytes = run_record.memory.get("measured")
    # A run without a plan still has measured values.
    planned_bytes = run_record.memory.get("planned") or {}
    if not measured_bytes:
        return None
    peaks = ", ".join(human_bytes(size) for size in run_record.memory.get("peak_by_rank", []))
    return {
        "rows": [
            (part, (planned_bytes.get(part), measured_bytes.get(part)))
            for part in _MEMORY_PARTS
            if part in measured_bytes or part in planned_bytes
        ],
        # The length of bars is relative to the largest; 1 avoids a division by 0.
        "most": max([*measured_bytes.values(), *planned_bytes.values(), 1]),
        "said": f"The peak is {run_record.memory.get('peak_is', 'not described')}. By rank: {peaks}.",
    }


def _save_evaluation_and_export_rows_or_none(run_record: Record) -> dict[str, object] | None:
    saved_steps = {line.get("step") for line in run_record.saves}
    checkpoint_values = {
        "saves": [
            _save_step_state_and_seconds_row(line, run_record.kept) for line in run_record.saves
        ]
        + [(step, "kept", None) for step in run_record.kept if step not in saved_steps],
        "evaluated": [_evaluation_text(recorded) for recorded in run_record.evaluations],
        "exported": [
            (
                recorded.get("step"),
                recorded.get("format"),
                warning_markup(recorded["error"])
                if recorded.get("error")
                else recorded.get("folder"),
            )
            for recorded in run_record.exports
        ],
    }
    return checkpoint_values if any(checkpoint_values.values()) else None


def _save_step_state_and_seconds_row(
    save_record: dict[str, object], kept_steps: Sequence[int]
) -> tuple[object, ...]:
    state_text = "kept" if save_record.get("step") in kept_steps else "removed"
    return (
        save_record.get("step"),
        warning_markup(save_record["error"]) if save_record.get("error") else state_text,
        save_record.get("seconds"),
    )


def _evaluation_text(evaluation_record: dict[str, object]) -> str:
    metrics_text = ", ".join(
        f"{name.replace('_', ' ')} {formatted_cell_value(value)}"
        for name, value in evaluation_record.items()
        if name != "step"
    )
    return f"step {evaluation_record.get('step')}: {metrics_text}"


def _command_attempt_bad_step_and_slow_rank_rows(run_record: Record) -> dict[str, object]:
    return {
        "commands": [
            (line.get("time"), typed_command_with_hidden_secrets(line))
            for line in run_record.commands
        ],
        "attempts": [
            (
                attempt.number,
                attempt.resumed,
                attempt.step,
                round(attempt.seconds, 1),
                attempt.message,
            )
            for attempt in run_record.status.job.attempts
        ],
        "bad_steps": [
            [line.get(name) for name in ("step", "kind", "action", "message")]
            for line in run_record.bad_steps
        ],
        "slow_ranks": "\n".join(map(json.dumps, run_record.slow_ranks)),
    }


def _differing_recipe_field_rows(run_records: Sequence[Record]) -> list[tuple[str, list[object]]]:
    # Compare single settings instead of whole sections.
    leaves_by_run = {
        record.label: dict(path_and_leaf_value_pairs(record.recipe)) for record in run_records
    }
    names = dict.fromkeys(name for leaf_values in leaves_by_run.values() for name in leaf_values)
    # JSON text, because lists and mappings cannot be members of a set.
    differing_names = [
        name
        for name in names
        if len({_value_text(leaf_values.get(name)) for leaf_values in leaves_by_run.values()}) > 1
    ]

    def recipe_fact(leaf_name: str) -> Fact:
        return leaf_name, lambda record: _value_text(leaves_by_run[record.label].get(leaf_name))

    return fact_rows_with_any_value(run_records, map(recipe_fact, differing_names))


def _value_text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


# The rows of the tables of facts: a name, and a function from a record to its value.
# They are at the end of the file, because they refer to the functions above.
_OVERVIEW_FACTS: tuple[Fact, ...] = (
    ("state", _state_and_duration_text),
    ("end", _unexplained_end),
    ("started", lambda record: record.status.job.started.replace("T", " ")),
    ("steps", lambda record: _count_of_total_text(record.status.step, record.status.steps)),
    ("samples", lambda record: record.summary.get("samples") or _newest_value(record, "samples")),
    (
        "epochs",
        lambda record: finite_number_or_none(
            record.summary.get("epochs") or _newest_value(record, "epoch")
        ),
    ),
    ("training loss", lambda record: _newest_value(record, "loss")),
    ("evaluation", _last_evaluation_metrics),
    ("seconds a step", lambda record: finite_number_or_none(record.summary.get("step_seconds"))),
    (
        "predicted",
        lambda record: record.summary.get("predicted") or record.summary.get("not_predicted"),
    ),
    ("best evaluation", lambda record: record.summary.get("best")),
    ("stopped early", lambda record: record.summary.get("stopped_early")),
    (
        "tokens per second, median",
        lambda record: _median_value_after_first_line(record, "tokens_per_second"),
    ),
    (
        "samples per second, median",
        lambda record: _median_value_after_first_line(record, "samples_per_second"),
    ),
    (
        "training time, all starts",
        lambda record: (
            clock_duration(seconds)
            if (
                seconds := record.summary.get("training_seconds")
                or _newest_value(record, "elapsed_seconds")
            )
            else None
        ),
    ),
    (
        "time of the last start",
        lambda record: {k: f"{v:,.1f} s" for k, v in record.summary.get("seconds", {}).items()},
    ),
    ("ranks", _ranks_text),
    ("export", lambda record: str(record.run.export) if record.run.export.exists() else None),
    (
        "cannot be read",
        lambda record: Markup().join(map(warning_markup, record.unreadable)) or None,
    ),
)
_ENGINE_FACTS: tuple[Fact, ...] = (
    (
        "engine",
        lambda record: _used_choice_and_reason_text(record.engine.get("engine"), "fallback_reason"),
    ),
    ("chosen by measurement", lambda record: (record.engine.get("engine") or {}).get("why")),
    ("device", lambda record: record.engine.get("device")),
    ("precision", _pass_and_matmul_precision_text),
    (
        "optimizer",
        lambda record: _used_choice_and_reason_text(record.engine.get("optimizer"), "why"),
    ),
    ("sharding", lambda record: record.engine.get("sharding")),
    ("threads of a rank", lambda record: record.engine.get("threads_per_rank")),
    (
        "trained parameters",
        lambda record: _count_of_total_text(
            record.engine.get("trained_parameters"), record.engine.get("parameters")
        ),
    ),
    ("forward and backward passes by ONNX Runtime", _ort_pass_counts_text),
    ("forward and backward passes that fell back to PyTorch", _fallbacks_text),
    ("exports", _onnx_exports_text),
    ("nodes of a training step", _forward_backward_and_torch_node_counts_text),
    ("torch inside the graph", _torch_calls_text),
    ("torch.compile", lambda record: record.engine.get("inductor")),
    (
        "compared with plain PyTorch",
        lambda record: _mapping_without_empty_values(record.engine.get("parity"), "worst"),
    ),
    (
        "output layer and loss in chunks",
        lambda record: _mapping_without_empty_values(record.engine.get("chunked_loss")),
    ),
    ("attention", lambda record: record.engine.get("attention")),
    ("gradient checkpointing", lambda record: record.engine.get("gradient_checkpointing")),
    (
        "gradient norm",
        lambda record: _mapping_without_empty_values(record.engine.get("fp16_optimizer")),
    ),
    (
        "pretrained weights",
        lambda record: _mapping_without_empty_values(record.engine.get("pretrained")),
    ),
    ("quantized weights", lambda record: record.engine.get("quantized_weights")),
    ("packed documents", lambda record: record.engine.get("packed_documents")),
    ("unused parameters", lambda record: record.engine.get("unused_parameters")),
    ("settings of engine ort", lambda record: record.ort.get("settings")),
    ("ORTModule's variables", lambda record: record.ort.get("variables")),
    ("notes", lambda record: record.ort.get("notes")),
    (
        "repairs of ORTModule",
        lambda record: _collapsible_list_markup(record.ort.get("repairs"), "repair"),
    ),
    (
        "repairs not applied",
        lambda record: _collapsible_list_markup(record.ort.get("repairs_not_applied"), "repair"),
    ),
    ("versions", lambda record: record.engine.get("versions")),
    (
        "machine",
        lambda record: _mapping_without_empty_values(
            {k: record.environment.get(k) for k in ("host", "platform", "cores", "python")}
        ),
    ),
)
