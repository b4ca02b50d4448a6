"""`ortlaunch generate`: a prompt, and how a causal model continues it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortlaunch.errors import InputError
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.tasks import GenerationRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ANSWER = "ortlaunch"  # in the place of an answer, to see what follows on one


def run(request: GenerationRequest) -> None:
    """Print the text."""
    print(text(*_model(request.model, request.step), request))


def _model(place: str, step: int | None) -> tuple[Any, PreTrainedTokenizerBase]:
    """Model and tokenizer of a folder, or of a run's checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if step is None:
        try:
            return AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError) as error:
            raise InputError(f"{place}: {str(error).splitlines()[0]}") from None
    from ortlaunch.worker.export.export_checkpoint import trained
    from ortlaunch.worker.model.model import give_back_cache

    _, whole, data = trained(RunDir(Path(place)), step)
    if data.tokenizer is None:
        raise InputError(
            f"{place}: its data are your own, without a tokenizer, "
            "so that no text can be made of tokens"
        )
    give_back_cache(whole.model, whole.generates_with_cache)
    return whole.model, data.tokenizer


def text(model: Any, tokenizer: PreTrainedTokenizerBase, request: GenerationRequest) -> str:
    """The prompt and what follows it.

    Raises:
        InputError: the prompt has no token, or the text would be longer than the model can see.
    """
    import torch
    from transformers import GenerationConfig

    prompt = request.prompt
    chat = bool(tokenizer.chat_template) if request.chats is None else request.chats
    if chat:
        print(
            "prompt: as a user's message, by the chat template (--raw takes it as it is)",
            file=sys.stderr,
            flush=True,
        )
    ids, ends = _message(tokenizer, prompt) if chat else (_tokens(tokenizer, prompt), [])
    _require_place(model, len(ids), request.tokens)
    samples = request.temperature > 0
    how = GenerationConfig(
        max_new_tokens=request.tokens,
        do_sample=samples,
        **(
            {"temperature": request.temperature, "top_k": 0} if samples else {}
        ),  # of all tokens, not of 50
        eos_token_id=[*ends, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
        or None,
        pad_token_id=tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else tokenizer.eos_token_id,
    )
    torch.manual_seed(request.seed)
    given = torch.tensor([ids])
    (found,) = (
        model.float()
        .eval()
        .generate(given, attention_mask=torch.ones_like(given), generation_config=how)
    )
    if chat:
        return f"{prompt}\n\n{str(tokenizer.decode(found[len(ids) :], skip_special_tokens=True)).strip()}"
    return str(tokenizer.decode(found, skip_special_tokens=True))


def _message(tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[list[int], list[int]]:
    """Of the prompt as training writes a user's message, up to the answer; and the tokens that end an answer.

    Raises:
        InputError: there is no template, or it refuses a single message.
    """
    messages = [{"role": "user", "content": prompt}]
    answered = [*messages, {"role": "assistant", "content": _ANSWER}]
    try:
        asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        whole = str(tokenizer.apply_chat_template(answered, tokenize=False))
    except Exception as error:  # Jinja's, and whatever a template's own code raises
        why = " ".join(str(error).split())
        raise InputError(
            f"the chat template does not take the prompt: {why}; --raw leaves it out"
        ) from None
    ids, after = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (asked, whole.rpartition(_ANSWER)[2].strip())
    )
    special = {
        *tokenizer.all_special_ids,
        *(n for n, t in tokenizer.added_tokens_decoder.items() if t.special),
    }
    return ids, [token for token in after[:1] if token in special]


def _tokens(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Of the prompt, after the begin mark where the tokenizer puts one, and without an end."""
    from ortlaunch.worker.data.tokens import begin_of_text

    begin = [token for token in begin_of_text(tokenizer) if token == tokenizer.bos_token_id]
    ids: list[int] = [*begin, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    if not ids:
        raise InputError("the prompt has no token; give some words")
    return ids


def _require_place(model: PreTrainedModel, prompt: int, tokens: int) -> None:
    places = getattr(model.config, "max_position_embeddings", None)
    if places is not None and prompt + tokens > places:
        raise InputError(
            f"--max-new-tokens: got {tokens}; the prompt has {prompt} tokens, "
            f"and the model sees {places} in all"
        )
