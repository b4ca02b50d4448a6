"""`engine.chunked_loss`: its results, the models to which it applies, and the recipe's rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ortlaunch.planning.memory import estimate_rank_memory_or_none
from ortlaunch.recipe.rules.loss_chunks import loss_chunk_rows_or_zero
from ortlaunch.recipe.rules.rules import broken_rule_problems
from ortlaunch.run_folder.engine_report import ChunkedLoss
from ortlaunch.worker.engine.comparison import run_and_compare_passes
from ortlaunch.worker.model.chunked_head import chunk_head_if_trial_agrees_and_describe
from ortlaunch.worker.model.chunked_loss import (
    _head_loss_gradients_and_gradient_factor,
    chunked_cross_entropy,
)
from ortlaunch.worker.model.model import LossModule, disable_chunked_head
from ortlaunch.worker.training.summary import _chunked_loss_lines
from tests.makers import BERT, bert, recipe

ROWS = 70
WIDTH = 32
WORDS = 1000
CHUNK = 16
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
         "vocab_size": 300, "max_position_embeddings": 40}  # fmt: skip


def head(dtype: torch.dtype = torch.float32, bias: bool = True) -> list[Tensor | None]:
    """Return hidden states, weight and bias of a head, in this dtype."""
    torch.manual_seed(0)
    made = [torch.randn(ROWS, WIDTH), torch.randn(WORDS, WIDTH) * 0.2, torch.randn(WORDS)]
    return [each.to(dtype).requires_grad_() for each in made[: 2 + bias]] + [None] * (not bias)


def labels() -> Tensor:
    made = torch.randint(WORDS, (ROWS,), generator=torch.Generator().manual_seed(1))
    # Every third row does not count.
    made[::3] = -100
    return made


def whole(parts: list[Tensor | None]) -> tuple[Tensor, list[Tensor | None]]:
    """Return the loss in float64, and the leaves that get its gradients."""
    leaves = [
        None if each is None else each.detach().double().clone().requires_grad_() for each in parts
    ]
    return nn.functional.cross_entropy(nn.functional.linear(*leaves), labels()), leaves


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)],
)
def test_the_numbers_are_those_of_whole_logits(
    dtype: torch.dtype, tolerance: float, bias: bool
) -> None:
    """Loss and every gradient equal those of whole logits in float64."""
    # The factor is like a loss scale. With 16 bits sums are in float32.
    parts = head(dtype, bias)
    loss = chunked_cross_entropy(*parts, labels(), CHUNK, True)  # type: ignore[call-arg]
    (loss * 1024).backward()
    expected, leaves = whole(parts)
    (expected * 1024).backward()
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for ours, theirs in zip(parts, leaves):
        if ours is not None and theirs is not None:
            assert ours.grad is not None
            assert theirs.grad is not None
            assert float((ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()) < tolerance


def test_gradients_that_float16_cannot_hold_are_scaled_first() -> None:
    """Gradients that underflow in float16 without the loss scale are correct with it."""
    # With 40,000 labels each gradient of the mean is below float16's smallest value.
    hidden = torch.ones(40_000, 2, dtype=torch.float16, requires_grad=True)
    weight = (torch.eye(2, dtype=torch.float16) * 0.01).requires_grad_()
    chosen = torch.arange(40_000) % 2
    (chunked_cross_entropy(hidden, weight, None, chosen, 10_000, True) * 65536).backward()
    assert hidden.grad is not None
    assert float(hidden.grad.abs().min()) == pytest.approx(65536 * 0.005 / 40_000, rel=1e-2)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    """A frozen input of the head gets no gradient."""
    parts = head()
    parts[frozen].requires_grad_(False)  # type: ignore[union-attr]
    chunked_cross_entropy(*parts, labels(), CHUNK, True).backward()  # type: ignore[call-arg]
    assert [each.grad is None for each in parts if each is not None] == [
        i == frozen for i in range(3)
    ]


def test_no_label_that_counts_is_torchs_nan() -> None:
    """Without any label that counts, the loss is nan and the gradients are zeros, as torch's."""
    parts = head()
    loss = chunked_cross_entropy(*parts, torch.full((ROWS,), -100), CHUNK, True)  # type: ignore[call-arg]
    loss.backward()
    assert loss.isnan()
    assert [float(each.grad.abs().max()) for each in parts] == [0.0, 0.0, 0.0]  # type: ignore[union-attr]


def test_a_second_backward_pass_is_refused() -> None:
    """A second backward pass is refused."""
    # The first pass has scaled the gradients in place.
    loss = chunked_cross_entropy(*head(), labels(), CHUNK, True)  # type: ignore[call-arg]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="cannot run backward again"):
        loss.backward()


