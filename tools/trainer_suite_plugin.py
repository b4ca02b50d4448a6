"""A pytest plugin of trainer_suite.py: ORTTrainer in the place of transformers' Trainer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import transformers

from ortmodule import trainer
from ortmodule.trainer.trainer import ORTTrainer

NAMES = ("Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments")
# The modules from which tests import the classes. transformers loads them on demand.
MODULES = ("", ".trainer", ".trainer_seq2seq", ".training_args", ".training_args_seq2seq")
ran: Counter[str] = Counter()


def pytest_configure() -> None:
    """Replace the classes, and count the trainings and the passes that ONNX Runtime runs."""
    originals = {name: getattr(transformers, name) for name in NAMES}
    modules = [__import__(f"transformers{name}", fromlist=["_"]) for name in MODULES]
    for name, original in originals.items():
        for module in modules:
            if getattr(module, name, None) is original:
                setattr(module, name, getattr(trainer, f"ORT{name}"))
    own = ORTTrainer.train

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran["trainings"] += 1
        output = own(self, *args, **kwargs)
        passes = (self.report().get("onnxruntime") or {}).get("forward_passes", 0)
        ran["completed by ONNX Runtime"] += bool(passes)
        ran["forward passes by ONNX Runtime"] += passes
        return output

    setattr(ORTTrainer, "train", train)  # noqa: B010  # a method


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the counts, without which the results prove nothing."""
    terminalreporter.write_line(f"ORTTrainer: {dict(ran)}")
