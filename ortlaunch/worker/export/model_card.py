"""The README.md of a shared model: task, data, results and recipe, from the run's own records.

The metadata is made with huggingface_hub's classes. In the recipe, values of secret keys are
replaced by "(not shown)".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ortlaunch.base.json_types import Json
from ortlaunch.base.units import count_with_noun
from ortlaunch.recipe import Recipe, read_resolved_recipe_of_run
from ortlaunch.recipe.fields.data import Corpus, HeldOut
from ortlaunch.recipe.text.source_location import values_with_hidden_secrets
from ortlaunch.recipe.text.yaml_text import dump_yaml
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged
from ortlaunch.run_folder.lines import read_json_lines_with_keys
from ortlaunch.tables.metrics import METRICS


def build_model_card(
    run: RunDir, checkpoint_step: int, repository: str, export_folder: Path
) -> ModelCard:
    """Return the model card of a checkpoint's export.

    Args:
        run: the folder of the run.
        checkpoint_step: the step of the checkpoint.
        repository: the repository's id on the hub.
        export_folder: the folder of the export.
    """
    recipe = read_resolved_recipe_of_run(run.recipe)
    engine = read_json_or_raise_damaged(run.engine) if run.engine.exists() else {}
    # Later metrics belong to other weights than this checkpoint's.
    lines = [
        line
        for line in read_json_lines_with_keys(run.metrics, "step").values
        if line["step"] <= checkpoint_step
    ]
    metadata = _card_metadata(
        recipe, engine, lines, repository, _loading_library_or_none(export_folder)
    )
    text = "\n\n".join(_card_sections(recipe, engine, lines, repository, checkpoint_step))
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}\n")


def _card_metadata(
    recipe: Recipe,
    engine: Json,
    metrics_lines: list[dict[str, object]],
    repository: str,
    library: str | None,
) -> ModelCardData:
    used = [f"engine:{engine['engine']['used']}"] if engine else []
    if recipe.model.traits.compares and library == "transformers":
        library = "sentence-transformers"
    return ModelCardData(
        base_model=_hub_id_or_none(recipe.model.pretrained),
        datasets=sorted(
            {
                source.name
                for _, source in recipe.data.key_and_source_pairs()
                if isinstance(source, Corpus) and source.format == "hub" and source.name
            }
        )
        or None,
        library_name=library,
        pipeline_tag=recipe.model.traits.pipeline or None,
        tags=["ortlaunch", *(["lora"] if library == "peft" else []), *used],
        model_name=repository.rpartition("/")[2],
        eval_results=_last_evaluation_results_or_none(recipe, metrics_lines),
    )


def _loading_library_or_none(export_folder: Path) -> str | None:
    """Return the library that loads the export, judged by its files; None for a custom model."""
    # Check ONNX first, because an ONNX export has a config.json too.
    if any(export_folder.glob("*.onnx")):
        return "onnx"
    if (export_folder / "adapter_config.json").exists():
        return "peft"
    return "transformers" if (export_folder / "config.json").exists() else None


def _hub_id_or_none(name: str | None) -> str | None:
    """Return the name if it is a hub id, else None.

    Readers of the card have no local folder of yours.
    """
    # A hub id is NAME or OWNER/NAME.
    return (
        name.partition("@")[0]
        if name
        and not Path(name).exists()
        and name.count("/") <= 1
        and not name.startswith((".", "/", "~"))
        else None
    )


def _last_evaluation_results_or_none(
    recipe: Recipe, metrics_lines: list[dict[str, object]]
) -> list[EvalResult] | None:
    """Return the results of the last evaluation in `metrics_lines`.

    None if there is none, or if the hub's format cannot hold its results.
    """
    last = next((line for line in reversed(metrics_lines) if "evaluation_loss" in line), None)
    # The hub's format of results requires a task type and a data set.
    if last is None or recipe.data.evaluation is None or not recipe.model.traits.pipeline:
        return None
    evaluation_source = recipe.data.evaluation
    source_name = (
        "a part of data.train"
        if isinstance(evaluation_source, HeldOut)
        else _public_source_name(evaluation_source)
    )
    names = {
        name.removeprefix("evaluation_"): value
        for name, value in last.items()
        if name.startswith("evaluation_")
    }
    hub = {name: metric.hub for name, metric in METRICS.items()}
    return [
        EvalResult(
            task_type=recipe.model.traits.pipeline,
            dataset_type=source_name.replace(",", " ").split()[0],
            dataset_name=source_name,
            metric_type=hub.get(name) or name,
            metric_name=name.replace("_", " "),
            metric_value=value,
        )
        for name, value in names.items()
    ]


def _public_source_name(source: str | Corpus) -> str:
    """Return a corpus's name: a built-in or hub name, a factory, or file names without folders."""
    if isinstance(source, str):
        return source
    if source.format == "hub":
        return f"{source.name}" + (f" ({source.subset})" if source.subset else "")
    if source.format == "custom":
        return f"{source.factory}"
    return ", ".join(Path(path).name for path in source.path or ())


