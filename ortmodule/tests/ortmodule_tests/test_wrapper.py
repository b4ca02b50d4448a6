"""ORTModule in third-party loops: attributes, Hugging Face's Trainer, and accelerate."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortmodule import ORTModule, Settings
from ortmodule._internal.pass_counters import PassAndGraphCounters
from ortmodule_tests.modules import Layers, same
from ortmodule_tests.ort import needs_ort

pytestmark = [
    needs_ort,
    pytest.mark.usefixtures("built", "seeded"),
    pytest.mark.filterwarnings("ignore"),
]
# A generator of its own, so that the seed of a test does not matter.
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def bert() -> Any:
    """Return a small classifier without dropout."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**sizes, **dropouts, intermediate_size=64)
    )


def test_a_pretrained_models_wrapper_is_of_its_class(tmp_path: Path) -> None:
    """A pretrained model's wrapper has its class, forward signature, config and keys."""
    model = bert()
    module = ORTModule(model)
    assert isinstance(module, type(model))
    assert "labels" in inspect.signature(module.__class__.forward).parameters
    module.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.architectures == ["BertForSequenceClassification"]
    assert again.state_dict().keys() == module.state_dict().keys() == model.state_dict().keys()
    twin = copy.deepcopy(module)
    assert isinstance(twin, type(model))
    assert type(twin) is type(module)
    # A model that cannot save itself keeps the wrapper's class.
    plain = ORTModule(Layers())
    assert plain.__class__ is type(plain)
    assert not isinstance(plain, Layers)


class Regression(ORTModule):
    """A user's subclass of ORTModule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, Settings(threads=1))

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)


def test_ortmodule_is_a_class() -> None:
    """isinstance works for ORTModule, subclasses, copies, pickles and models that save themselves."""
    from onnxruntime.training.ortmodule import ORTModule as Base

    expected = Layers()
    module = Regression(copy.deepcopy(expected))
    assert not isinstance(expected, ORTModule)
    assert isinstance(ORTModule(bert()), ORTModule)
    for one in (
        module,
        copy.copy(module),
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
    ):
        assert isinstance(one, Regression)
        assert isinstance(one, ORTModule)
        assert isinstance(one, Base)
        assert type(one) is type(module)
        torch.testing.assert_close(one.double(X), 2 * expected(X))
    # The class made with ORT's base can itself be called.
    assert type(type(module)(Layers())) is type(module)
    assert type(module).__name__ == "Regression"


def assigned(module: Any, model: nn.Module) -> torch.Tensor:
    """Return a pass after the model's weights were replaced."""
    module(X)
    module.load_state_dict(
        # Other values than the model's, so that a pass with the old weights is noticed.
        {name: value * 1.5 for name, value in model.state_dict().items()},
        assign=True,
    )
    return module(X)


def called_with(module: Any, model: nn.Module) -> torch.Tensor:
    """Return a pass with tensors that are computed from the weights."""
    weights = {name: value * 1.5 for name, value in module.named_parameters()}
    return torch.func.functional_call(module, weights, (X,))


@pytest.mark.parametrize("loss_of", [assigned, called_with])
def test_weights_from_elsewhere_are_those_of_the_pass(
    loss_of: Any, witness: PassAndGraphCounters
) -> None:
    """`load_state_dict(assign=True)` and `functional_call` give eager's loss and gradients."""
    eager = Layers()
    ours = Layers()
    ours.load_state_dict(eager.state_dict())
    # In eager PyTorch module and model are the same object.
    for module, model in ((eager, eager), (ORTModule(ours), ours)):
        loss_of(module, model).backward()
    same(ours, eager)
    assert witness.backward_passes == 1


def with_trainer(wrap: Any, folder: Path) -> dict[str, Any]:
    """Run at most 20 steps of Trainer with evaluation, best model and early stopping."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    # Labels are random with regard to the inputs, so the evaluation loss soon rises.
    draw = torch.Generator().manual_seed(1)
    model = bert()
    samples = [
        {"input_ids": torch.randint(99, (16,), generator=draw), "labels": i % 2} for i in range(60)
    ]
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=20, learning_rate=3e-3, logging_steps=1, eval_strategy="steps", eval_steps=2,
        save_steps=2, save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    stopping = transformers.EarlyStoppingCallback(3)
    trainer = transformers.Trainer(
        wrap(model),
        arguments,
        train_dataset=samples[:40],
        eval_dataset=samples[40:],
        callbacks=[stopping],
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    return {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "evaluated": [
            line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line
        ],
        "steps": (trainer.state.best_global_step, trainer.state.global_step),
        "files": sorted(os.listdir(best)),
        "weight": model.classifier.weight.detach().clone(),
        "reloaded": type(model).from_pretrained(best).classifier.weight.detach(),
    }


@pytest.mark.slow
@pytest.mark.ci
def test_trainer_evaluates_keeps_the_best_and_stops_early(
    tmp_path: Path, witness: PassAndGraphCounters
) -> None:
    """Losses, evaluations, steps, best weights and the files of a checkpoint equal eager's."""
    eager = with_trainer(lambda model: model, tmp_path / "eager")
    ours = with_trainer(ORTModule, tmp_path / "ours")
    assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert ours["evaluated"] == pytest.approx(eager["evaluated"], rel=1e-5)
    assert (ours["steps"], ours["files"]) == (eager["steps"], eager["files"])
    assert "config.json" in ours["files"]
    torch.testing.assert_close(ours["weight"], eager["weight"])
    assert torch.equal(ours["reloaded"], ours["weight"])
    # Below 20: early stopping has ended the run.
    assert witness.backward_passes == ours["steps"][1] < 20


def with_accelerate(wrap: Any, folder: Path) -> dict[str, Any]:
    """Run 20 passes in steps of two, then 6 passes twice from the same saved state."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 1))
    # The optimizer steps at every second pass.
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    x = torch.randn(26 * 8, 8)
    batches = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8
    )
    model = wrap(net)
    # A list, so that passes can be repeated on the same batches.
    batches = list(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)

    def passes(first: int, end: int) -> list[float]:
        losses = []
        for x, y in batches[first:end]:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                # Only in the passes in which the optimizer steps.
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses = passes(0, 20)
    accelerator.save_state(str(folder))
    losses += passes(20, 26)
    accelerator.load_state(str(folder))
    # From the saved state the same passes give the same losses.
    assert passes(20, 26) == losses[20:]
    unwrapped = accelerator.unwrap_model(model)
    return {
        "losses": losses,
        "keys": list(accelerator.get_state_dict(model)),
        "model": unwrapped,
        "net": net,
    }


def test_accelerate_accumulates_clips_and_goes_on(tmp_path: Path) -> None:
    """Losses and keys equal eager's, also after load_checkpoint_state, and the inner module is the model."""
    eager = with_accelerate(lambda net: net, tmp_path / "eager")
    ours = with_accelerate(ORTModule, tmp_path / "ours")
    assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert ours["keys"] == eager["keys"]
    assert ours["model"].module is ours["net"]
