"""Low-rank adapters on every engine and under DeepSpeed: training, saving and merged export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.export.export_checkpoint import (
    load_recipe_trained_model_and_data_of_checkpoint,
)
from tests.e2e.runs import BERT, EAGER, SMALL, TWO_RANKS, Run, Train, ended_well, merged
from tests.ort import needs_ort

LORA: dict[str, Any] = {
    **BERT,
    "name": "lora",
    "model": {
        "task": "causal-lm",
        "config": {"model_type": "llama", **SMALL, "max_position_embeddings": 32},
        "lora": {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"], "merge": False},
    },
    "data": {**BERT["data"], "evaluation": None, "tokenizer": {"train": "bpe", "vocab_size": 300}},
    "train": {"max_steps": 6},
}
MERGED = merged(LORA, {"model": {"lora": {"merge": True}}})
TRAINED = 2 * 2 * 2 * 4 * 32  # layers, modules, sides, rank, hidden
MODEL = "model.base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.default.weight"


@pytest.fixture(scope="module")
def eager(train: Train) -> Run:
    return ended_well(train("lora-eager", merged(MERGED, EAGER)))


def adapters(run: Run) -> dict[str, torch.Tensor]:
    """Return the model's tensors in the last checkpoint of a run of one rank."""
    saved = load_file(run.folder / "checkpoints/step_00000006/rank_00000.safetensors")
    names = {
        key.partition(":")[2].partition("@")[0]: key
        for key in saved
        if key.startswith(("weight:", "buffer:"))
    }
    return {name: saved[key] for name, key in names.items()}


@needs_ort
@pytest.mark.slow
@pytest.mark.ci
def test_low_rank_adapters(train: Train, eager: Run) -> None:
    """Adapters of a Llama train on ONNX Runtime as on eager, and are saved and exported alone."""
    ort = ended_well(train("lora-ort", LORA))
    assert ort.losses() == pytest.approx(eager.losses(), rel=1e-4)
    assert ort.losses()[-1] < ort.losses()[0]
    # Two passes a step, 6 steps.
    assert ort.truth()["onnxruntime"]["backward_passes"] == 12
    for run in (ort, eager):
        assert run.truth()["trained_parameters"] == TRAINED < run.truth()["parameters"]
        assert all("lora_" in name for name in adapters(run))
        assert sum(value.numel() for value in adapters(run).values()) == TRAINED
    assert {"export/adapter_model.safetensors", "export/adapter_config.json"} <= ort.files()
    assert "export/model.safetensors" not in ort.files()


@pytest.mark.slow
@pytest.mark.ci
def test_adapters_are_merged_on_export(
    eager: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export is a plain Llama whose weights are the base's plus alpha / r x B A."""
    import transformers

    weights = transformers.AutoModelForCausalLM.from_pretrained(
        eager.folder / "export"
    ).state_dict()
    monkeypatch.chdir(home)
    monkeypatch.setenv("ORTLAUNCH_CACHE", str(home / "cache"))
    start = (
        load_recipe_trained_model_and_data_of_checkpoint(RunDir(eager.folder), 6)[1]
        .model.unload()
        .state_dict()
    )
    assert weights.keys() == start.keys()
    moved = {name for name in weights if not torch.equal(weights[name], start[name])}
    assert moved == {f"model.layers.{n}.self_attn.{p}_proj.weight" for n in range(2) for p in "qv"}
    for layer in range(2):
        for side in "qv":
            a, b = (adapters(eager)[MODEL.format(layer, side, part)] for part in "AB")
            name = f"model.layers.{layer}.self_attn.{side}_proj.weight"
            # alpha / r = 8 / 4.
            torch.testing.assert_close(weights[name], start[name] + 8 / 4 * b @ a)


@pytest.mark.slow
def test_adapters_on_inductor(train: Train, eager: Run) -> None:
    """torch.compile trains adapters with eager's losses."""
    run = ended_well(
        train("lora-inductor", merged(LORA, {"engine": {"name": "inductor"}}), timeout=300)
    )
    assert run.losses() == pytest.approx(eager.losses(), rel=1e-4)


def saved_names(folder: Path) -> set[str]:
    """Return the names of all weights and buffers in the files of all ranks."""
    keys = {key for path in folder.glob("rank_*.safetensors") for key in load_file(path)}
    return {key.partition(":")[2].partition("@")[0] for key in keys}


@needs_ort
@pytest.mark.parametrize(
    ("engine", "stage"),
    [
        pytest.param("ort", 2, marks=[pytest.mark.slow, pytest.mark.ci]),
        pytest.param("eager", 3, marks=pytest.mark.slow),
    ],
)
def test_adapters_under_deepspeed(train: Train, eager: Run, engine: str, stage: int) -> None:
    """Two ranks with ZeRO train and save only adapters, with eager's losses, and resume."""
    sharded = merged(
        LORA,
        {"engine": {"name": engine}, "zero": {"stage": stage}, "checkpoint": {"every_steps": 3}},
    )
    folder = f"lora-{engine}-{stage}"
    run = ended_well(train(folder, sharded, *TWO_RANKS))
    assert run.losses() == pytest.approx(eager.losses(), rel=1e-4)
    names = saved_names(run.folder / "checkpoints/step_00000003")
    assert names
    assert all("lora_" in name for name in names)
    # Without its mark, the last checkpoint is incomplete.
    (run.folder / "checkpoints/step_00000006/COMPLETE").unlink()
    resumed = ended_well(train(folder, sharded, *TWO_RANKS))
    assert "resumed after step 3" in resumed.out
    assert resumed.losses() == pytest.approx(run.losses(), rel=1e-6)


@pytest.mark.slow
@needs_ort
def test_a_new_head_is_trained_with_the_adapters(train: Train) -> None:
    """A new classification head is trained, saved and exported with the adapters."""
    recipe = merged(
        LORA,
        {
            "model": {"task": "sequence-classification", "lora": {"merge": True}},
            "data": {"train": {"format": "jsonl", "path": ["labels.jsonl"]}},
        },
    )
    recipe["data"]["train"] = {"format": "jsonl", "path": ["labels.jsonl"]}
    ort = ended_well(train("lora-head", recipe))
    plain = ended_well(train("lora-head-eager", merged(recipe, EAGER)))
    assert ort.losses() == pytest.approx(plain.losses(), rel=1e-4)
    (head,) = (name for name in adapters(ort) if "lora_" not in name)
    assert head.endswith("score.modules_to_save.default.weight")
    from safetensors.torch import load_file

    exported = load_file(ort.folder / "export/model.safetensors")
    assert torch.equal(exported["score.weight"], adapters(ort)[head])
