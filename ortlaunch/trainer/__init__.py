"""Hugging Face's Trainer with the model in ORTModule: a drop-in for Optimum's ORTTrainer.

See docs/optimum.md. The package depends on transformers and ortlaunch.ortmodule, not on recipes.
"""

from __future__ import annotations

from ortlaunch.trainer.arguments import ORTSeq2SeqTrainingArguments, ORTTrainingArguments
from ortlaunch.trainer.trainer import ORTSeq2SeqTrainer, ORTTrainer

__all__ = [
    "ORTSeq2SeqTrainer",
    "ORTSeq2SeqTrainingArguments",
    "ORTTrainer",
    "ORTTrainingArguments",
]
