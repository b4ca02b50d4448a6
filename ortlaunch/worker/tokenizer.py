"""The tokenizer of a run: loaded from a folder or the hub, or trained on the corpus once and cached."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from filelock import FileLock

from ortlaunch.cache import cache_root
from ortlaunch.errors import InputError
from ortlaunch.recipe.models import Data, TokenizerTraining
from ortlaunch.worker.corpus import documents, fingerprint

_BERT_WORDS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_LLAMA_WORDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}


def load_tokenizer(data: Data) -> Any:
    """A transformers tokenizer.

    Raises:
        InputError: it is neither a folder nor reachable on the hub.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if isinstance(data.tokenizer, TokenizerTraining):
        return PreTrainedTokenizerFast.from_pretrained(_trained(data, data.tokenizer))
    try:
        return AutoTokenizer.from_pretrained(data.tokenizer)
    except (OSError, ValueError) as error:
        raise InputError(
            f"data.tokenizer: cannot load {data.tokenizer!r}: {str(error).splitlines()[0]}; "
            "give a local folder, a hub id you can reach, or {train: wordpiece, vocab_size: 30522}"
        ) from None


def _trained(data: Data, training: TokenizerTraining) -> Path:
    """Folder of the tokenizer trained on the corpus; trained by whoever comes first on this machine."""
    key = hashlib.sha256(f"{fingerprint(data.train)} {training.train} {training.vocab_size}".encode()).hexdigest()[:16]
    folder = cache_root() / "tokenizers" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "COMPLETE").exists():
            make = _wordpiece if training.train == "wordpiece" else _bpe
            make(data, training.vocab_size).save_pretrained(folder)
            (folder / "COMPLETE").touch()
    return folder


def _wordpiece(data: Data, vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    words = list(_BERT_WORDS.values())
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=words, show_progress=False)
    tokenizer.train_from_iterator(documents(data.train), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_BERT_WORDS)


def _bpe(data: Data, vocab_size: int) -> Any:
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
    tokenizer.train_from_iterator(documents(data.train), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_LLAMA_WORDS)
