"""LightningModules by recipe: losses of Lightning's own Trainer, logged values, hooks, resume."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ortlaunch.base.errors import EngineError, InputError
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import read_json_or_raise_damaged
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.order import SampleOrder
from ortlaunch.worker.data.user_data import batch_in_original_form, collate_to_named_tensors
from ortlaunch.worker.engine.torch_scheduler import TorchScheduler
from tests.ort import needs_ort
from tests.training import records, run_here

lightning = pytest.importorskip("lightning", reason="needs lightning: pip install lightning")
toys = pytest.importorskip("tests.worker.lightning_modules")

pytestmark = pytest.mark.filterwarnings("ignore")
MODULES = "tests.worker.lightning_modules"
ENGINES = ["eager", pytest.param("ort", marks=needs_ort)]
# Of 32 samples: 4 steps are an epoch.
BATCH = {"global_size": 8, "micro_size": 8}


def made(module: str, samples: str, engine: str = "eager", /, **sections: Any) -> Recipe:
    """Return the recipe of a module of this folder."""
    factory = {"format": "custom", "factory": f"{MODULES}:{samples}"}
    whole = {
        "name": "made",
        "model": {"task": "lightning", "factory": f"{MODULES}:{module}"},
        "data": {"train": factory},
        "batch": BATCH,
        "optimizer": {"name": "configured", "learning_rate": 1.0},
        "engine": {"name": engine},
        "train": {"max_steps": 6},
        "log": {"every_steps": 1},
    }
    return Recipe.model_validate({**whole, **sections})


def evaluated(data: str, **more: Any) -> dict[str, Any]:
    """Return the section `data` with an evaluation on other samples."""
    factory = {"format": "custom", "factory": f"{MODULES}:{data}"}
    return {
        "train": factory,
        "evaluation": {**factory, "arguments": {"count": 12, "seed": 1}},
        **more,
    }


class InOurOrder:
    """A batch sampler with the order of a run: each iteration is the next epoch."""

    def __init__(self, samples: int, seed: int) -> None:
        self.order = SampleOrder(samples, seed)
        self.samples = samples
        self.epochs = 0

    def __len__(self) -> int:
        return self.samples // 8

    def __iter__(self) -> Iterator[list[int]]:
        first = self.epochs * self.samples
        self.epochs += 1
        for start in range(first, first + self.samples, 8):
            yield [
                at.sample_index for at in self.order.sample_epochs_at([*range(start, start + 8)])
            ]


@functools.cache
def by_lightning(model: str, data: str, validates: bool = False) -> tuple[list[float], Any]:
    """Train 6 steps by Lightning's own Trainer; return the losses and the module."""
    seed = made(model, data).seed
    torch.manual_seed(seed)
    module = getattr(toys, model)()
    samples = getattr(toys, data)()
    losses: list[float] = []

    class Losses(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))

    trainer = lightning.Trainer(
        max_steps=6, accelerator="cpu", logger=False, callbacks=[Losses()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    ordered: Any = InOurOrder(len(samples), seed)
    held_out = torch.utils.data.DataLoader(getattr(toys, data)(12, 1), batch_size=8)
    trainer.fit(
        module,
        torch.utils.data.DataLoader(samples, batch_sampler=ordered),
        held_out if validates else None,
    )
    return losses, module


@pytest.fixture(autouse=True)
def _group_of_a_failed_run() -> Iterator[None]:
    """Leave no process group behind: the process of a failed run ends with it."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("model", "data"),
    [
        pytest.param("BoringModel", "rows", marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param("demo", "rows", marks=[pytest.mark.slow, pytest.mark.ci]),
        ("transformer", "words"),
        ("Digits", "images"),
    ],
)
def test_losses_are_lightnings(tmp_path: Path, model: str, data: str, engine: str) -> None:
    """Lightning's demos have the losses, and at the end the weights, of Lightning's Trainer."""
    run = run_here(tmp_path / "run", made(model, data, engine))
    theirs, module = by_lightning(model, data)
    ours = [line["loss"] for line in records(run)]
    assert len(ours) == len(theirs) == 6
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert read_json_or_raise_damaged(run.engine)["engine"]["used"] == engine
    weights = load_file(run.export / "model.safetensors")
    assert set(weights) == set(module.state_dict())
    for name, value in module.state_dict().items():
        # Adam divides by the size of gradients that are almost 0.
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=5e-4)


@pytest.mark.slow
def test_inductor_compiles_once(tmp_path: Path) -> None:
    """The index of a pass does not make torch.compile compile again."""
    run = run_here(tmp_path / "run", made("Digits", "images", "inductor"))
    theirs, _ = by_lightning("Digits", "images")
    assert [line["loss"] for line in records(run)] == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert read_json_or_raise_damaged(run.engine)["inductor"]["graphs"] == 1


def test_a_state_between_passes_is_lightnings(tmp_path: Path) -> None:
    """On eager a module may keep a state from one pass to the next."""
    run = run_here(tmp_path / "run", made("lstm", "words"))
    theirs, _ = by_lightning("lstm", "words")
    assert [line["loss"] for line in records(run)] == pytest.approx(theirs, rel=1e-5)


def test_logged_values_hooks_and_evaluation(tmp_path: Path) -> None:
    """Logged values are metrics; hooks come at their steps; an evaluation is validation_step's."""
    batch = {"global_size": 8, "micro_size": 4}
    train = {"max_steps": 6, "evaluate_every_steps": 4}
    recipe = made("Digits", "images", batch=batch, data=evaluated("images"), train=train)
    toys.CALLED.clear()
    run = run_here(tmp_path / "run", recipe)
    lines = records(run)
    steps = [line for line in lines if "loss" in line]
    assert [line["doubled"] for line in steps] == pytest.approx([2 * x["loss"] for x in steps])
    assert all(0 <= line["train_accuracy"] <= 1 for line in steps)
    first, last = [line for line in lines if "evaluation_loss" in line]
    assert (first["evaluation_checked"], last["evaluation_checked"]) == (4, 6)
    assert last["evaluation_val_loss"] == last["evaluation_loss"]
    validated = ["validation 0", "validation 1", "validation 2"]
    assert ["start 0 0", "end 0 4", *validated, "start 1 4", *validated] == toys.CALLED
    # Lightning averages over samples, too.
    _, module = by_lightning("Digits", "images", validates=True)
    scores = module.trainer.callback_metrics
    assert last["evaluation_val_accuracy"] == pytest.approx(float(scores["val_accuracy"]))
    run_here(run.path, recipe, "evaluate")
    assert read_json_or_raise_damaged(run.evaluation)["own"]["val_loss"] == pytest.approx(
        last["evaluation_val_loss"]
    )


@pytest.mark.parametrize(
    ("model", "engine"),
    [("demo", "eager"), pytest.param("BoringModel", "ort", marks=needs_ort)],
)
def test_a_resume_repeats_rates_and_losses(tmp_path: Path, model: str, engine: str) -> None:
    """Rates, losses and weights after a resume are those of a run without a stop."""
    whole = run_here(tmp_path / "whole", made(model, "rows", engine, train={"max_steps": 10}))
    parts = run_here(tmp_path / "parts", made(model, "rows", engine, train={"max_steps": 5}))
    run_here(parts.path, made(model, "rows", engine, train={"max_steps": 10}))
    of_both = [
        [(line["step"], line["loss"], line["learning_rate"]) for line in records(run)]
        for run in (whole, parts)
    ]
    assert of_both[0] == of_both[1]
    # The scheduler of BoringModel steps at the end of an epoch.
    rates = [0.1] * 4 + [0.01] * 4 + [0.001] * 2 if model == "BoringModel" else [0.02] * 10
    assert [rate for _, _, rate in of_both[0]] == pytest.approx(rates)
    weights = [load_file(run.export / "model.safetensors") for run in (whole, parts)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_recipes_optimizer(tmp_path: Path) -> None:
    """The recipe's optimizer and schedule replace those of the module."""
    optimizer = {"name": "adamw", "learning_rate": 0.05}
    schedule = {"name": "linear", "warmup_steps": 2}
    run = run_here(tmp_path, made("BoringModel", "rows", optimizer=optimizer, schedule=schedule))
    assert (
        read_json_or_raise_damaged(run.engine)["optimizer"]["used"]
        == "torch.optim.AdamW(fused=True)"
    )
    assert [line["learning_rate"] for line in records(run)][:2] == [0.025, 0.05]


def test_rates_of_an_earlier_step() -> None:
    """A rollback gets the rates, and other settings, of the step that it goes back to."""
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
    config: Any = SimpleNamespace(scheduler=cycle, interval="step", frequency=1)
    rates = TorchScheduler(optimizer, config)
    (group,) = optimizer.param_groups
    first = [
        (rates.advance_or_restart_and_read_learning_rates(step, 0), group["momentum"])
        for step in range(8)
    ]
    # A run may multiply them by its own factor.
    group["lr"] = 5.0
    assert [
        (rates.advance_or_restart_and_read_learning_rates(step, 0), group["momentum"])
        for step in range(3, 8)
    ] == first[3:]
    assert len({momentum for _, momentum in first}) > 3
    assert group["params"][0] is layer.weight


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        ("Manual", {}, r"Manual .*has automatic_optimization, which a run of ortlaunch never"),
        ("Ranked", {}, r"Ranked .*has on_after_backward, which .* it calls on_train_end, "),
        ("words", {}, r"model.factory returned list; it must return a torch.nn.Module"),
        ("Net", {}, r"model.factory returned Net; task lightning takes a LightningModule"),
        ("Several", {}, r"self.log\('rows'\): got Tensor with reduce_fx 'mean'; log one number"),
        ("Blind", {"data": evaluated("rows")}, r"data.evaluation: Blind has no validation_step"),
        ("Configured", "two", r"Configured.configure_optimizers returned 2 optimizers and 0 sch"),
        ("Configured", "part", r"configure_optimizers leaves out layer.bias: set requires_grad"),
        ("Configured", "other", r"configure_optimizers returned Adagrad; checkpoints hold"),
        ("Configured", "plateau", r"returned a ReduceLROnPlateau, which follows a metric"),
    ],
)  # fmt: skip
def test_a_module_that_a_run_cannot_train(
    tmp_path: Path, model: str, sections: Any, message: str
) -> None:
    """The error has the name of the part, and the remedy."""
    if isinstance(sections, str):
        sections = {"model": {"task": "lightning", "factory": f"{MODULES}:{model}",
                              "arguments": {"how": sections}}}  # fmt: skip
    with pytest.raises(InputError, match=message):
        run_here(tmp_path, made(model, "rows", **sections))


@needs_ort
@pytest.mark.parametrize(
    ("model", "value"),
    [("Indexed", "batch_idx"), ("Stepped", "self.global_step"), ("Counted", "Python number .*'twice'")],
)  # fmt: skip
def test_a_value_that_a_graph_would_keep_is_refused(tmp_path: Path, model: str, value: str) -> None:
    """On ort a training_step that reads the step's index fails before step 1; eager trains it."""
    with pytest.raises(EngineError, match=rf"{value}.*a graph keeps its first value.*eager"):
        run_here(tmp_path / "ort", made(model, "rows", "ort"))
    assert len(records(run_here(tmp_path / "eager", made(model, "rows")))) == 6


def test_batches_of_any_form() -> None:
    """A batch keeps its form: a tensor, a list, or a mapping; other values are refused."""
    one = torch.ones(2)
    for batch in (one, [one, one + 1], {"a": one, "labels": one + 1}):
        named = collate_to_named_tensors(lambda _, batch=batch: batch, [])
        assert all(isinstance(each, torch.Tensor) for each in named.values())
        torch.testing.assert_close(batch_in_original_form(named), batch)
    for wrong in (3, [one, "text"], {"a": [one]}):
        with pytest.raises(DataError, match=r"data\.collate returns a tensor, or a list"):
            collate_to_named_tensors(lambda _, wrong=wrong: wrong, [])


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module and the recipe of docs/guides/lightning.md train, on engine eager here."""
    page = (Path(__file__).parents[2] / "docs/guides/lightning.md").read_text(encoding="utf-8")
    module, text = (
        re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
        for language in ("python", "yaml")
    )
    (tmp_path / "my_module.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = Recipe.model_validate({**yaml.safe_load(text), "engine": {"name": "eager"}})
    first, last = [
        line["evaluation_val_distance"]
        for line in records(run_here(tmp_path / "run", recipe))
        if "evaluation_loss" in line
    ]
    assert last < first
    # A later test of this process lists the modules that were imported.
    del sys.modules["my_module"]
