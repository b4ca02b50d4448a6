"""Training artifacts: steps equal PyTorch's, frozen weights stay, and checkpoints are averaged."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from ortlaunch.base.errors import CheckpointError, EngineError, InputError
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import Rank
from ortlaunch.recipe import (
    Recipe,
    dump_recipe_yaml,
    load_recipe,
    parse_resolved_recipe,
    read_resolved_recipe_of_run,
)
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged
from ortlaunch.worker.checkpoint.restore import CheckpointTensors
from ortlaunch.worker.checkpoint.tensor_file import read_flat_elements
from ortlaunch.worker.data import LoadedData, collate
from ortlaunch.worker.device import graph
from ortlaunch.worker.device.artifacts import (
    unsharded_one_pass_recipe_for_device,
    write_and_check_device_artifacts,
)
from ortlaunch.worker.device.average import average_client_checkpoints_write_and_print
from ortlaunch.worker.device.device import (
    SAMPLES,
    STEPS,
    Device,
    int_property_or_0,
    load_ort_checkpoint_state_or_refuse,
    write_checkpoint_state_atomically,
)
from ortlaunch.worker.device.evaluate import evaluate_device_checkpoint_write_and_print
from ortlaunch.worker.device.inference import write_checked_inference_folder
from ortlaunch.worker.device.train import train_device_checkpoint_and_save
from ortlaunch.worker.evaluation.evaluate_model import (
    evaluate_loss_module,
    load_and_evaluate_model_file,
)
from ortlaunch.worker.export.export_checkpoint import (
    write_and_record_checkpoint_export as write_export,
)
from ortlaunch.worker.export.import_checkpoint import write_run_and_export_from_device_checkpoint
from ortlaunch.worker.model.model import LossModule, seed_and_build_loss_module_on_cpu
from ortlaunch.worker.process_group.distributed import DistributedContext
from tests import makers
from tests.ort import needs_ort
from tests.training import records, run_here

pytestmark = needs_ort
# Without dropout, so that losses can be compared with PyTorch's.
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
         "max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
BERT = makers.recipe(
    model={"task": "pretraining", "config": {"model_type": "bert", **SMALL}},
    data={"train": "python-docs", "evaluation": "python-docs", "tokenizer": {"train": "wordpiece", "vocab_size": 300},
          "sequence_length": 24},
    optimizer={"learning_rate": 1e-2, "epsilon": 1e-4, "weight_decay": 0.1, "no_decay": []},
    schedule={"name": "constant"},
    train={"max_steps": 6, "max_grad_norm": 1.0},
)  # fmt: skip
LORA = makers.recipe(
    model={"task": "causal-lm", "lora": {"r": 2, "target_modules": ["q_proj"]},
           "config": {"model_type": "llama", **{name: SMALL[name] for name in list(SMALL)[:5]}}},
    data={"train": "python-docs", "tokenizer": {"train": "bpe", "vocab_size": 300}, "sequence_length": 24},
)  # fmt: skip


class Made:
    """The artifacts of a recipe, and the model they were made of."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        folder.mkdir()
        self.recipe = unsharded_one_pass_recipe_for_device(recipe, 2)
        self.place = DeviceFolder(folder)
        self.data = LoadedData(self.recipe)
        self.data.train, self.data.evaluation = First(self.data.train), First(self.data.train)
        self.whole: LossModule = seed_and_build_loss_module_on_cpu(self.recipe, self.data)
        self.told = write_and_check_device_artifacts(self.recipe, folder, self.whole, self.data)

    def train(self, to: Path, steps: int | None = None, checkpoint: Path | None = None) -> Any:
        train_device_checkpoint_and_save(
            self.place, self.recipe, self.data, checkpoint or self.place.checkpoint, to, steps
        )
        return load_ort_checkpoint_state_or_refuse(to)


class First:
    """The first eight of many samples, so that evaluations are fast."""

    def __init__(self, samples: Any) -> None:
        self.sample = samples.sample

    def __len__(self) -> int:
        return 8


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for this file, so that its tokenizers are trained once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTLAUNCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Made:
    return Made(BERT, tmp_path_factory.mktemp("bert") / "artifacts")


def weights(state: Any) -> dict[str, Any]:
    return {name: parameter.data for name, parameter in state.parameters}


