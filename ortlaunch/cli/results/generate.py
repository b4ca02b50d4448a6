"""`ortlaunch generate`: continue a prompt by a trained causal model."""

from pathlib import Path
from typing import Annotated

import typer

from ortlaunch.cli.options import CheckpointStepOption, exit_with_status_of_process
from ortlaunch.cli.runs.status import resolve_run_folder_and_print_if_by_name


def generate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|MODEL",
            help="Run folder or name, or a folder of a transformers model.",
            show_default=False,
            callback=resolve_run_folder_and_print_if_by_name,
        ),
    ],
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="Text to continue.", show_default=False)
    ],
    step: CheckpointStepOption = None,
    tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Maximum number of new tokens.")
    ] = 50,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", min=0.0, help="Sampling temperature; 0: always the most likely token."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed of the sampling.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Use the prompt as it is, without the chat template.")
    ] = False,
) -> None:
    """Continue a prompt with a causal model, on the CPU; prints the prompt and the continuation.

    If the run was trained on chats, or a model outside a run has a chat template, the template
    formats the prompt as a user's message, and the answer is printed on lines of its own.
    """
    from ortlaunch.api.generate import GenerationRequest, generate_text_in_process

    request = GenerationRequest(str(model), prompt, step, tokens, temperature, seed, raw)
    with exit_with_status_of_process():
        typer.echo(generate_text_in_process(request, shows_progress=True))