class Sizes(TorchDispatchMode):
    """A mode that records the sizes of the operators' results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, Tensor):
                self.seen.add(each.numel())
        return found


@pytest.mark.parametrize("train", [True, False])
def test_whole_logits_never_exist(train: bool) -> None:
    """The largest tensor is the gradient of the weight in training, else the logits of a chunk."""
    parts = [each.detach() for each in head() if each is not None]
    with Sizes() as sizes:
        _head_loss_gradients_and_gradient_factor(*parts, labels(), CHUNK, *[train] * 3)
    # Without training, this size is the transposed weight.
    weights = set() if train else {WORDS * WIDTH}
    assert max(sizes.seen - weights) == (WORDS * WIDTH if train else CHUNK * WORDS)
    assert ROWS * WORDS > WORDS * WIDTH


def test_torch_compile_takes_it_as_one_operator() -> None:
    """torch.compile has no graph break, and its gradients equal eager's, bit for bit."""

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor, chosen: Tensor) -> Tensor:
        return chunked_cross_entropy(
            hidden * 2, weight, bias, chosen, CHUNK, torch.is_grad_enabled()
        )

    eager = head()
    compiled = head()
    loss(*eager, labels()).backward()  # type: ignore[call-arg]
    torch.compile(loss, backend="aot_eager", fullgraph=True)(*compiled, labels()).backward()  # type: ignore[call-arg]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(eager, compiled))  # type: ignore[union-attr]


# ----------------------------------------------------------------------------------------------------- models


def built(task: str, kind: str, **fields: Any) -> LossModule:
    import transformers

    names = {"causal-lm": "CausalLM", "masked-lm": "MaskedLM", "pretraining": "PreTraining"}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **fields})
    config.use_cache = False
    return LossModule(
        getattr(transformers, f"AutoModelFor{names[task]}").from_config(config).train()
    )


def batch(task: str) -> dict[str, Tensor]:
    ids = torch.randint(5, 300, (2, 24), generator=torch.Generator().manual_seed(2))
    pair = {"next_sentence_label": torch.tensor([0, 1])} if task == "pretraining" else {}
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels()[:48].view(2, 24) % 300,
        **pair,
    }


def chunk(module: LossModule, task: str, rows: Any = 8, **sections: Any) -> ChunkedLoss:
    made = bert(
        model={"task": task, "config": BERT},
        engine={"name": "eager", "chunked_loss": rows},
        **sections,
    )
    return chunk_head_if_trial_agrees_and_describe(made, module, batch(task), "cpu")


@pytest.mark.parametrize(
    ("task", "kind", "fields"),
    [
        ("causal-lm", "llama", {}),
        ("causal-lm", "llama", {"tie_word_embeddings": True}),
        ("causal-lm", "cohere", {"bos_token_id": 1, "eos_token_id": 2, "logit_scale": 0.5}),
        ("causal-lm", "granite", {"logits_scaling": 8.0}),
        ("masked-lm", "bert", {}),
        ("masked-lm", "distilbert", {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 48}),
        ("masked-lm", "roberta", {}),
        ("pretraining", "bert", {}),
    ],
    ids=str,
)
def test_a_familys_loss_in_chunks_is_its_own(task: str, kind: str, fields: dict[str, Any]) -> None:
    """Loss and gradients of each model family are within 1e-6 of the model's own."""
    # The families differ in shift, tied weights, scaled logits and the loss of pairs.
    module = built(task, kind, **fields)
    assert chunk(module, task) == ChunkedLoss(8, 8, None)
    found = run_and_compare_passes(module, module, batch(task))
    assert (found.loss_difference, found.gradient_difference) == pytest.approx((0, 0), abs=1e-6)
    # The chunks are another computation, with other rounding.
    assert found.gradient_difference > 0


@pytest.mark.parametrize(
    ("task", "kind", "fields", "why"),
    [
        ("causal-lm", "gemma2", {"num_key_value_heads": 1, "head_dim": 16}, "caps its logits (final_logit_softcapping"),
        (
            "causal-lm", "mixtral",
            {"num_key_value_heads": 1, "num_local_experts": 2, "output_router_logits": True},
            "is not the mean cross entropy of its head: ",
        ),
        ("pretraining", "electra", {"embedding_size": 16}, "the model has no output layer"),
    ],
    ids=str,
)  # fmt: skip
def test_another_loss_is_left_alone(task: str, kind: str, fields: dict[str, Any], why: str) -> None:
    """A model with another loss is not changed, and the reason is reported."""
    module = built(task, kind, **fields)
    before = float(module.eval()(**batch(task))) if task == "causal-lm" else None
    found = chunk(module, task)
    assert found.rows is None
    assert why in (found.why or "")
    assert before is None or float(module(**batch(task))) == before
    assert _chunked_loss_lines(found)[0].startswith("chunked_loss 8: not applied: ")