def test_steps_are_pytorchs(bert: Made) -> None:
    """Steps with clipping and AdamW's weight decay give PyTorch's weights, for two lengths."""
    assert bert.told.outputs == ["loss", "prediction_logits", "seq_relationship_logits"]
    assert bert.told.inputs[-2:] == ["labels", "next_sentence_label"]
    batches = graph.labelled_batches_in_forward_order(bert.recipe, bert.whole, bert.data)
    for batch in batches:
        # Padding has no labels, so that its embedding has no gradient.
        batch["labels"][batch["attention_mask"] == 0] = -100
    steps_are_pytorchs(bert, batches)


def steps_are_pytorchs(made: Made, batches: list[Any]) -> None:
    """Compare losses and weights of two steps with those of plain PyTorch."""
    device = Device(made.place, made.place.checkpoint, is_training=True)
    whole = seed_and_build_loss_module_on_cpu(made.recipe, made.data).float()
    optimizer = torch.optim.AdamW(
        whole.parameters(), lr=1e-2, weight_decay=0.1, eps=made.recipe.optimizer.epsilon
    )
    for batch in batches[:2]:
        loss = whole(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert device.train_on_batch(batch, 1e-2) == pytest.approx(loss.item(), abs=1e-5)
    found = weights(device.state)
    for name, value in whole.named_parameters():
        torch.testing.assert_close(torch.tensor(found[name]), value.detach(), atol=2e-5, rtol=0)


def pictures() -> list[dict[str, torch.Tensor]]:
    return [{"pixel_values": torch.randn(3, 8, 8), "labels": torch.tensor(n % 2)} for n in range(8)]


def recordings() -> list[dict[str, torch.Tensor]]:
    return [
        {"input_features": torch.randn(4, 16), "labels": torch.randint(3, 20, (5,))}
        for _ in range(8)
    ]


VIT = {"model_type": "vit", "image_size": 8, "patch_size": 4,
       **{name: size for name, size in SMALL.items() if name != "max_position_embeddings"}}  # fmt: skip
WHISPER = {"model_type": "whisper", "vocab_size": 20, "d_model": 16, "num_mel_bins": 4, "max_source_positions": 8,
           "max_target_positions": 8, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
           "decoder_start_token_id": 1,
           **{f"{side}_{name}": size for side in ("encoder", "decoder")
              for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}}  # fmt: skip


@pytest.mark.parametrize(
    ("task", "config", "samples"),
    [
        ("image-classification", VIT, "pictures"),
        pytest.param("speech-seq2seq", WHISPER, "recordings", marks=pytest.mark.slow),
    ],
)
def test_a_device_hears_and_sees(
    task: str, config: Any, samples: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps on images and recordings, of two numbers of samples, give PyTorch's weights."""
    monkeypatch.setitem(sys.modules, "own_of_a_test", sys.modules[__name__])
    source = {"format": "custom", "factory": f"own_of_a_test:{samples}"}
    recipe = makers.recipe(
        model={"task": task, "config": config},
        data={"train": source, "evaluation": source},
        optimizer=dict(BERT.optimizer),
        train={"max_steps": 6, "max_grad_norm": 1.0},
    )
    made = Made(recipe, tmp_path / "artifacts")
    steps_are_pytorchs(made, graph.labelled_batches_in_forward_order(recipe, made.whole, made.data))


def test_more_steps_than_epochs_have(bert: Made) -> None:
    """The recommended options for more steps are valid: max_steps excludes epochs."""
    from ortlaunch.worker.device.train import _more_steps_options

    assert _more_steps_options(bert.recipe, 9) == "train.max_steps=9"
    train = bert.recipe.train.model_copy(update={"epochs": 1.0, "max_steps": None})
    assert (
        _more_steps_options(bert.recipe.model_copy(update={"train": train}), 9)
        == "train.max_steps=9 train.epochs=null"
    )


def test_it_learns_goes_on_and_leaves(
    bert: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training in two parts equals one in a single part, and lowers the loss."""
    at_once = bert.train(tmp_path / "six")
    bert.train(tmp_path / "two", steps=2)
    chained = bert.train(tmp_path / "all", checkpoint=tmp_path / "two", steps=9)
    assert "--steps 9: 4 steps of 6 left; for more: train.max_steps=11\n" in capsys.readouterr().out
    assert (int_property_or_0(chained, STEPS), int_property_or_0(chained, SAMPLES)) == (6, 12)
    expected = weights(at_once)
    for name, value in weights(chained).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-6)
    with pytest.raises(InputError, match=r"six has 6 steps of 6; for more: train\.max_steps=12"):
        bert.train(tmp_path / "more", checkpoint=tmp_path / "six")

    # The loss has become lower, and is equal by the artifacts and by the exported model.
    before = evaluate_device_checkpoint_write_and_print(
        bert.place, bert.recipe, bert.data, bert.place.checkpoint
    )
    after = evaluate_device_checkpoint_write_and_print(
        bert.place, bert.recipe, bert.data, tmp_path / "six"
    )
    assert after.metrics["loss"] < before.metrics["loss"] - 0.1
    assert (after.step, after.samples) == (6, 8)
    write_checked_inference_folder(bert.place, tmp_path / "six", tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} >= {
        "model.onnx",
        "config.json",
        "tokenizer.json",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ortlaunch.worker.data.load_data_and_print_notes", lambda *_, **__: bert.data)
        found = load_and_evaluate_model_file(
            bert.recipe, tmp_path / "model" / "model.onnx", tmp_path
        )
    assert found.metrics["loss"] == pytest.approx(after.metrics["loss"], abs=1e-5)
    assert found.metrics["next_sentence_accuracy"] == after.metrics["next_sentence_accuracy"]


def test_adapters_alone_are_trained(tmp_path: Path) -> None:
    """Under LoRA a device changes the adapters and no other weight."""
    made = Made(LORA, tmp_path / "artifacts")
    assert parse_resolved_recipe(made.place.recipe.read_text()).model.attention == "eager"
    before = weights(load_ort_checkpoint_state_or_refuse(made.place.checkpoint))
    after = weights(made.train(tmp_path / "after", steps=2))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {each.name for each in made.told.parameters if each.trained}
    assert all("lora_" in name for name in changed)
    # The two matrices of the one adapted projection.
    assert len(changed) == 2


def test_documents_do_not_see_each_other(tmp_path: Path) -> None:
    """Packed documents give PyTorch's loss with the document mask, in steps and evaluations."""
    (tmp_path / "lines.txt").write_text(
        "\n".join("of several words"[: number % 14 + 1] for number in range(200))
    )
    lines = {"format": "text", "path": str(tmp_path / "lines.txt"), "document": "line"}
    data = {
        **LORA.data.model_dump(),
        "train": lines,
        "evaluation": lines,
        "attend_across_documents": False,
    }
    model = {"task": "causal-lm", "config": {**(LORA.model.config or {}), "initializer_range": 0.5}}
    made = Made(makers.recipe(model=model, data=data), tmp_path / "artifacts")
    batch = collate([made.data.train.sample(index, epoch=0) for index in range(8)])
    assert batch["document_ids"].any()
    with torch.no_grad():
        inner: Any = made.whole.model
        loss = float(made.whole(**batch))
        across = float(inner(batch["input_ids"], labels=batch["labels"]).loss)
    # The mask makes a difference in this model.
    assert abs(loss - across) > 0.01
    assert any("use one row per document" in note for note in made.told.notes)
    device = Device(made.place, made.place.checkpoint, is_training=True)
    assert device.train_on_batch(batch, 1e-3) == pytest.approx(loss, abs=1e-5)

    group = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    expected = evaluate_loss_module(made.recipe, made.whole, made.data.evaluation, group)
    given = evaluate_device_checkpoint_write_and_print(
        made.place, made.recipe, made.data, made.place.checkpoint
    )
    assert given.metrics["loss"] == pytest.approx(expected.metrics["loss"])
    write_checked_inference_folder(made.place, made.place.checkpoint, tmp_path / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ortlaunch.worker.data.load_data_and_print_notes", lambda *_, **__: made.data)
        found = load_and_evaluate_model_file(
            made.recipe, tmp_path / "model" / "model.onnx", tmp_path
        )
    assert found.metrics["perplexity"] == pytest.approx(expected.metrics["perplexity"])


def test_clients_are_averaged(bert: Made, tmp_path: Path) -> None:
    """Clients are weighted by their samples since the last average, or by given weights."""
    one = bert.train(tmp_path / "one", steps=1)
    two = bert.train(tmp_path / "two", steps=3)
    clients = [tmp_path / "one", tmp_path / "two"]
    average_client_checkpoints_write_and_print(bert.place, clients, None, tmp_path / "mean")
    mean = load_ort_checkpoint_state_or_refuse(tmp_path / "mean")
    first = weights(one)
    second = weights(two)
    for name, value in weights(mean).items():
        np.testing.assert_allclose(value, (first[name] + 3 * second[name]) / 4, atol=1e-6)
    assert (int_property_or_0(mean, STEPS), int_property_or_0(mean, SAMPLES)) == (3, 8)
    # The count of samples begins again after an average.
    assert (
        int_property_or_0(
            bert.train(tmp_path / "again", steps=2, checkpoint=tmp_path / "mean"), SAMPLES
        )
        == 4
    )
    average_client_checkpoints_write_and_print(bert.place, clients, [1.0, 1.0], tmp_path / "even")
    name = next(iter(first))
    even = weights(load_ort_checkpoint_state_or_refuse(tmp_path / "even"))[name]
    np.testing.assert_allclose(even, (first[name] + second[name]) / 2, atol=1e-6)


def test_what_cannot_be_averaged(bert: Made, tmp_path: Path) -> None:
    """Weights of another model, nan, clients without samples, and other files are refused."""
    good = tmp_path / "good"
    bert.train(good, steps=1)
    to = tmp_path / "mean"
    with pytest.raises(InputError, match="checkpoint trained on no sample since the last average"):
        average_client_checkpoints_write_and_print(
            bert.place, [good, bert.place.checkpoint], None, to
        )
    with pytest.raises(InputError, match="got weight 0; a weight is above 0"):
        average_client_checkpoints_write_and_print(bert.place, [good, good], [1.0, 0.0], to)
    with pytest.raises(CheckpointError, match=r"device\.json is no checkpoint of onnxruntime's"):
        average_client_checkpoints_write_and_print(
            bert.place, [good, bert.place.description], None, to
        )

    # A checkpoint with nan in one weight.
    spoiled = Device(bert.place, good)
    name = bert.told.parameters[0].name
    parameters = spoiled.state.parameters
    parameters[name] = np.full_like(parameters[name].data, np.nan)
    write_checkpoint_state_atomically(spoiled.state, tmp_path / "nan", with_optimizer=False)
    with pytest.raises(CheckpointError, match=f"nan: {name} contains inf or nan"):
        average_client_checkpoints_write_and_print(bert.place, [good, tmp_path / "nan"], None, to)

    # A checkpoint of a wider model.
    config = {"model_type": "bert", **SMALL, "intermediate_size": 48}
    wider = bert.recipe.model_copy(
        update={"model": bert.recipe.model.model_copy(update={"config": config})}
    )
    other = Made(wider, tmp_path / "wider")
    with pytest.raises(
        CheckpointError, match=r"intermediate.*is of shape \[48.*, and of \[32.* in the artifacts"
    ):
        average_client_checkpoints_write_and_print(
            bert.place, [good, other.place.checkpoint], [1.0, 1.0], to
        )
    shutil.copy(good, tmp_path / "copy")
    with pytest.raises(CheckpointError, match="is not of these artifacts: it has"):
        average_client_checkpoints_write_and_print(
            DeviceFolder(other_names(bert, tmp_path / "renamed")),
            [good, tmp_path / "copy"],
            None,
            to,
        )
    assert not to.exists()


def other_names(made: Made, folder: Path) -> Path:
    """Write the description of the artifacts with another name of the first weight."""
    folder.mkdir()
    text = made.place.description.read_text()
    (folder / "device.json").write_text(text.replace(made.told.parameters[0].name, "model.another"))
    return folder


class Sum(torch.nn.Module):
    """A linear regression of `y`, which `stack` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layer(x)
        # `mean` is a scalar, which is no output of the graph.
        return {"loss": ((found - y) ** 2).mean(), "found": found, "mean": found.mean()}


def rows() -> list[dict[str, Any]]:
    return [
        {"x": row, "more": 1.0}
        for row in torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    ]


def stack(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    x = torch.stack([sample["x"] for sample in samples])
    return {
        "x": x,
        "y": x.sum(1, keepdim=True) + torch.tensor([[sample["more"]] for sample in samples]),
    }


def test_batches_of_the_users_own_collate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom model with custom samples and collate function is exported and trained."""
    monkeypatch.setitem(sys.modules, "own_of_a_test", sys.modules[__name__])
    source = {"format": "custom", "factory": "own_of_a_test:rows"}
    recipe = makers.recipe(
        model={"task": "custom", "factory": "own_of_a_test:Sum"},
        data={"train": source, "evaluation": source, "collate": "own_of_a_test:stack"},
        optimizer={"learning_rate": 0.1},
        train={"max_steps": 40},
    )
    made = Made(recipe, tmp_path / "artifacts")
    # The subcommands read the recipe from the folder.
    assert load_recipe(made.place.recipe).recipe == made.recipe
    before = evaluate_device_checkpoint_write_and_print(
        made.place, made.recipe, made.data, made.place.checkpoint
    ).metrics["loss"]
    made.train(tmp_path / "trained")
    assert (
        evaluate_device_checkpoint_write_and_print(
            made.place, made.recipe, made.data, tmp_path / "trained"
        ).metrics["loss"]
        < before / 4
    )


class Pictures(nn.Module):
    """A network for pictures with a layer that a device cannot train."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        larger = nn.Upsample(scale_factor=2.0, mode="bilinear", align_corners=False)
        self.layer = {"norm": nn.GroupNorm(2, 4), "larger": larger}.get(layer)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.layer is None:
            # torch takes labels of one byte, ONNX Runtime does not.
            scores = self.conv(pixel_values).mean((2, 3))
            return nn.functional.cross_entropy(scores, labels.byte())
        return self.layer(self.conv(pixel_values)).square().mean() * labels.float().mean()


@pytest.mark.parametrize(
    ("layer", "reason"),
    [("norm", "InstanceNormalization"), ("larger", "ResizeGrad"), ("bytes", r"tensor\(uint8\)")],
)
def test_an_operator_that_a_device_cannot_train_is_named(
    layer: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator without a gradient, or without a kernel of it, is named in one sentence."""
    monkeypatch.setitem(sys.modules, "own_of_a_test", sys.modules[__name__])
    recipe = makers.recipe(
        model={
            "task": "custom",
            "factory": "own_of_a_test:Pictures",
            "arguments": {"layer": layer},
        },
        data={"train": {"format": "custom", "factory": "own_of_a_test:pictures"}},
        train={"max_steps": 6},
    )
    with pytest.raises(EngineError, match=f"cannot (train|run) this model: .*{reason}") as e:
        Made(recipe, tmp_path / "artifacts")
    assert "onnxruntime_src" not in str(e.value)


@pytest.mark.parametrize("recipe", [BERT, LORA], ids=["all weights", "adapters"])
def test_a_checkpoint_returns_to_its_run(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device's weights are an export and a checkpoint, from which a training continues."""
    # An evaluation would take all 10,000 samples, for minutes.
    shorter = recipe.model_copy(
        update={
            "train": recipe.train.model_copy(update={"max_steps": 2, "epochs": None}),
            "data": recipe.data.model_copy(update={"evaluation": None}),
        }
    )
    run = run_here(tmp_path / "run", shorter)
    artifacts = DeviceFolder(tmp_path / "artifacts")
    write_export(run, 2, artifacts.path, "ondevice")
    device_recipe = read_resolved_recipe_of_run(artifacts.recipe)
    data = LoadedData(device_recipe)
    train_device_checkpoint_and_save(
        artifacts, device_recipe, data, artifacts.checkpoint, artifacts.checkpoint, 1
    )
    back = RunDir(tmp_path / "back")
    write_run_and_export_from_device_checkpoint(artifacts, artifacts.checkpoint, run, 2, back)
    assert "checkpoint of step 2, without optimizer state" in capsys.readouterr().out
    assert back.vocabulary.read_text() == run.vocabulary.read_text()
    assert [path.name for path in back.tokenizer.iterdir()] == [
        path.name for path in run.tokenizer.iterdir()
    ]
    state = load_ort_checkpoint_state_or_refuse(artifacts.checkpoint)
    shards = CheckpointTensors(back.checkpoint_folder(2))
    trained = [name for kind, name in shards.pieces if kind == "weight"]
    described = read_json_or_raise_damaged(artifacts.description)["parameters"]
    assert sorted(trained) == sorted(each["name"] for each in described if each["trained"])
    before = CheckpointTensors(run.checkpoint_folder(2))
    for name in trained:
        (_, entry), = shards.pieces["weight", name][None]  # fmt: skip
        (_, old), = before.pieces["weight", name][None]  # fmt: skip
        weights = read_flat_elements(entry, 0, entry.elements).view(entry.shape)
        assert np.array_equal(weights, state.parameters[name].data)
        assert not torch.equal(weights, read_flat_elements(old, 0, old.elements).view(old.shape))
    # The export is the model that the device evaluates.
    whole = getattr(
        transformers, read_json_or_raise_damaged(back.export / "config.json")["architectures"][0]
    )
    exported = whole.from_pretrained(back.export).eval()
    batch = collate([data.train.sample(0, 0)])
    device = Device(artifacts, artifacts.checkpoint).evaluate_batch(batch)
    with torch.no_grad():
        loss = exported(**{name: batch[name] for name in batch}).loss
    assert abs(float(loss) - float(device["loss"])) < 1e-5
    # A training of more steps goes on in the new folder.
    longer = shorter.model_copy(update={"train": shorter.train.model_copy(update={"max_steps": 4})})
    run_here(back.path, longer)
    assert [record["step"] for record in records(back) if "loss" in record][-1] == 4


def test_frozen_weights_are_compared_in_float32(tmp_path: Path) -> None:
    """DeepSpeed rounds the frozen weights of a run in bf16, but the artifacts have the whole ones."""
    shorter = LORA.model_copy(
        update={"train": LORA.train.model_copy(update={"max_steps": 1, "epochs": None})}
    )
    run = run_here(tmp_path / "run", shorter)
    artifacts = DeviceFolder(tmp_path / "artifacts")
    write_export(run, 1, artifacts.path, "ondevice")
    # The records of such a run; the checkpoint has the same form.
    run.recipe.write_text(dump_recipe_yaml(shorter.model_copy(update={"precision": "bf16"})))
    run.plan.write_text(replace(Plan.read(run.plan), deepspeed={"bf16": {}}).to_json())
    write_run_and_export_from_device_checkpoint(
        artifacts, artifacts.checkpoint, run, 1, RunDir(tmp_path / "back")
    )
    assert RunDir(tmp_path / "back").checkpoint_folder(1).exists()


def test_weights_that_differ_from_the_run_are_refused(tmp_path: Path) -> None:
    """A frozen weight is that of the run; another model's weights are listed."""
    shorter = LORA.model_copy(
        update={"train": LORA.train.model_copy(update={"max_steps": 1, "epochs": None})}
    )
    run = run_here(tmp_path / "run", shorter)
    artifacts = DeviceFolder(tmp_path / "artifacts")
    write_export(run, 1, artifacts.path, "ondevice")
    device = Device(artifacts, artifacts.checkpoint)
    name = next(
        each["name"]
        for each in read_json_or_raise_damaged(artifacts.description)["parameters"]
        if not each["trained"]
    )
    device.state.parameters[name] = device.state.parameters[name].data + np.float32(1)
    write_checkpoint_state_atomically(device.state, tmp_path / "changed", with_optimizer=False)
    with pytest.raises(CheckpointError, match=f"{name}: is not trained, and differs from that"):
        write_run_and_export_from_device_checkpoint(
            artifacts, tmp_path / "changed", run, 1, RunDir(tmp_path / "back")
        )
    assert not (tmp_path / "back").exists()
    # What a browser sends has no names, only a size.
    (tmp_path / "short.f32").write_bytes(bytes(12))
    with pytest.raises(
        CheckpointError, match=r"short.f32 has 12 bytes; the .* trained weights take"
    ):
        average_client_checkpoints_write_and_print(
            artifacts, [tmp_path / "short.f32", artifacts.checkpoint], [1, 1], tmp_path / "to"
        )
