"""Documents packed into one sample without attention between them have the losses of each alone."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from ortlaunch.base.errors import InputError
from ortlaunch.recipe.fields.data import MaskedLm
from ortlaunch.tables.model_tasks import MODEL_TASKS
from ortlaunch.worker.data import IGNORED, Masking, collate
from ortlaunch.worker.data.masked.masked_packs import MaskedPacks
from ortlaunch.worker.data.order import SampleEpoch
from ortlaunch.worker.data.token_cache import Documents
from ortlaunch.worker.data.windows import SeparateDocuments
from ortlaunch.worker.model import document_attention
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.model.packing import (
    choose_document_form_or_refuse,
    pack_traits_of_model,
    replace_document_ids_by_mask,
    require_model_separates_documents,
    split_packed_documents_into_rows_or_copy_unpacked,
)
from tests.makers import recipe as recipe_of_sections
from tests.ort import needs_ort

LENGTH = 24
# Also an empty document, one of a single token, and ones longer than a sample.
SIZES = [5, 30, 1, 0, 7, 24, 2, 2, 40, 9]


def packed() -> SeparateDocuments:
    tokens = np.random.default_rng(0).integers(3, 60, sum(SIZES)).astype(np.uint32)
    return SeparateDocuments(Documents(tokens, np.cumsum(SIZES)), LENGTH)


def model(family: str = "llama", attention: str = "eager") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "initializer_range": 0.5,
    }
    if family not in ("gpt2", "bert"):
        sizes |= {"intermediate_size": 64, "head_dim": 8, "pad_token_id": 0}
    if family == "bert":
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        sizes |= {"is_decoder": True, "intermediate_size": 64, **dropout}
    # Some of the documents above are longer.
    limits = {
        "gemma2": "sliding_window",
        "mistral": "sliding_window",
        "gemma3_text": "sliding_window",
        "llama4_text": "attention_chunk_size",
    }
    if family in limits:
        sizes |= {limits[family]: 6, "num_key_value_heads": 2}
    if family in ("qwen3", "mixtral"):
        sizes["num_key_value_heads"] = 4
    config = AutoConfig.for_model(family, **sizes, use_cache=False)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def test_places_of_documents() -> None:
    """Positions start at 0 in each document and each sample; first tokens have no label."""
    samples = packed()
    ends = set(np.cumsum(SIZES).tolist())
    first = {0}
    assert len(samples) == 5
    for index in range(5):
        sample = samples.sample(index, 0)
        begun = index * LENGTH
        document = -1
        for place in range(LENGTH):
            token = index * LENGTH + place
            if token in ends | first or place == 0:
                begun = token
                document = document + 1
            assert int(sample["position_ids"][place]) == token - begun
            assert int(sample["document_ids"][place]) == document
            assert int(sample["labels"][place]) == (
                IGNORED if token in ends and place else int(samples.tokens[token])
            )


def alone(net: nn.Module, samples: list[Any]) -> float:
    """Return the mean loss of all documents, each in a pass of its own without mask or padding."""
    total = 0.0
    count = 0
    for sample in samples:
        for document in sample["document_ids"].unique():
            ids = sample["input_ids"][sample["document_ids"] == document][None]
            with torch.no_grad():
                logits = net(ids).logits[0, :-1]
            total += float(functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
    return total / count


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "eager"),
        ("llama", "sdpa"),
        ("gpt2", "eager"),
        # Each token sees a few: in all layers, in some, and within chunks.
        ("mistral", "sdpa"),
        ("gemma3_text", "eager"),
        ("llama4_text", "sdpa"),
    ],
)
def test_losses_are_those_of_documents_alone(family: str, attention: str) -> None:
    """In plain PyTorch the losses equal those of single documents, but not without the mask."""
    net = model(family, attention).eval()
    samples = [packed().sample(index, 0) for index in range(5)]
    batch = collate(samples)
    require_model_separates_documents(net)
    with torch.no_grad():
        found = float(LossModule(net)(**batch))
        names = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
        mixed = float(LossModule(net)(**names, attention_mask=torch.ones(5, LENGTH)))
    assert found == pytest.approx(alone(net, samples), rel=1e-5)
    assert mixed != pytest.approx(found, rel=1e-3)


def recipe(
    length: int = LENGTH, engine: str = "eager", task_name: str = "causal-lm", family: str = "llama"
) -> Any:
    """Return a recipe that keeps documents apart."""
    data = {"train": "python-docs", "tokenizer": "here", "sequence_length": length,
            "attend_across_documents": False}  # fmt: skip
    task = {"task": task_name, "config": {"model_type": family}}
    return recipe_of_sections(model=task, data=data, engine={"name": engine})


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "gemma3_text", "mixtral", "gpt2", "bert", "mistral", "llama4_text"],
)
def test_attention_within_documents_is_that_of_the_mask(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Loss and gradients with the documents' numbers are those with the mask, without any mask."""
    # The windows of a document are computed in several blocks.
    monkeypatch.setattr(document_attention, "_BLOCK", 4)
    net = model(family, "sdpa").eval()
    vars(net)["loss_type"] = "ForCausalLM"
    batch = collate([packed().sample(index, 0) for index in range(5)])
    found = []
    for form in ("mask", "numbers"):
        if form == "numbers":
            assert choose_document_form_or_refuse(net, recipe()) == ""
        net.zero_grad()
        loss = LossModule(net)(**batch)
        loss.backward()
        gradients = [p.grad.flatten() for p in net.parameters() if p.grad is not None]
        found.append((float(loss), torch.cat(gradients)))
    (masked_loss, masked_gradients), (loss_by_number, gradients_by_number) = found
    assert loss_by_number == pytest.approx(masked_loss, rel=1e-6)
    largest = (gradients_by_number - masked_gradients).abs().max()
    assert largest <= 5e-6 * masked_gradients.abs().max()
    assert not torch.equal(gradients_by_number, masked_gradients)


