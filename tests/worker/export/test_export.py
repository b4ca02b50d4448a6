"""export/: the trained model as a transformers folder."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ortlaunch.base.errors import InputError
from ortlaunch.rank import Rank
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.worker.data import LoadedData
from ortlaunch.worker.engine.stepping import TorchStepper
from ortlaunch.worker.export.export import write_final_run_export_on_rank_0
from ortlaunch.worker.export.export_checkpoint import _recipe_with_requested_lora_form
from ortlaunch.worker.model.model import seed_and_build_loss_module_on_cpu
from ortlaunch.worker.process_group.distributed import DistributedContext
from tests import makers

LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 32, "max_position_embeddings": 32}  # fmt: skip
WORDS = {
    "train": "python-docs",
    "tokenizer": {"train": "bpe", "vocab_size": 400},
    "sequence_length": 32,
}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for this file, so that its tokenizer is trained once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTLAUNCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def exported(chosen: Recipe, folder: Path) -> dict[str, Any]:
    """Build and export a model; return its config.json and generation_config.json."""
    run = RunDir(folder)
    data = LoadedData(chosen)
    group = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    model = seed_and_build_loss_module_on_cpu(chosen, data)
    inner: Any = model.model
    # Training does not use cached keys and values.
    assert inner.config.use_cache is False
    stepper = TorchStepper(model, torch.optim.SGD(model.parameters()), group, "fp32", 1, None)
    write_final_run_export_on_rank_0(chosen, run, group, stepper, model, data)
    return {
        name: json.loads((run.export / f"{name}.json").read_text())
        for name in ("config", "generation_config")
    }


@pytest.mark.parametrize(
    ("written", "expected"), [({}, True), ({"use_cache": False}, False)], ids=["own", "recipe's"]
)
def test_the_export_generates_with_its_own_cache(
    written: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    """The exported `use_cache` is the model's or the recipe's, though training switches it off."""
    chosen = makers.recipe(model={"task": "causal-lm", "config": {**LLAMA, **written}}, data=WORDS)
    found = exported(chosen, tmp_path)
    assert found["config"]["use_cache"] is expected
    assert found["generation_config"].get("use_cache", True) is expected


def test_an_export_does_not_import_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate would import it in every export, for seconds."""
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    exported(makers.recipe(model={"task": "causal-lm", "config": LLAMA}, data=WORDS), tmp_path)
    assert "deepspeed" not in sys.modules


def test_an_export_follows_the_umask(tmp_path: Path) -> None:
    """All files of an export have the permissions of the umask."""
    # safetensors writes files that only their owner can read.
    before = os.umask(0o002)
    try:
        exported(makers.recipe(model={"task": "causal-lm", "config": LLAMA}, data=WORDS), tmp_path)
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in RunDir(tmp_path).export.iterdir()
    }
    assert "model.safetensors" in modes
    assert set(modes.values()) == {0o664}


ADAPTED = makers.recipe(
    model={"task": "causal-lm", "config": LLAMA, "lora": {"r": 2, "target_modules": ["q_proj"]}},
    data=WORDS,
)


def test_adapters_merged_or_alone() -> None:
    """Adapters are exported as requested; a request that the format does not support is refused."""
    for word, merge in (("merged", True), ("alone", False), ("", True)):
        found = _recipe_with_requested_lora_form(ADAPTED, "huggingface", word).model.lora
        assert found is not None
        assert found.merge is merge
    # Without adapters, and formats that export them in one way alone.
    for recipe, form, told in (
        (makers.recipe(), "huggingface", "the run has no adapters"),
        (ADAPTED, "onnx", "--format onnx has adapters merged; leave --lora out"),
        (ADAPTED, "ondevice", "--format ondevice has separate adapters, for training"),
    ):
        with pytest.raises(InputError, match=told):
            _recipe_with_requested_lora_form(recipe, form, "alone")