def _card_sections(
    recipe: Recipe,
    engine: Json,
    metrics_lines: list[dict[str, object]],
    repository: str,
    checkpoint_step: int,
) -> Iterator[str]:
    base = f", from {recipe.model.pretrained}" if recipe.model.pretrained else ""
    yield f"# {repository.rpartition('/')[2]}"
    yield f"Task {recipe.model.task}{base}, trained for {checkpoint_step:,} steps with ortlaunch."
    yield "## Data\n\n" + "\n".join(
        f"- `{key}`: {_public_source_name(source)}"
        for key, source in recipe.data.key_and_source_pairs()
    )
    last: dict[str, object] = {}
    # Keep the newest value of each metric, because not every line has all of them.
    for line in metrics_lines:
        last.update({name: value for name, value in line.items() if value is not None})
    yield "## Results\n\n" + _markdown_metrics_table(last)
    if engine:
        yield "## Engine\n\n" + "\n".join(_engine_markdown_lines(engine))
    yield "## Recipe\n\n" + _text_in_markdown_fence(
        dump_yaml(
            values_with_hidden_secrets(recipe.model_dump(mode="json", exclude_defaults=True))
        ),
        "yaml",
    )


def _engine_markdown_lines(engine_record: Json) -> Iterator[str]:
    engine_choice = engine_record["engine"]
    optimizer = engine_record["optimizer"]
    yield f"- engine: {engine_choice['used']}" + (
        f" (asked: {engine_choice['asked']})"
        if engine_choice["asked"] != engine_choice["used"]
        else ""
    )
    # ONNX Runtime counts the passes of its own module, of which a run that fell back has none.
    if engine_record.get("onnxruntime") and not engine_choice.get("fallback_reason"):
        yield (
            "- forward and backward passes that fell back to PyTorch: "
            f"{engine_record['onnxruntime']['fallbacks']}"
        )
    ranks = count_with_noun(engine_record["ranks"], "rank")
    yield f"- {engine_record['precision']} on {engine_record['device']}, {ranks}, sharding: {engine_record['sharding']}"
    yield f"- optimizer: {optimizer['used']}"
    yield f"- parameters: {engine_record['trained_parameters']:,} trained of {engine_record['parameters']:,}"
    yield "- versions: " + ", ".join(
        f"{name} {version}" for name, version in engine_record["versions"].items()
    )


def _markdown_metrics_table(value_by_metric: dict[str, object]) -> str:
    shown_values = {
        name: f"{value:.6g}" if isinstance(value, float) else value
        for name, value in value_by_metric.items()
    }
    rows = [f"| {name.replace('_', ' ')} | {value} |" for name, value in shown_values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _text_in_markdown_fence(markdown_text: str, language: str) -> str:
    """Put the text in a Markdown fence.

    The fence is longer than any run of backticks in the text.
    """
    fence = "```"
    while fence in markdown_text:
        fence += "`"
    return f"{fence}{language}\n{markdown_text}{fence}"