class Marks:
    """The part of a tokenizer that masking uses."""

    cls_token = sep_token = mask_token = "mark"
    cls_token_id, sep_token_id, mask_token_id, pad_token_id = 1, 2, 3, 0

    def __len__(self) -> int:
        return 64


def encoder_and_batch(family: str, attention: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a module for masked tokens, and a batch of packed documents."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64,
             "intermediate_size": 64, "initializer_range": 0.5, "hidden_dropout_prob": 0.0,
             "attention_probs_dropout_prob": 0.0, "pad_token_id": 0}  # fmt: skip
    if family == "modernbert":
        # A layer sees all, the others two tokens on either side; documents are longer.
        sizes |= {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}
    config = AutoConfig.for_model(family, **sizes)
    net = AutoModelForMaskedLM.from_config(config, attn_implementation=attention).eval()
    module = LossModule(net)
    module.pack_traits = pack_traits_of_model(net, MODEL_TASKS["masked-lm"])
    tokens = np.random.default_rng(0).integers(4, 64, sum(SIZES)).astype(np.uint32)
    masking = Masking(cast("Any", Marks()), MaskedLm())
    packs = MaskedPacks(Documents(tokens, np.cumsum(SIZES)), LENGTH, masking, 0, 0)
    return module, packs.batch([SampleEpoch(index, 0) for index in range(len(packs))])


def loss_and_gradients(module: nn.Module, batch: Any) -> tuple[float, torch.Tensor]:
    module.zero_grad()
    loss = module(**batch)
    loss.backward()
    gradients = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    return float(loss), torch.cat(gradients)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("bert", "eager"),
        ("bert", "sdpa"),
        # Positions begin after that of padding.
        ("roberta", "sdpa"),
        ("modernbert", "eager"),
        ("modernbert", "sdpa"),
    ],
)
def test_encoders_read_documents_alone(
    monkeypatch: pytest.MonkeyPatch, family: str, attention: str
) -> None:
    """Loss and gradients of masked packs are those of each document in a row of its own."""
    monkeypatch.setattr(document_attention, "_BLOCK", 4)
    module, batch = encoder_and_batch(family, attention)
    rows = split_packed_documents_into_rows_or_copy_unpacked(batch)
    expected_loss, expected_gradients = loss_and_gradients(module, rows)
    reason = choose_document_form_or_refuse(
        module.model, recipe(task_name="masked-lm", family=family)
    )
    assert ("has no sdpa attention" in reason) == (attention == "eager")
    loss, gradients = loss_and_gradients(module, batch)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert (gradients - expected_gradients).abs().max() <= 5e-6 * expected_gradients.abs().max()
    joined = {**batch, "document_ids": torch.zeros_like(batch["document_ids"])}
    assert loss_and_gradients(module, joined)[0] != pytest.approx(loss, rel=1e-3)


def test_an_exported_encoder_has_scores_at_packed_places() -> None:
    """A graph gets documents in rows; its logits are given at the places of the labels."""
    module, batch = encoder_and_batch("bert", "eager")
    graph = nn.Module()
    # Not as a submodule: a graph has no parameters.
    vars(graph)["forward"] = module.model
    module.eval()
    exported = LossModule(graph).eval()
    exported.evaluates_with_scores = module.evaluates_with_scores = True
    with torch.no_grad():
        found, expected = exported(**batch), module(**batch)
    is_labelled = batch["labels"] != IGNORED
    torch.testing.assert_close(
        found["logits"][is_labelled], expected["logits"][is_labelled], atol=1e-5, rtol=0
    )


