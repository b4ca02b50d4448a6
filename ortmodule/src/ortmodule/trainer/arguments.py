"""transformers' TrainingArguments with the arguments of Optimum's last release with ORTTrainer.

The module owns the translation of these arguments into settings of ORTModule.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from transformers import Seq2SeqTrainingArguments, TrainingArguments

from ortmodule import Settings
from ortmodule._internal.errors import ORTModuleError

ADAMW_ORT_FUSED = "adamw_ort_fused"
# Optimum's default; transformers 5 has removed it.
_ADAMW_HF = "adamw_hf"
# Optimum's level -> Settings.log_level.
_LOG_LEVELS = {
    "VERBOSE": "verbose",
    "INFO": "info",
    "WARNING": "warning",
    "ERROR": "error",
    "FATAL": "error",
}


@dataclass
class ORTTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments, with Optimum's arguments and optimizer.

    Raises:
        ORTModuleError: an argument of Optimum has a wrong value.
    """

    optim: str = field(
        default=TrainingArguments.optim,
        metadata={
            "help": f"transformers' optimizers, or {ADAMW_ORT_FUSED}: ONNX Runtime's FusedAdam."
        },
    )
    use_module_with_loss: bool | None = field(
        default=False,
        metadata={"help": "Accepted: the model's own loss is always in ONNX Runtime's graph."},
    )
    loss_in_train: bool | None = field(
        default=None, metadata={"help": "The earlier name of use_module_with_loss."}
    )
    save_onnx: bool | None = field(
        default=False,
        metadata={
            "help": "Save the graphs in the folder onnx_prefix of output_dir, or of the environment "
            "variable ORTMODULE_SAVE_ONNX_PATH."
        },
    )
    onnx_prefix: str | None = field(
        default=None, metadata={"help": "The folder of save_onnx; by default onnx."}
    )
    onnx_log_level: str | None = field(
        default="ERROR", metadata={"help": f"ONNX Runtime's log level: {', '.join(_LOG_LEVELS)}."}
    )

    def __post_init__(self) -> None:
        requested_optimizer = str(getattr(self.optim, "value", self.optim))
        if requested_optimizer == _ADAMW_HF:
            warnings.warn(
                f"optim={_ADAMW_HF!r}: transformers has removed it; adamw_torch runs instead",
                stacklevel=3,
            )
            requested_optimizer = self.optim = "adamw_torch"
        if requested_optimizer == ADAMW_ORT_FUSED:
            # transformers checks the name against its own list.
            self.optim = "adamw_torch_fused"
        super().__post_init__()
        if requested_optimizer == ADAMW_ORT_FUSED:
            self.optim = ADAMW_ORT_FUSED
        if (self.onnx_log_level or "ERROR").upper() not in _LOG_LEVELS:
            raise ORTModuleError(
                f"onnx_log_level: got {self.onnx_log_level!r}; it must be one of "
                f"{', '.join(_LOG_LEVELS)}"
            )


@dataclass
class ORTSeq2SeqTrainingArguments(ORTTrainingArguments, Seq2SeqTrainingArguments):
    """transformers' Seq2SeqTrainingArguments, with Optimum's arguments and optimizer."""


def ortmodule_settings(args: TrainingArguments) -> Settings:
    """Return ORTModule's settings for arguments of ours or of transformers."""
    folder = None
    if getattr(args, "save_onnx", False):
        parent_folder = os.environ.get("ORTMODULE_SAVE_ONNX_PATH") or args.output_dir or "."
        folder = str(Path(parent_folder) / (getattr(args, "onnx_prefix", None) or "onnx"))
    log_level = _LOG_LEVELS[(getattr(args, "onnx_log_level", None) or "ERROR").upper()]
    return Settings(
        save_onnx=folder,
        log_level=log_level,  # type: ignore[arg-type]  # one of the literals
    )
