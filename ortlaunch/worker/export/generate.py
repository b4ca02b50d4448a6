"""`ortlaunch generate`: the continuation of a prompt by a causal model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortlaunch.errors import InputError, first_message_line
from ortlaunch.recipe.inputs import files_read, require_no_pointers
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.tasks import GenerationRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# A sample answer, to find the text that a chat template writes after an answer.
_ANSWER = "ortlaunch"


def run(request: GenerationRequest) -> None:
    """Print the generated text."""
    # The command has replaced it by the step.
    assert request.step != "best"
    print(text(*_model(request.model, request.step), request))


def _model(place: str, step: int | None) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return model and tokenizer of a folder, or of a run's checkpoint.

    step: the step of the checkpoint; None: `place` is the folder of a model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if step is None:
        for key in ("model.pretrained", "data.tokenizer"):
            require_no_pointers(files_read(key, place))
        try:
            return AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError) as error:
            raise InputError(f"{place}: {first_message_line(error)}") from None
    from ortlaunch.worker.export.export_checkpoint import trained
    from ortlaunch.worker.model.model import give_back_cache

    _, whole, data = trained(RunDir(Path(place)), step)
    if data.tokenizer is None:
        raise InputError(f"{place}: its custom data has no tokenizer, so tokens cannot become text")
    give_back_cache(whole.model, whole.generates_with_cache)
    return whole.model, data.tokenizer


def text(model: Any, tokenizer: PreTrainedTokenizerBase, request: GenerationRequest) -> str:
    """Return the prompt and its continuation.

    Raises:
        InputError: the prompt has no token, or the text would exceed the model's positions.
    """
    import torch
    from transformers import GenerationConfig

    prompt = request.prompt
    chat = bool(tokenizer.chat_template) if request.chats is None else request.chats
    if chat:
        # On stderr, so that stdout has the generated text alone.
        print(
            "prompt: a user's message in the chat template (--raw: without the template)",
            file=sys.stderr,
            flush=True,
        )
    ids, ends = _message(tokenizer, prompt) if chat else (_tokens(tokenizer, prompt), [])
    _require_place(model, len(ids), request.tokens)
    samples = request.temperature > 0
    how = GenerationConfig(
        max_new_tokens=request.tokens,
        do_sample=samples,
        # top_k 0: sample from all tokens; transformers' default is 50.
        **({"temperature": request.temperature, "top_k": 0} if samples else {}),
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
        return (
            f"{prompt}\n\n"
            f"{str(tokenizer.decode(found[len(ids) :], skip_special_tokens=True)).strip()}"
        )
    return str(tokenizer.decode(found, skip_special_tokens=True))


def _message(tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[list[int], list[int]]:
    """Return the token ids of the prompt as a user's message, and the tokens that end an answer.

    The ids go up to the beginning of the answer, as in training.

    Raises:
        InputError: there is no template, or it refuses a single message.
    """
    messages = [{"role": "user", "content": prompt}]
    answered = [*messages, {"role": "assistant", "content": _ANSWER}]
    try:
        asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        whole = str(tokenizer.apply_chat_template(answered, tokenize=False))
    # Errors of Jinja, and any error that the template's own code raises.
    except Exception as error:
        why = " ".join(str(error).split())
        raise InputError(
            f"the chat template rejects the prompt: {why}; --raw omits the template"
        ) from None
    # The template has written the special tokens already.
    ids, after = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (asked, whole.rpartition(_ANSWER)[2].strip())
    )
    special = {
        *tokenizer.all_special_ids,
        *(n for n, t in tokenizer.added_tokens_decoder.items() if t.special),
    }
    # An ordinary token after the answer, for example a line end, must not end the generation.
    return ids, [token for token in after[:1] if token in special]


def _tokens(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the token ids of the prompt, after the tokenizer's begin mark, without an end mark."""
    from ortlaunch.worker.data.token_cache import begin_of_text

    # A tokenizer may put other tokens before a text, too; the begin mark alone is used.
    begin = [token for token in begin_of_text(tokenizer) if token == tokenizer.bos_token_id]
    ids: list[int] = [*begin, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    if not ids:
        raise InputError("the prompt has no token; give some text")
    return ids


def _require_place(model: PreTrainedModel, prompt: int, tokens: int) -> None:
    """Raise InputError if prompt and new tokens exceed the model's positions."""
    places = getattr(model.config, "max_position_embeddings", None)
    if places is not None and prompt + tokens > places:
        raise InputError(
            f"--max-new-tokens: got {tokens}; the prompt has {prompt} tokens, "
            f"and the model sees {places} in all"
        )