@pytest.mark.slow
def test_compiled_encoders_read_documents_alone() -> None:
    """The same under torch.compile."""
    module, batch = encoder_and_batch("modernbert", "sdpa")
    expected = loss_and_gradients(module, split_packed_documents_into_rows_or_copy_unpacked(batch))
    assert not choose_document_form_or_refuse(
        module.model, recipe(task_name="masked-lm", family="modernbert", engine="inductor")
    )
    loss, gradients = loss_and_gradients(torch.compile(module), batch)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert (gradients - expected[1]).abs().max() <= 2e-5 * expected[1].abs().max()


@needs_ort
@pytest.mark.parametrize("family", ["bert", pytest.param("modernbert", marks=pytest.mark.slow)])
def test_encoders_of_onnx_runtime_read_documents_alone(witness: Any, family: str) -> None:
    """ORT's graph has the mask: loss and gradients are those of rows in plain PyTorch."""
    from ortmodule import ORTModule

    module, batch = encoder_and_batch(family, "sdpa")
    expected = loss_and_gradients(module, split_packed_documents_into_rows_or_copy_unpacked(batch))
    loss, gradients = loss_and_gradients(ORTModule(module), batch)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    assert (gradients - expected[1]).abs().max() <= 1e-4 * expected[1].abs().max()


def test_a_mask_remains_where_attention_cannot_separate() -> None:
    """Models without sdpa and engine ort keep a mask; too long samples for it are refused."""
    net = model("gemma2")
    assert choose_document_form_or_refuse(net, recipe()) == (
        "Gemma2ForCausalLM has no sdpa attention of transformers"
    )
    assert float(LossModule(net.eval())(**collate([packed().sample(0, 0)]))) > 0
    long = recipe(8200)
    with pytest.raises(InputError, match=r"data.sequence_length: got 8200, but at most 8,192"):
        choose_document_form_or_refuse(net, long)
    assert choose_document_form_or_refuse(model(attention="sdpa"), long) == ""
    on_ort = choose_document_form_or_refuse(model(attention="sdpa"), recipe(engine="ort"))
    assert "engine ort" in on_ort


@needs_ort
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        pytest.param("llama", "eager", marks=pytest.mark.slow),
        ("llama", "sdpa"),
        pytest.param("gemma3_text", "sdpa", marks=pytest.mark.slow),
    ],
)
def test_onnx_runtime_has_them_too(witness: Any, family: str, attention: str) -> None:
    """Losses and gradients of ORT's graph equal those of plain PyTorch, for different batches."""
    from ortmodule import ORTModule

    net = model(family, attention)
    samples = [packed().sample(index, 0) for index in range(5)]
    module = ORTModule(LossModule(net))
    plain = LossModule(net)
    for chosen in (samples[:3], samples[2:]):
        losses = []
        gradients = []
        for each in (module, plain):
            net.zero_grad()
            loss = each(**collate(chosen))
            loss.backward()
            losses.append(loss.item())
            gradients.append(
                torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
            )
        assert losses == pytest.approx([alone(net, chosen)] * 2, rel=1e-5)
        assert (gradients[0] - gradients[1]).abs().max() < 1e-4 * gradients[1].abs().max()
    assert witness.pass_and_graph_counts_record()["forward_passes"] == 2


def test_a_model_that_sees_through_the_mask_is_refused() -> None:
    """A model that ignores the mask, or does not accept one, is refused."""

    class Deaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4)

        def forward(
            self, input_ids: Any, position_ids: Any = None, attention_mask: Any = None
        ) -> Any:
            # The sum over earlier words ignores the mask.
            class Output:
                logits = self.words(input_ids).cumsum(1)

            return Output

    with pytest.raises(
        InputError,
        match=r"data.attend_across_documents: Deaf gives a document other scores beside another",
    ):
        require_model_separates_documents(Deaf())
    with pytest.raises(
        InputError, match=r"data.attend_across_documents: Linear does not accept a document mask"
    ):
        require_model_separates_documents(nn.Linear(2, 2))


def test_the_mask_is_of_the_weights_dtype() -> None:
    """The mask has the weights' dtype, with 0 where a token attends to another."""
    found = replace_document_ids_by_mask(
        {"document_ids": torch.tensor([[0, 0, 1]]), "input_ids": torch.ones(1, 3)}, torch.float16
    )
    low = torch.finfo(torch.float16).min
    assert found["attention_mask"].dtype == torch.float16
    assert found["attention_mask"].tolist() == [[[[0, low, low], [0, 0, low], [low, low, 0]]]]
    assert set(found) == {"input_ids", "attention_mask"}
