"""Adapters beside quantized weights: the losses of transformers, peft and bitsandbytes; the export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import EAGER, TWO_RANKS, Run, Train, ended_well, merged

pytestmark = pytest.mark.slow
STEPS = 30
# Steps that two ranks with FSDP2 add to the checkpoint of one rank.
MORE = 3
RANK, ALPHA = 4, 8
RECIPE: dict[str, Any] = {
    **EAGER,
    "name": "quantized",
    "model": {
        "task": "causal-lm",
        "pretrained": "base",
        "lora": {"r": RANK, "alpha": ALPHA, "target_modules": ["all-linear"]},
        "quantize": {"type": "nf4"},
    },
    "data": {
        "train": {"format": "text", "path": ["train.txt"]},
        "evaluation": {"format": "text", "path": ["held-out.txt"]},
        "tokenizer": "base",
        "sequence_length": 16,
    },
    "batch": {"global_size": 8, "micro_size": 4},
    "optimizer": {"name": "adamw", "learning_rate": 1e-2, "weight_decay": 0.0},
    "schedule": {"name": "constant", "warmup_steps": 0},
    # An evaluation between steps must not change what the next ones learn.
    "train": {"max_steps": STEPS, "max_grad_norm": None, "evaluate_every_steps": 10},
    "checkpoint": {"every_steps": STEPS},
    "log": {"every_steps": 1},
}


@pytest.fixture(scope="module", autouse=True)
def base(home: Path) -> Path:
    """The folder of a small Llama with its tokenizer."""
    pytest.importorskip("bitsandbytes")
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>", "<pad>"])
    words.train([str(home / "train.txt")], special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(home / "base")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(home / "base")
    return home / "base"


@pytest.fixture(scope="module")
def one_rank(train: Train) -> Run:
    return ended_well(train("quantized-one", RECIPE))


@pytest.fixture(scope="module")
def sharded(train: Train, one_rank: Run) -> Run:
    """The same run, continued by two ranks that divide the quantized weights."""
    recipe = merged(RECIPE, {"train": {"max_steps": STEPS + MORE}, "parallel": {"shard": 2}})
    return ended_well(train(one_rank.folder.name, recipe, *TWO_RANKS))


def quantized_base(base: Path) -> Any:
    """Return the base as transformers quantizes it."""
    import transformers

    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=settings, device_map={"": "cpu"}, dtype=torch.float32
    )


@pytest.fixture(scope="module")
def reference(base: Path, home: Path) -> list[float]:
    """The losses of a plain loop over transformers, peft and bitsandbytes.

    It shares the batches and the first values of the adapters with ortlaunch.
    """
    import peft

    from ortlaunch.launch_plan import BatchPlan
    from ortlaunch.worker.data import Batches, LoadedData
    from ortlaunch.worker.model.model import seed_and_build_loss_module_on_cpu
    from tests.makers import recipe as build_recipe

    paths = {
        "model": {"pretrained": str(base)},
        "data": {
            "tokenizer": str(base),
            "train": {"path": [str(home / "train.txt")]},
            "evaluation": None,
        },
    }
    recipe = build_recipe(**merged(RECIPE, paths))
    data = LoadedData(recipe)
    batches = Batches(data.train, BatchPlan(8, 4, 2, 1, None), recipe.seed)
    first = {
        name.removeprefix("model."): value
        for name, value in seed_and_build_loss_module_on_cpu(recipe, data).named_parameters()
        if value.requires_grad
    }
    plain = peft.prepare_model_for_kbit_training(
        quantized_base(base), use_gradient_checkpointing=False
    )
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    model = peft.get_peft_model(plain, settings).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == first.keys()
    for name, parameter in trained.items():
        parameter.data.copy_(first[name])
    optimizer = torch.optim.AdamW(
        trained.values(), lr=1e-2, betas=recipe.optimizer.betas, eps=recipe.optimizer.epsilon,
        weight_decay=0.0,
    )  # fmt: skip
    losses = []
    for step in range(STEPS + MORE):
        passes = [
            model(**batches.read_micro_batch_and_count_tokens(step, i, 0)).loss / 2
            for i in range(2)
        ]
        loss = torch.stack(passes).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.ci
def test_losses_are_pefts(train: Train, sharded: Run, reference: list[float]) -> None:
    """Thirty losses of one rank, three more of two with FSDP2, and two with ZeRO 2 are its."""
    two = ended_well(train("quantized-two", merged(RECIPE, {"zero": {"stage": 2}}), *TWO_RANKS))
    assert sharded.losses() == pytest.approx(reference, abs=1e-5)
    assert two.losses() == pytest.approx(reference[:STEPS], abs=1e-5)
    assert reference[-1] < 0.8 * reference[0]
    assert_memory_is_planned(two, "ZeRO 2")


def assert_memory_is_planned(run: Run, sharding: str) -> None:
    record = json.loads((run.folder / "memory.json").read_text())
    for kind in ("weights", "gradients", "optimizer"):
        planned, measured = record["planned"][kind], record["measured"][kind]
        assert measured == pytest.approx(planned, rel=0.1), (sharding, kind)


def adapters_of_last_checkpoint(run: Run) -> dict[str, torch.Tensor]:
    """Return the weights in the files of both ranks, whole."""
    folder = run.folder / f"checkpoints/step_{STEPS + MORE:08}"
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for path in folder.glob("rank_*.safetensors"):
        for key, value in load_file(path).items():
            kind, _, name = key.partition(":")
            assert kind in ("weight", "exp_avg", "exp_avg_sq")
            assert ".lora_" in name
            if kind == "weight":
                name, _, start = name.rpartition("@")
                pieces.setdefault(name, []).append((int(start), value.flatten()))
    return {
        name: torch.cat([value for _, value in sorted(parts, key=lambda part: part[0])])
        for name, parts in pieces.items()
    }


@pytest.mark.ci
def test_export_is_dequantized_plus_adapters(sharded: Run, base: Path) -> None:
    """The export is a plain Llama: dequantized weights plus alpha / r x B A, in float32."""
    import bitsandbytes

    exported = load_file(sharded.folder / "export/model.safetensors")
    assert "quantization_config" not in (sharded.folder / "export/config.json").read_text()
    adapters = adapters_of_last_checkpoint(sharded)
    quantized = 0
    for name, layer in quantized_base(base).named_modules():
        if not isinstance(layer, bitsandbytes.nn.Linear4bit):
            continue
        quantized += 1
        a, b = (
            adapters[f"model.base_model.model.{name}.lora_{side}.default.weight"] for side in "AB"
        )
        update = ALPHA / RANK * b.view(-1, RANK) @ a.view(RANK, -1)
        whole = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        torch.testing.assert_close(exported[f"{name}.weight"], whole + update, rtol=0, atol=1e-7)
    assert quantized == 2 * 7
    unquantized = load_file(base / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(exported[name], unquantized[name])
    assert_memory_is_planned(sharded, "FSDP2")


@pytest.mark.ci
def test_what_runs_is_recorded(one_rank: Run) -> None:
    """engine.json and the output have the form of the weights; the plan counts its bytes."""
    text = "nf4 with double scales, computed in float32: 73,728 of "
    assert one_rank.truth()["quantized_weights"].startswith(text)
    assert f"quantized weights: {text}" in one_rank.out


@pytest.mark.parametrize(
    "change",
    [
        {"engine": {"name": "inductor"}},
        {"model": {"quantize": {"type": "int8"}}, "zero": {"stage": 1}},
        {"model": {"quantize": {"compute": "bf16", "double": False}}, "precision": "bf16"},
    ],
    ids=["inductor", "int8", "bf16"],
)
def test_other_forms_learn_the_same(
    train: Train, sharded: Run, change: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """torch.compile, 8 bits and products in bf16 learn as nf4 in eager, with planned memory."""
    name = f"quantized-{request.node.callspec.id}"
    run = ended_well(train(name, merged(RECIPE, change), timeout=300))
    tolerance = 1e-4 if "engine" in change else 0.1
    assert run.losses() == pytest.approx(sharded.losses()[:STEPS], rel=tolerance)
    assert_memory_is_planned(run, "DDP")
