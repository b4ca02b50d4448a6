"""The trained model in the form that others read: transformers' folder, or safetensors for the user's own model."""

from __future__ import annotations

from typing import Any

import torch

from ortlaunch.rundir import RunDir
from ortlaunch.worker.distributed import Group
from ortlaunch.worker.stepping import Stepper


def export(run: RunDir, group: Group, stepper: Stepper, model: torch.nn.Module, tokenizer: Any) -> None:
    """Write export/ (collective): weights, config and tokenizer."""
    with stepper.whole_weights():
        if group.rank == 0:
            run.export.mkdir(parents=True, exist_ok=True)
            if hasattr(model, "save_pretrained"):
                from transformers.utils import logging

                logging.disable_progress_bar()
                model.save_pretrained(run.export)
            else:
                from safetensors.torch import save_model

                save_model(model, str(run.export / "model.safetensors"))
            if tokenizer is not None:
                tokenizer.save_pretrained(run.export)
    group.barrier()
