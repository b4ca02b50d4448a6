"""`ortlaunch export`: write a checkpoint in a format that other programs read."""

from pathlib import Path
from typing import Annotated

import typer

from ortlaunch.cli.options import CheckpointStepOption, exit_with_status_of_process
from ortlaunch.cli.runs.status import RunFolder


def export(
    run: RunFolder,
    step: CheckpointStepOption = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="A new folder; RUN/exports/step_N by default.")
    ] = None,
    # Not called `format`, which is a builtin.
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="huggingface; onnx or ondevice (for training), both compared with PyTorch.",
        ),
    ] = "huggingface",
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="OWNER/NAME",
            help="Upload it to this model repository, with a model card.",
        ),
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(
            "--lora",
            metavar="merged|alone",
            help="Adapters; the recipe's model.lora.merge by default.",
        ),
    ] = None,
) -> None:
    """Write a checkpoint of a run as a model for other programs, in one process on the CPU.

    With --push it is uploaded to the Hugging Face hub (HF_ENDPOINT), with the token of HF_TOKEN or
    `hf auth login`; a new repository is private. An existing export of that step is uploaded
    unchanged.
    """
    from ortlaunch.api.runs import Run

    with exit_with_status_of_process():
        Run(run).export(form, step, to, push, lora, progress=True)
