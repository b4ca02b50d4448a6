"""`ortlaunch device`: train with the artifacts of `ortlaunch export --format ondevice`, without
PyTorch's engines."""

from pathlib import Path
from typing import Annotated

import typer

from ortlaunch.base.errors import InputError
from ortlaunch.cli.hints import Verb, Verbs
from ortlaunch.cli.options import Overrides
from ortlaunch.cli.runs.status import RunFolder
from ortlaunch.tables.tasks import DeviceRequest

app = typer.Typer(
    cls=Verbs,
    help="Train on a device, and average devices' weights; return them to the run.",
    no_args_is_help=True,
)

Artifacts = Annotated[
    Path,
    typer.Argument(
        metavar="ARTIFACTS",
        help="Folder that `ortlaunch export --format ondevice` wrote.",
        show_default=False,
    ),
]
CheckpointFile = Annotated[
    Path | None,
    typer.Option("--checkpoint", help="Initial weights; the artifacts' own checkpoint by default."),
]
To = Annotated[
    Path | None,
    typer.Option(
        "--to",
        help="File for the result, new or a checkpoint; by default the artifacts' own "
        "checkpoint is updated.",
    ),
]


@app.command(cls=Verb, short_help="Train a checkpoint on data.train.")
def train(
    artifacts: Artifacts,
    overrides: Overrides = None,
    checkpoint: CheckpointFile = None,
    to: To = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Steps to train; up to train.max_steps by default."),
    ] = None,
) -> None:
    """Train a checkpoint on data.train, by ONNX Runtime alone; it continues after its last step."""
    from ortlaunch.api import device

    request = DeviceRequest("train", str(artifacts), _path_text(checkpoint), _path_text(to), steps)
    raise typer.Exit(device.run_device_verb_in_process(request, tuple(overrides or ())))


@app.command(cls=Verb, short_help="Measure a checkpoint on data.evaluation.")
def evaluate(
    artifacts: Artifacts, overrides: Overrides = None, checkpoint: CheckpointFile = None
) -> None:
    """Measure a checkpoint on data.evaluation, as `ortlaunch evaluate` does.

    The result is in ARTIFACTS/evaluation.json.
    """
    from ortlaunch.api import device

    request = DeviceRequest("evaluate", str(artifacts), _path_text(checkpoint))
    raise typer.Exit(device.run_device_verb_in_process(request, tuple(overrides or ())))


@app.command(cls=Verb, short_help="Write a checkpoint as model.onnx.")
def export(
    artifacts: Artifacts,
    to: Annotated[Path, typer.Option("--to", help="A new folder.", show_default=False)],
    checkpoint: CheckpointFile = None,
) -> None:
    """Write a checkpoint as model.onnx for onnxruntime, compared with the evaluation graph."""
    from ortlaunch.api import device

    raise typer.Exit(
        device.export_for_device(
            DeviceRequest("export", str(artifacts), _path_text(checkpoint), str(to))
        )
    )


@app.command("import", cls=Verb, short_help="Return a checkpoint to its run.")
def import_checkpoint(
    artifacts: Artifacts,
    run: RunFolder,
    to: Annotated[Path, typer.Option("--to", help="A new folder.", show_default=False)],
    checkpoint: CheckpointFile = None,
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, help="Checkpoint of the run; the newest by default."),
    ] = None,
) -> None:
    """Write a device's or an average's weights as a checkpoint and an export of the run.

    `ortlaunch train --resume FOLDER` continues from it, on any engine.
    """
    from ortlaunch.api import device

    raise typer.Exit(device.import_device_checkpoint_into_run(artifacts, checkpoint, run, step, to))


@app.command(cls=Verb, short_help="Average the weights of clients' checkpoints.")
def average(
    artifacts: Artifacts,
    checkpoints: Annotated[
        list[Path], typer.Argument(metavar="CHECKPOINT", help="Of each client.", show_default=False)
    ],
    to: To = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            metavar="W,W,...",
            help="Weight of each client; its number of trained samples by default.",
        ),
    ] = None,
) -> None:
    """Average the weights of clients' checkpoints, each by its samples: federated averaging."""
    from ortlaunch.api import device

    # The weights are parsed after Typer, for its lists are separate arguments, not W,W,...
    request = DeviceRequest(
        "average", str(artifacts), to=_path_text(to), checkpoints=tuple(map(str, checkpoints))
    )
    raise typer.Exit(
        device.average_client_checkpoints(request._replace(weights=_parse_weights(weights)))
    )


def _path_text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _parse_weights(weights_text: str | None) -> tuple[float, ...] | None:
    try:
        return None if weights_text is None else tuple(map(float, weights_text.split(",")))
    except ValueError:
        raise InputError(f"--weights: got {weights_text!r}; give numbers, as 100,250,80") from None
