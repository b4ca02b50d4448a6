"""The tokenizer of a run: loaded from a folder or the hub, or trained on the corpus and cached."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from ortlaunch.base.cache import (
    add_cache_note,
    create_private_cache_folder_or_refuse,
    write_files_and_checksums_unless_they_match,
)
from ortlaunch.base.errors import InputError
from ortlaunch.base.json_types import Json
from ortlaunch.recipe.fields.data import Data, TokenizerTraining, has_chat_rows
from ortlaunch.recipe.fields.prompts import CHAT_TEMPLATES
from ortlaunch.recipe.inputs import (
    pretrained_files_in_folder,
    refuse_lfs_pointers_and_unreadable_files,
)
from ortlaunch.worker.data.chats.rows import message_contents_of_chats
from ortlaunch.worker.data.corpus import corpus_fingerprint, read_texts_with_fraction_of_corpus_read
from ortlaunch.worker.data.streams.hub import hub_error_reason_and_remedy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BERT_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
# The library's default limit: rarer characters would fill the vocabulary.
_MAX_CHARACTERS = 1000
# What both trainers take for the begin of one word, as in base64 or in a text without blanks.
_WORD = re.compile(r"\w+")
# A call for the date, which transformers gives to templates.
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
# Variables of a template that each call gives it.
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
_LONG_WORD = re.compile(r"\w{1000}|[^\w\s]{1000}")
_LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}


def load_tokenizer_with_added_tokens_or_none(
    data_fields: Data, trained_tokenizer_folder: Path | None = None
) -> Any:
    """Return the tokenizer of a recipe; None if the recipe has none.

    Args:
        data_fields: the recipe's data fields.
        trained_tokenizer_folder: folder of the tokenizer that existing weights were trained with;
            None: as `data_fields`.

    Raises:
        InputError: the tokenizer is neither a folder nor reachable on the hub.
    """
    if data_fields.tokenizer is None:
        return None
    tokenizer = _load_or_train_tokenizer(data_fields, trained_tokenizer_folder)
    if trained_tokenizer_folder is None and (
        data_fields.special_tokens or data_fields.added_tokens
    ):
        tokenizer.add_special_tokens(data_fields.special_tokens)
        tokenizer.add_tokens([*data_fields.added_tokens], special_tokens=True)
    # A kept tokenizer was saved with the chat template of its training.
    if data_fields.chat_template is not None and trained_tokenizer_folder is None:
        tokenizer.chat_template = _chat_template_text_of_name_text_or_file(
            data_fields.chat_template
        )
    if data_fields.template_arguments and trained_tokenizer_folder is None:
        tokenizer.chat_template = _template_with_default_variables(
            tokenizer, data_fields.template_arguments
        )
    has_date = any("date" in name for name in data_fields.template_arguments)
    if (
        trained_tokenizer_folder is None
        and isinstance(tokenizer.chat_template, str)
        and not has_date
    ):
        tokenizer.chat_template = _template_with_date_of_today(tokenizer.chat_template)
    return tokenizer


def _template_with_date_of_today(template: str) -> str:
    """Return a chat template with today's date in the place of its calls for it, and note that.

    A run that is continued on another day has the template of its tokenizer, so the same tokens.
    """
    dated = _TODAY.sub(lambda call: repr(time.strftime(call[2])), template)
    if dated != template:
        add_cache_note(
            f"data.chat_template: it writes today's date ({time.strftime('%Y-%m-%d')}), which this run "
            "and its export keep; a new run on another day has other tokens, unless "
            "data.template_arguments or data.chat_template gives a date"
        )
    return dated


def _template_with_default_variables(tokenizer: Any, default_by_variable: Json) -> str:
    """Return the tokenizer's chat template with values of its variables, which a call may replace.

    Raises:
        InputError: the template has no such variable.
    """
    template = str(tokenizer.chat_template or "")
    variables = {*_WORD.findall(template)} - {*_OWN_VARIABLES, *tokenizer.special_tokens_map}
    for name in default_by_variable:
        if name not in variables:
            raise InputError(
                f"data.template_arguments: {name} has no effect: the chat template has no such variable; "
                "leave it out"
            )
    # Python's form of a value is Jinja's, too. Transformers drops a line end after a statement.
    defaults = "".join(
        f"{{% set {name} = {name} if {name} is defined else {value!r} %}}"
        for name, value in default_by_variable.items()
    )
    return f"{defaults}{{{{ '' }}}}{template}"


def tokens_without_pretrained_weights(
    data_fields: Data, tokenizer: Any, embedding_rows: int
) -> list[str]:
    """Return the tokens that pretrained weights have not been trained on, without the padding.

    Args:
        data_fields: the recipe's data fields.
        tokenizer: the tokenizer that they make.
        embedding_rows: rows of the pretrained embeddings.
    """
    names = {*data_fields.special_tokens.values(), *data_fields.added_tokens}
    # A row of the embeddings may be spare, and its token new.
    own_vocabulary = _load_or_train_tokenizer(data_fields, None).get_vocab() if names else {}
    return sorted(
        word
        for word, token_id in tokenizer.get_vocab().items()
        if word != tokenizer.pad_token
        and (token_id >= embedding_rows or (word in names and word not in own_vocabulary))
    )


def _chat_template_text_of_name_text_or_file(template_or_path: str) -> str:
    """Return the text of a chat template, which is given by name, directly or as a file name."""
    if template_or_path in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[template_or_path]
    # Every template has braces; a file name with braces is not supported.
    if "{" in template_or_path:
        return template_or_path
    refuse_lfs_pointers_and_unreadable_files([template_or_path])
    try:
        return Path(template_or_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"data.chat_template: cannot read {template_or_path}: {reason}; the text of a template contains "
            "{{ }}"
        ) from None


def download_revision_or_keep_name(model_name: str) -> str:
    """Return the local folder of a hub id with a revision, NAME@REVISION; any other name as is.

    Raises:
        OSError: the hub has no such revision, or cannot be reached.
    """
    repository, mark, revision = model_name.partition("@")
    if not mark or os.path.exists(model_name):
        return model_name
    from huggingface_hub import snapshot_download

    # Copies of the weights in formats that transformers does not read.
    ignored_patterns = ["original/*", "*.gguf", "*.onnx", "*.h5", "*.msgpack"]
    return snapshot_download(repository, revision=revision, ignore_patterns=ignored_patterns)


def _load_or_train_tokenizer(data_fields: Data, trained_tokenizer_folder: Path | None) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if isinstance(data_fields.tokenizer, TokenizerTraining):
        return PreTrainedTokenizerFast.from_pretrained(
            trained_tokenizer_folder
            or _train_tokenizer_unless_cached(data_fields, data_fields.tokenizer)
        )
    refuse_lfs_pointers_and_unreadable_files(
        pretrained_files_in_folder(
            "data.tokenizer", str(trained_tokenizer_folder or data_fields.tokenizer)
        )
    )
    try:
        return AutoTokenizer.from_pretrained(
            trained_tokenizer_folder or download_revision_or_keep_name(str(data_fields.tokenizer))
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"data.tokenizer: cannot load {data_fields.tokenizer!r}: "
            f"{hub_error_reason_and_remedy(error, str(data_fields.tokenizer))}; "
            "give a local folder, a hub id you can reach, or {train: wordpiece, vocab_size: 30522}"
        ) from None


def _train_tokenizer_unless_cached(data_fields: Data, training: TokenizerTraining) -> Path:
    corpus = " ".join(corpus_fingerprint(part.source) for part in data_fields.parts)
    key = hashlib.sha256(f"{corpus} {training.train} {training.vocab_size}".encode()).hexdigest()[
        :16
    ]
    folder = create_private_cache_folder_or_refuse("tokenizers") / key
    # Of all processes that share the cache, the first one trains; the others wait.
    with FileLock(f"{folder}.lock"):
        write_files_and_checksums_unless_they_match(
            folder.with_suffix(".seal"),
            lambda: _train_save_and_list_tokenizer_files(folder, data_fields, training),
        )
    return folder


def _train_save_and_list_tokenizer_files(
    tokenizer_folder: Path, data_fields: Data, training: TokenizerTraining
) -> list[Path]:
    train_tokenizer = (
        _train_bert_wordpiece_tokenizer
        if training.train == "wordpiece"
        else _train_llama_byte_level_bpe_tokenizer
    )
    trained = train_tokenizer(data_fields, training.vocab_size)
    shutil.rmtree(tokenizer_folder, ignore_errors=True)
    trained.save_pretrained(tokenizer_folder)
    return [path for path in tokenizer_folder.rglob("*") if path.is_file()]


def _training_texts_with_long_words_cut(data_fields: Data) -> Iterator[str]:
    """Yield the texts of all sources, one source after the other; weights do not matter."""
    for part in data_fields.parts:
        for text in (
            message_contents_of_chats(part.source)
            if has_chat_rows(part.source)
            else (
                text
                for text, _ in read_texts_with_fraction_of_corpus_read(
                    part.source, joins_lists=True
                )
            )
        ):
            # The training's time grows with the square of a word's length.
            shortened_text, count = _LONG_WORD.subn(r"\g<0> ", text)
            if count:
                add_cache_note(
                    "data.tokenizer: words of more than 1,000 characters were cut to train it"
                )
            yield shortened_text


def _train_bert_wordpiece_tokenizer(data_fields: Data, vocab_size: int) -> PreTrainedTokenizerBase:
    # Trained twice: in a single pass the library numbers the `##x` tokens in the order of a hash
    # table, which differs between processes. The second pass has them in a fixed order.
    from tokenizers import decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    special = list(_BERT_TOKENS.values())
    counts = Counter[str]()
    all_characters = _train_wordpiece_vocabulary(
        _count_characters_passing_texts(_training_texts_with_long_words_cut(data_fields), counts),
        0,
        [],
        None,
    )
    characters = sorted((c for c in counts if c in all_characters), key=lambda c: (-counts[c], c))[
        :_MAX_CHARACTERS
    ]
    pieces = [f"##{c}" for c in sorted(characters) if f"##{c}" in all_characters]
    vocabulary = _train_wordpiece_vocabulary(
        _training_texts_with_long_words_cut(data_fields), vocab_size, special + pieces, characters
    )
    tokenizer = _lowercasing_bert_tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    ends = [(word, vocabulary[word]) for word in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=names, **_BERT_TOKENS
    )


def _train_wordpiece_vocabulary(
    texts: Iterable[str],
    vocabulary_size: int,
    first_tokens: list[str],
    allowed_characters: list[str] | None,
) -> dict[str, int]:
    """Train a WordPiece vocabulary: token to number.

    Args:
        texts: the corpus.
        vocabulary_size: tokens of the vocabulary.
        first_tokens: its first tokens, in this order.
        allowed_characters: the only characters to use; None: all characters of the corpus.
    """
    from tokenizers import models, trainers

    tokenizer = _lowercasing_bert_tokenizer(models.WordPiece(unk_token="[UNK]"))
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary_size,
        special_tokens=first_tokens,
        initial_alphabet=allowed_characters or [],
        limit_alphabet=1 << 20 if allowed_characters is None else len(allowed_characters),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return dict(tokenizer.get_vocab())


def _lowercasing_bert_tokenizer(tokenizer_model: Any) -> Any:
    from tokenizers import Tokenizer, normalizers, pre_tokenizers

    tokenizer = Tokenizer(tokenizer_model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _count_characters_passing_texts(
    texts: Iterable[str], count_by_character: Counter[str]
) -> Iterator[str]:
    from tokenizers import normalizers

    normalize = normalizers.BertNormalizer(lowercase=True).normalize_str
    for text in texts:
        count_by_character.update(normalize(text))
        yield text


def _train_llama_byte_level_bpe_tokenizer(
    data_fields: Data, vocab_size: int
) -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts_with_long_words_cut(data_fields), trainer)
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=names, **_LLAMA_TOKENS
    )
