"""The continuation of a prompt: the most likely tokens, or random ones of a seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ortlaunch.base.errors import InputError
from ortlaunch.tables.tasks import GenerationRequest
from ortlaunch.worker.export.generate import seed_and_generate_after_plain_or_chat_prompt

SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 32, "max_position_embeddings": 16}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    # Large initial weights, so that outputs differ from token to token.
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=1.0))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a tokenizer of the words w3 to w19 with a begin mark and an end mark."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<s>": 0, "</s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 20)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def asked(prompt: str = "w3 w4", **changes: Any) -> GenerationRequest:
    request = GenerationRequest(
        "model", prompt, step=None, tokens=6, temperature=0.0, seed=0, raw=False
    )
    return request._replace(**changes)


def test_the_likeliest(model: Any, tokenizer: Any) -> None:
    """At temperature 0 the tokens are the most likely ones of repeated full passes."""
    # The begin mark and the prompt, without the tokenizer's end mark.
    ids = [0, 3, 4]
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
    assert seed_and_generate_after_plain_or_chat_prompt(
        model, tokenizer, asked()
    ) == tokenizer.decode(ids, skip_special_tokens=True)
    assert len(ids) > 4


def test_draws(model: Any, tokenizer: Any) -> None:
    """Random tokens are equal for equal seeds, and differ for others."""
    found = [
        seed_and_generate_after_plain_or_chat_prompt(
            model, tokenizer, asked(temperature=2.0, seed=seed)
        )
        for seed in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]
    assert found[0].startswith("w3 w4")


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}w5 {{ m.content }} w6 {% else %}{{ m.content "
    "}} </s> w9 "
    "{% endif %}{% endfor %}"
)


def test_a_chat(model: Any, tokenizer: Any, capsys: Any) -> None:
    """The chat template renders the prompt, and the answer ends at the template's end mark."""
    import copy

    chats = copy.deepcopy(tokenizer)
    chats.chat_template = TEMPLATE
    # The end of an answer is then known from the template alone.
    chats.eos_token = None
    ids = [5, 3, 4, 6]
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            # The template writes </s> after an answer.
            if ids[-1] == 1:
                break
    assert (
        seed_and_generate_after_plain_or_chat_prompt(model, chats, asked(chats=True))
        == f"w3 w4\n\n{chats.decode(ids[4:], skip_special_tokens=True)}"
    )
    assert "in the chat template (--raw: without the template)" in capsys.readouterr().err
    assert seed_and_generate_after_plain_or_chat_prompt(
        model, chats, asked()
    ) == seed_and_generate_after_plain_or_chat_prompt(model, chats, asked(chats=True))
    assert seed_and_generate_after_plain_or_chat_prompt(
        model, chats, asked(chats=False)
    ) == seed_and_generate_after_plain_or_chat_prompt(model, tokenizer, asked(chats=False))
    with pytest.raises(
        InputError, match=r"the chat template rejects the prompt: .* --raw omits the template"
    ):
        seed_and_generate_after_plain_or_chat_prompt(model, tokenizer, asked(chats=True))


def test_what_does_not_fit(model: Any, tokenizer: Any) -> None:
    """More tokens than the model has positions, and an empty prompt, are refused."""
    with pytest.raises(
        InputError,
        match="--max-new-tokens: got 14; the prompt has 3 tokens, and the model sees 16 in",
    ):
        seed_and_generate_after_plain_or_chat_prompt(model, tokenizer, asked(tokens=14))
    tokenizer = type(
        "Bare",
        (),
        {
            "bos_token_id": None,
            "chat_template": None,
            "__call__": lambda *_, **__: {"input_ids": []},
        },
    )()
    with pytest.raises(InputError, match="the prompt has no token"):
        seed_and_generate_after_plain_or_chat_prompt(model, tokenizer, asked(""))
