"""`ortlaunch generate`: the continuation of a prompt by a causal model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ortlaunch.base.errors import InputError, first_message_line
from ortlaunch.recipe.inputs import (
    pretrained_files_in_folder,
    refuse_lfs_pointers_and_unreadable_files,
)
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.tables.tasks import GenerationRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# A sample answer, to find the text that a chat template writes after an answer.
_ANSWER = "ortlaunch"


class PromptTokens(NamedTuple):
    """The token ids of a prompt."""

    ids: list[int]
    answer_end_ids: Sequence[int] = ()
    """Tokens that end an answer, beside the tokenizer's end mark."""


def run(request: GenerationRequest) -> None:
    """Print the generated text."""
    # The command has replaced it by the step.
    assert request.step != "best"
    print(
        seed_and_generate_after_plain_or_chat_prompt(
            *_load_model_and_tokenizer_of_folder_or_run(request.model, request.step), request
        )
    )


def _load_model_and_tokenizer_of_folder_or_run(
    model_location: str, checkpoint_step_or_none: int | None
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return model and tokenizer of a folder, or of a run's checkpoint.

    checkpoint_step_or_none: the step of the checkpoint; None: `model_location` is the folder of a model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if checkpoint_step_or_none is None:
        for key in ("model.pretrained", "data.tokenizer"):
            refuse_lfs_pointers_and_unreadable_files(
                pretrained_files_in_folder(key, model_location)
            )
        try:
            return AutoModelForCausalLM.from_pretrained(
                model_location
            ), AutoTokenizer.from_pretrained(model_location)
        except (OSError, ValueError) as error:
            raise InputError(f"{model_location}: {first_message_line(error)}") from None
    from ortlaunch.worker.export.export_checkpoint import (
        load_recipe_trained_model_and_data_of_checkpoint,
    )
    from ortlaunch.worker.model.model import restore_cache_setting

    _, loss_module, data = load_recipe_trained_model_and_data_of_checkpoint(
        RunDir(Path(model_location)), checkpoint_step_or_none
    )
    if data.tokenizer is None:
        raise InputError(
            f"{model_location}: its custom data has no tokenizer, so tokens cannot become text"
        )
    restore_cache_setting(loss_module.model, loss_module.generates_with_cache)
    return loss_module.model, data.tokenizer


def seed_and_generate_after_plain_or_chat_prompt(
    model: Any, tokenizer: PreTrainedTokenizerBase, request: GenerationRequest
) -> str:
    """Return the prompt and its continuation.

    Raises:
        InputError: the prompt has no token, or the text would exceed the model's positions.
    """
    import torch
    from transformers import GenerationConfig

    prompt = request.prompt
    uses_template = bool(tokenizer.chat_template) if request.chats is None else request.chats
    if uses_template:
        # On stderr, so that stdout has the generated text alone.
        print(
            "prompt: a user's message in the chat template (--raw: without the template)",
            file=sys.stderr,
            flush=True,
        )
    prompt_tokens = (
        _chat_prompt_tokens(tokenizer, prompt)
        if uses_template
        else PromptTokens(_prompt_ids_with_begin_mark_or_refuse_empty(tokenizer, prompt))
    )
    _require_enough_positions(model, len(prompt_tokens.ids), request.tokens)
    samples = request.temperature > 0
    generation_config = GenerationConfig(
        max_new_tokens=request.tokens,
        do_sample=samples,
        # top_k 0: sample from all tokens; transformers' default is 50.
        **({"temperature": request.temperature, "top_k": 0} if samples else {}),
        eos_token_id=[
            *prompt_tokens.answer_end_ids,
            *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]),
        ]
        or None,
        pad_token_id=tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else tokenizer.eos_token_id,
    )
    torch.manual_seed(request.seed)
    input_ids = torch.tensor([prompt_tokens.ids])
    (output_ids,) = (
        model.float()
        .eval()
        .generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=generation_config,
        )
    )
    if uses_template:
        return (
            f"{prompt}\n\n"
            f"{str(tokenizer.decode(output_ids[len(prompt_tokens.ids) :], skip_special_tokens=True)).strip()}"
        )
    return str(tokenizer.decode(output_ids, skip_special_tokens=True))


def _chat_prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str) -> PromptTokens:
    """Return the tokens of the prompt as a user's message.

    The ids go up to the beginning of the answer, as in training.

    Raises:
        InputError: there is no template, or it refuses a single message.
    """
    messages = [{"role": "user", "content": prompt}]
    answered = [*messages, {"role": "assistant", "content": _ANSWER}]
    try:
        prompt_text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        chat_text = str(tokenizer.apply_chat_template(answered, tokenize=False))
    # Errors of Jinja, and any error that the template's own code raises.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"the chat template rejects the prompt: {reason}; --raw omits the template"
        ) from None
    # The template has written the special tokens already.
    ids, ids_after = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (prompt_text, chat_text.rpartition(_ANSWER)[2].strip())
    )
    special = {
        *tokenizer.all_special_ids,
        *(n for n, t in tokenizer.added_tokens_decoder.items() if t.special),
    }
    # An ordinary token after the answer, for example a line end, must not end the generation.
    return PromptTokens(ids, [token for token in ids_after[:1] if token in special])


def _prompt_ids_with_begin_mark_or_refuse_empty(
    tokenizer: PreTrainedTokenizerBase, prompt: str
) -> list[int]:
    """Return the token ids of the prompt, after the tokenizer's begin mark, without an end mark."""
    from ortlaunch.worker.data.token_cache import begin_token_ids_added_to_text

    # A tokenizer may put other tokens before a text, too; the begin mark alone is used.
    begin = [
        token
        for token in begin_token_ids_added_to_text(tokenizer)
        if token == tokenizer.bos_token_id
    ]
    ids: list[int] = [*begin, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    if not ids:
        raise InputError("the prompt has no token; give some text")
    return ids


def _require_enough_positions(model: PreTrainedModel, prompt_tokens: int, new_tokens: int) -> None:
    """Raise InputError if prompt and new tokens exceed the model's positions."""
    max_positions = getattr(model.config, "max_position_embeddings", None)
    if max_positions is not None and prompt_tokens + new_tokens > max_positions:
        raise InputError(
            f"--max-new-tokens: got {new_tokens}; the prompt has {prompt_tokens} tokens, "
            f"and the model sees {max_positions} in all"
        )