def test_adapters_on_the_head_are_left_alone() -> None:
    """A head with adapters is not chunked; a frozen head below adapters is."""
    # A head with adapters is no plain linear layer.
    import peft

    for targets, rows in ((["lm_head"], None), (["q_proj"], 8)):
        module = built("causal-lm", "llama")
        module.model = peft.get_peft_model(
            module.model, peft.LoraConfig(r=2, target_modules=targets)
        )
        found = chunk(module, "causal-lm")
        assert found.rows == rows
    assert run_and_compare_passes(module, module, batch("causal-lm")).largest_difference < 1e-6
    assert module.model.get_output_embeddings().weight.grad is None


def test_evaluation_has_the_same_loss_and_no_gradients() -> None:
    """The loss in evaluation is the same, and no gradients are computed."""
    module = built("causal-lm", "llama").eval()
    expected = float(module(**batch("causal-lm")))
    chunk(module, "causal-lm")
    with torch.no_grad(), Sizes() as sizes:
        assert float(module(**batch("causal-lm"))) == pytest.approx(expected, rel=1e-6)
    # The size of the weight's gradient.
    assert 300 * 32 not in sizes.seen
    assert not module.training


def test_the_model_gets_its_head_back() -> None:
    """The model's own head can be restored for a while or forever, with the same weight names."""
    # Parity restores it for a while, and the export forever.
    module = built("causal-lm", "llama").eval()
    names = list(module.state_dict())
    ids = batch("causal-lm")["input_ids"]
    chunk(module, "causal-lm")
    assert list(module.state_dict()) == names
    assert module.model(input_ids=ids).logits.shape[-1] == 32
    with disable_chunked_head(module):
        assert module.model(input_ids=ids).logits.shape[-1] == 300
    module.chunk_head_or_restore_it(None)
    # Generation needs the model's own logits.
    assert module.model.generate(ids[:1, :4], max_new_tokens=2).shape[-1] == 6


# ---------------------------------------------------------------------------------------------------- recipes


def test_auto_is_for_large_vocabularies() -> None:
    """`auto` uses chunks of 20 MiB, and none if one chunk would have all logits."""
    # 640 rows of 8,192 words in float32 are 20 MiB.
    assert [
        loss_chunk_rows_or_zero("auto", 1024, words, "cpu")
        for words in (1000, 8192, 32_000, 300_000)
    ] == [
        0,
        640,
        160,
        128,
    ]
    assert [loss_chunk_rows_or_zero("auto", rows, 32_000, "cuda") for rows in (1024, 4096)] == [
        0,
        1024,
    ]
    assert [loss_chunk_rows_or_zero(asked, 1024, 32_000, "cpu") for asked in ("off", 100)] == [
        0,
        100,
    ]
    module = built("causal-lm", "llama")
    assert chunk(module, "causal-lm", "auto").why == "logits of 48 x 300 are small"
    assert module.chunked is None


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        (
            {"model": {"task": "custom", "factory": "mine:model"}},
            "has no effect with task custom, which has no output layer",
        ),
        (
            {"zero": {"stage": 3}},
            "has no effect with ZeRO 3, which shards the weight of the output layer",
        ),
    ],
)
def test_rows_that_do_nothing_are_refused(sections: dict[str, Any], why: str) -> None:
    """A number of rows is refused where chunks are impossible; `auto` and `off` are not."""
    made = bert if "zero" in sections else recipe
    assert any(
        why in text
        for _, text in broken_rule_problems(
            made(engine={"name": "eager", "chunked_loss": 64}, **sections)
        )
    )
    for word in ("auto", False, "off"):
        chosen = made(engine={"name": "eager", "chunked_loss": word}, **sections)
        assert not any("chunked" in path[0] for path, _ in broken_rule_problems(chosen))
        # YAML reads `off` as false.
        assert chosen.engine.chunked_loss in ("auto", "off")


def test_the_memory_plan_knows_chunks() -> None:
    """The memory plan has the logits of a chunk and the head's gradient instead of all logits."""
    # Whole logits count four times.
    big = {**BERT, "vocab_size": 32_000}
    data = {"train": "python-docs", "tokenizer": "here", "sequence_length": 128}
    chunked, plain = (
        estimate_rank_memory_or_none(
            bert(
                model={"task": "masked-lm", "config": big},
                data=data,
                engine={"chunked_loss": asked},
            ),
            8,
            1,
        )
        for asked in ("auto", "off")
    )
    assert chunked is not None
    assert plain is not None
    saved = plain.by_stage[0][1].activations - chunked.by_stage[0][1].activations
    # All logits, less a chunk of 160 rows and the gradient of the head.
    assert saved == 16 * 1024 * 32_000 - 4 * 160 * 32_000 - 4 * 32_000 * 64
    assert (chunked.chunk, plain.chunk) == (160, 0)
