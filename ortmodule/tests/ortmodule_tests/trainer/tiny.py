"""Tiny models and samples, trained for 20 steps by transformers' Trainer or by ORTTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from ortmodule.trainer import ORTTrainer, ORTTrainingArguments

STEPS = 20
VOCABULARY = 99


def bert() -> nn.Module:
    """A classifier of two classes without dropout, whose random numbers would differ."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def llama() -> nn.Module:
    """A causal language model; Trainer passes it `num_items_in_batch`."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=64,
        )
    )


def t5() -> nn.Module:
    """An encoder with a decoder, for `generate`."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=1,
            num_heads=4,
            dropout_rate=0.0,
        )
    )
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 0
    return model


def samples(model: nn.Module, count: int) -> list[dict[str, torch.Tensor]]:
    """Return random samples for the model, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (count, 12), generator=generator)
    if isinstance(model, BertForSequenceClassification):
        return [{"input_ids": row, "labels": row[0] % 2} for row in ids]
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def arguments(kind: type[TrainingArguments], folder: Path, **others: Any) -> TrainingArguments:
    """Return the arguments of 20 steps with a loss of each, evaluation and checkpoints."""
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "save_steps": 10,
        "load_best_model_at_end": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "use_cpu": True,
        **others,
    }
    return kind(**given)


class Result(NamedTuple):
    """A trainer after `train`, with its losses."""

    trainer: Any
    losses: list[float]
    evaluation: list[float]


def trained(trainer: Trainer, resume: str | None = None) -> Result:
    """Train, and return the losses of the steps and of the evaluations."""
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    return Result(
        trainer,
        [entry["loss"] for entry in history if "loss" in entry],
        [entry["eval_loss"] for entry in history if "eval_loss" in entry],
    )


def made(kind: type[Trainer], model: nn.Module, args: TrainingArguments, **others: Any) -> Trainer:
    """Return a trainer of the class for the model and its samples."""
    return kind(
        model, args, train_dataset=samples(model, 40), eval_dataset=samples(model, 8), **others
    )


def searched(
    kind: type[Trainer], args: type[TrainingArguments], folder: Path, **others: Any
) -> Any:
    """Return transformers' best run of three trials over the learning rate, by Optuna."""
    optuna = pytest.importorskip("optuna")
    # Without a save: a checkpoint of each trial takes longer than its steps.
    short: dict[str, Any] = {"max_steps": 4, "eval_steps": 4, "save_strategy": "no"}
    model = bert()
    return kind(
        args=arguments(args, folder, **short, load_best_model_at_end=False, **others),
        model_init=bert,
        train_dataset=samples(model, 40),
        eval_dataset=samples(model, 8),
    ).hyperparameter_search(
        hp_space=lambda trial: {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)
        },
        backend="optuna",
        n_trials=3,
        direction="minimize",
        sampler=optuna.samplers.RandomSampler(seed=0),
    )


def assert_same_search(folder: Path, **others: Any) -> None:
    """Raise AssertionError if the search of ORTTrainer has another result than Trainer's."""
    stock = searched(Trainer, TrainingArguments, folder / "trainer", **others)
    ours = searched(ORTTrainer, ORTTrainingArguments, folder / "ort", **others)
    # Other ranks than 0 have no result.
    if stock is None:
        assert ours is None
        return
    assert (ours.run_id, ours.hyperparameters) == (stock.run_id, stock.hyperparameters)
    assert_close([ours.objective], [stock.objective])


def assert_close(ours: list[float], stock: list[float]) -> None:
    """Raise AssertionError if losses differ by more than 1e-5."""
    np.testing.assert_allclose(ours, stock, rtol=1e-5, atol=1e-6)
