"""The README.md of a shared model: task, data, results and recipe, from the run's own records.

The metadata is made with huggingface_hub's classes. In the recipe, values of secret keys are
replaced by "(not shown)".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ortlaunch.evaluation_metrics import METRICS
from ortlaunch.json_types import Json
from ortlaunch.recipe import Recipe, read_resolved
from ortlaunch.recipe.fields.data import Corpus, HeldOut
from ortlaunch.recipe.text.place import without_secrets
from ortlaunch.recipe.text.yaml_text import dump
from ortlaunch.run_folder.folder import RunDir, read_own_json
from ortlaunch.run_folder.lines import read_json_lines
from ortlaunch.units import count_with_noun


def model_card(run: RunDir, step: int, repo: str, folder: Path) -> ModelCard:
    """Return the model card of a checkpoint's export.

    Args:
        run: the folder of the run.
        step: the step of the checkpoint.
        repo: the repository's id on the hub.
        folder: the folder of the export.
    """
    recipe = read_resolved(run.recipe)
    engine = read_own_json(run.engine) if run.engine.exists() else {}
    # Later metrics belong to other weights than this checkpoint's.
    lines = [line for line in read_json_lines(run.metrics, "step").values if line["step"] <= step]
    metadata = _metadata(recipe, engine, lines, repo, _library(folder))
    text = "\n\n".join(_parts(recipe, engine, lines, repo, step))
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}\n")


def _metadata(
    recipe: Recipe, engine: Json, lines: list[Json], repo: str, library: str | None
) -> ModelCardData:
    used = [f"engine:{engine['engine']['used']}"] if engine else []
    return ModelCardData(
        base_model=_of_hub(recipe.model.pretrained),
        datasets=sorted(
            {
                source.name
                for _, source in recipe.data.sources()
                if isinstance(source, Corpus) and source.format == "hub" and source.name
            }
        )
        or None,
        library_name=library,
        pipeline_tag=recipe.model.traits.pipeline or None,
        tags=["ortlaunch", *(["lora"] if library == "peft" else []), *used],
        model_name=repo.rpartition("/")[2],
        eval_results=_results(recipe, lines),
    )


def _library(folder: Path) -> str | None:
    """Return the library that loads the export, judged by its files; None for a custom model."""
    # Check ONNX first, because an ONNX export has a config.json too.
    if any(folder.glob("*.onnx")):
        return "onnx"
    if (folder / "adapter_config.json").exists():
        return "peft"
    return "transformers" if (folder / "config.json").exists() else None


def _of_hub(name: str | None) -> str | None:
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


def _results(recipe: Recipe, lines: list[dict[str, object]]) -> list[EvalResult] | None:
    """Return the results of the last evaluation in `lines`.

    None if there is none, or if the hub's format cannot hold its results.
    """
    last = next((line for line in reversed(lines) if "evaluation_loss" in line), None)
    # The hub's format of results requires a task type and a data set.
    if last is None or recipe.data.evaluation is None or not recipe.model.traits.pipeline:
        return None
    held = recipe.data.evaluation
    about = "a part of data.train" if isinstance(held, HeldOut) else _about(held)
    names = {
        name.removeprefix("evaluation_"): value
        for name, value in last.items()
        if name.startswith("evaluation_")
    }
    hub = {name: metric.hub for name, metric in METRICS.items()}
    return [
        EvalResult(
            task_type=recipe.model.traits.pipeline, dataset_type=about.replace(",", " ").split()[0], dataset_name=about,
            metric_type=hub.get(name) or name, metric_name=name.replace("_", " "), metric_value=value,
        )
        for name, value in names.items()
    ]  # fmt: skip


def _about(source: str | Corpus) -> str:
    """Return a corpus's name: a built-in or hub name, a factory, or file names without folders."""
    if isinstance(source, str):
        return source
    if source.format == "hub":
        return f"{source.name}" + (f" ({source.subset})" if source.subset else "")
    if source.format == "custom":
        return f"{source.factory}"
    return ", ".join(Path(path).name for path in source.path or ())


def _parts(recipe: Recipe, engine: Json, lines: list[Json], repo: str, step: int) -> Iterator[str]:
    base = f", from {recipe.model.pretrained}" if recipe.model.pretrained else ""
    yield f"# {repo.rpartition('/')[2]}"
    yield f"Task {recipe.model.task}{base}, trained for {step:,} steps with ortlaunch."
    yield "## Data\n\n" + "\n".join(
        f"- `{key}`: {_about(source)}" for key, source in recipe.data.sources()
    )
    last: Json = {}
    # Keep the newest value of each metric, because not every line has all of them.
    for line in lines:
        last.update({name: value for name, value in line.items() if value is not None})
    yield "## Results\n\n" + _table(last)
    if engine:
        yield "## Engine\n\n" + "\n".join(_engine(engine))
    yield "## Recipe\n\n" + _fenced(
        dump(without_secrets(recipe.model_dump(mode="json", exclude_defaults=True))), "yaml"
    )


def _engine(engine: Json) -> Iterator[str]:
    chosen = engine["engine"]
    optimizer = engine["optimizer"]
    yield f"- engine: {chosen['used']}" + (
        f" (asked: {chosen['asked']})" if chosen["asked"] != chosen["used"] else ""
    )
    # ONNX Runtime counts the passes of its own module, of which a run that fell back has none.
    if engine.get("onnxruntime") and not chosen.get("fallback_reason"):
        yield (
            "- forward and backward passes that fell back to PyTorch: "
            f"{engine['onnxruntime']['fallbacks']}"
        )
    ranks = count_with_noun(engine["ranks"], "rank")
    yield f"- {engine['precision']} on {engine['device']}, {ranks}, sharding: {engine['sharding']}"
    yield f"- optimizer: {optimizer['used']}"
    yield f"- parameters: {engine['trained_parameters']:,} trained of {engine['parameters']:,}"
    yield "- versions: " + ", ".join(
        f"{name} {version}" for name, version in engine["versions"].items()
    )


def _table(values: dict[str, object]) -> str:
    said = {
        name: f"{value:.6g}" if isinstance(value, float) else value
        for name, value in values.items()
    }
    rows = [f"| {name.replace('_', ' ')} | {value} |" for name, value in said.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _fenced(text: str, language: str) -> str:
    """Put the text in a Markdown fence.

    The fence is longer than any run of backticks in the text.
    """
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}{fence}"
