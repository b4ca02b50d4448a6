"""Whole weights in files: the values, the exports and the merged adapters of weights in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from ortlaunch.base import machine
from ortlaunch.worker.model.adapters import merge_adapters
from ortlaunch.worker.weight_memory import WeightMemory

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
# Tied weights; experts that are stored one by one, whose gate and up are copied for it.
CONFIGS = [
    transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    transformers.MixtralConfig(**SIZES, num_local_experts=2),
]


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be free."""
    limit = machine.MemoryLimit("a test", 1, 0)
    monkeypatch.setattr(machine, "memory_limit_with_least_free", lambda: limit)


def model_of_seed(config: transformers.PreTrainedConfig) -> Any:
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))


def is_in_file(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is a file that has no name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.endswith("(deleted)")
    raise AssertionError("no mapping has the tensor")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_a_new_model_in_files_and_its_export_are_those_in_memory(
    config: transformers.PreTrainedConfig, no_memory: None, tmp_path: Path
) -> None:
    """First values and files are equal, and every large weight is in a file."""
    weight_memory = WeightMemory(tmp_path)
    with weight_memory.keep_registered_parameters():
        model = model_of_seed(config)
    plain = model_of_seed(config)
    assert all(is_in_file(p) == (p.nbytes >= 1 << 16) for p in model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))
    with weight_memory.keep_converted_weights():
        model.save_pretrained(tmp_path / "files")
    plain.save_pretrained(tmp_path / "memory")
    names = sorted(path.name for path in (tmp_path / "memory").iterdir())
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == names
    for name in names:
        assert (tmp_path / "files" / name).read_bytes() == (tmp_path / "memory" / name).read_bytes()


def test_merged_adapters_go_to_files(no_memory: None, tmp_path: Path) -> None:
    """Each merged weight is in a file, and that of peft alone."""
    lora = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model_of_seed(CONFIGS[0]), lora)
    expected = copy.deepcopy(adapted).merge_and_unload()
    merged = merge_adapters(adapted, WeightMemory(tmp_path))
    assert all(torch.equal(p, q) for p, q in zip(merged.parameters(), expected.parameters()))
    layer = merged.model.layers[1]
    assert all(is_in_file(one.weight) for one in (layer.self_attn.q_proj, layer.mlp.up_proj))


def test_a_full_disk_is_an_error_before_values_are_written(
    no_memory: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to memory whose file has no room on the disk would end the process."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
        WeightMemory(tmp_path).tensor_in_memory_or_file(torch.zeros(1 << 15))
