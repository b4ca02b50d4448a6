"""A rank that trains with transformers' Trainer, then with ORTTrainer, in one group of ranks.

test_trainer_ranks.py starts it by torchrun. Arguments: a folder, and the ZeRO stage, "none" or "search".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from ortmodule import ORTModuleError
from ortmodule.trainer import ORTTrainer, ORTTrainingArguments
from ortmodule_tests.leaving import leave
from ortmodule_tests.trainer import tiny
from ortmodule_tests.trainer.tiny import (
    Result,
    arguments,
    assert_close,
    assert_same_search,
    made,
    trained,
)


def main(folder: Path, stage: str) -> None:
    """Train three times; raise AssertionError where the losses differ."""
    stock = run(Trainer, TrainingArguments, folder / "trainer", stage)
    ours = run(ORTTrainer, ORTTrainingArguments, folder / "ort", stage)
    assert len(ours.losses) == tiny.STEPS
    assert_close(ours.losses, stock.losses)
    assert_close(ours.evaluation, stock.evaluation)
    resumed = run(
        ORTTrainer, ORTTrainingArguments, folder / "again", stage, str(folder / "ort/checkpoint-10")
    )
    assert_close(resumed.losses, stock.losses)
    ours.trainer.save_model(str(folder / "saved"))
    if ours.trainer.is_world_process_zero():
        loaded = AutoModelForSequenceClassification.from_pretrained(folder / "saved")
        torch.testing.assert_close(loaded.state_dict(), tiny_state(ours), check_dtype=False)
        report = json.loads((folder / "ort/ort_report.json").read_text())
        assert (report["engine"], report["ranks"]) == ("ort", 2)
        sharding = "DistributedDataParallel" if stage == "none" else f"DeepSpeed ZeRO {stage}"
        assert report["sharding"] == sharding
        if stage != "none":
            assert report["fp16_optimizer"]["applied"]


def tiny_state(result: Result) -> dict[str, torch.Tensor]:
    """Return the state of the trained model."""
    return result.trainer.model.state_dict()


def run(
    kind: type[Trainer],
    args: type[TrainingArguments],
    folder: Path,
    stage: str,
    resume: str | None = None,
) -> Result:
    """Train one model."""
    config = None
    if stage != "none":
        import deepspeed

        # DeepSpeed would compile it on a CPU, for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        config = {
            "zero_optimization": {"stage": int(stage)},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
    given = arguments(args, folder, deepspeed=config, ddp_backend="gloo")
    return trained(made(kind, tiny.bert(), given), resume)


def refused(folder: Path) -> None:
    """ZeRO 3 is an error before the first step."""
    try:
        run(ORTTrainer, ORTTrainingArguments, folder, "3")
    except ORTModuleError as problem:
        assert "DeepSpeed ZeRO 3: use stage 1 or 2" in str(problem)  # noqa: PT017
    else:
        raise AssertionError("ZeRO 3 was not refused")


if __name__ == "__main__":
    if sys.argv[2] == "search":
        assert_same_search(Path(sys.argv[1]), ddp_backend="gloo")
    elif sys.argv[2] == "3":
        refused(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), sys.argv[2])
    leave()
