"""Hugging Face's Trainer with the model in ORTModule: a drop-in for Optimum's ORTTrainer.

See docs/optimum.md. It needs the extra `transformers`.
"""

from __future__ import annotations

from ortmodule.trainer.arguments import ORTSeq2SeqTrainingArguments, ORTTrainingArguments
from ortmodule.trainer.trainer import ORTSeq2SeqTrainer, ORTTrainer

__all__ = [
    "ORTSeq2SeqTrainer",
    "ORTSeq2SeqTrainingArguments",
    "ORTTrainer",
    "ORTTrainingArguments",
]
