"""Values of other tools -> the recipe's values, and the closest of several names to a name.

Independent of the recipe's models.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable

# A tool's value -> the recipe's value, only where likeness does not find it.
TRANSLATED_VALUES: dict[str, str] = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "half": "fp16",
    "float16": "fp16",
    # Lightning's and llm-foundry's names of precisions.
    "16_mixed": "fp16",
    "amp_fp16": "fp16",
    "amp_bf16": "bf16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "full": "fp32",
    # `mixed_precision: no` of Accelerate.
    "no": "fp32",
    "mlm": "masked-lm",
    "fill_mask": "masked-lm",
    "clm": "causal-lm",
    "text_generation": "causal-lm",
    # LLaMA-Factory's stages; pt is pretraining on text.
    "sft": "causal-lm",
    "pt": "causal-lm",
    "nsp": "pretraining",
    "text_classification": "sequence-classification",
    "seq_cls": "sequence-classification",
    "multi_label": "multi-label-classification",
    "multilabel_classification": "multi-label-classification",
    "summarization": "seq2seq",
    "translation": "seq2seq",
    "text2text_generation": "seq2seq",
    "seq_2_seq_lm": "seq2seq",
    "squad": "question-answering",
    "swag": "multiple-choice",
    "token_cls": "token-classification",
    "ner": "token-classification",
    "regression": "sequence-regression",
    # Without weight decay AdamW computes the same as Adam.
    "adam": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "fused_adam",
    "adamw_ort_fused": "fused_adam",
    "fused_lamb": "lamb",
    "poly": "polynomial",
    "cosine_with_warmup": "cosine",
    # There are no restarts here: the plain cosine is the nearest.
    "cosine_with_restarts": "cosine",
    "constant_with_warmup": "constant",
    # DeepSpeed's schedulers: WarmupLR keeps its rate after the warm-up.
    "warmuplr": "constant",
    "warmupdecaylr": "linear",
    # Launchers of other tools that start one process for each GPU, as torchrun does.
    "deepspeed": "torchrun",
    "accelerate": "torchrun",
    "mpirun": "mpi",
    "openmpi": "mpi",
    "mpich": "mpi",
    "onnxruntime": "ort",
    "onnx": "ort",
    "ortmodule": "ort",
    # Inductor is torch.compile's default backend.
    "torch.compile": "inductor",
    "compile": "inductor",
    "pytorch": "eager",
    "torch": "eager",
    # torch's sdpa uses flash kernels where they apply.
    "flash_attention_2": "sdpa",
    "flash": "sdpa",
    "fa2": "sdpa",
    "json": "jsonl",
    "txt": "text",
    "tsv": "csv",
    "imagefolder": "folder",
    "audiofolder": "folder",
    "images": "folder",
    "huggingface": "hub",
    "hf": "hub",
    "byte_level": "bpe",
    "tb": "tensorboard",
}

# Fields and values that other tools have, without a like one here -> what to do.
REMEDIES = {
    (
        "attention",
        "flash_attention_2",
    ): "set sdpa, which is flash attention on a GPU in fp16 and bf16",
    ("format", "arrow"): 'to convert: python -c "import datasets; '
    "datasets.load_from_disk('FOLDER').to_json('a.jsonl')\"",
    ("format", "conll"): "to convert: python -c \"import json, sys; [print(json.dumps({'text': "
    "[w.split()[0] for w in s], 'label': [w.split()[-1] for w in s]})) for s in map(str.splitlines, "
    "sys.stdin.read().strip().split('\\n\\n'))]\" < a.conll > a.jsonl",
    ("format", "tfrecord"): "only TensorFlow reads it: write its examples as jsonl there",
    ("format", "xlsx"): 'to convert: python -c "import pandas; '
    "pandas.read_excel('a.xlsx').to_csv('a.csv', index=False)\" (needs openpyxl)",
}


def normalize_word(word: str) -> str:
    """Return a word in lower case with underscores, as case, dashes and blanks do not matter."""
    return word.lower().replace("-", "_").replace(" ", "_")


def word_likeness(word: str, candidate: str) -> float:
    """Return the likeness of two words, from 0 (nothing in common) to 1.

    A pair that cannot reach 0.5 by its letters counts as 0.
    """
    normal_word = normalize_word(word)
    normal_candidate = normalize_word(candidate)
    # SequenceMatcher is slow; this upper bound of its ratio rules most pairs out.
    shared_letters = sum((Counter(normal_word) & Counter(normal_candidate)).values())
    return (
        difflib.SequenceMatcher(None, normal_word, normal_candidate).ratio()
        if 4 * shared_letters >= len(normal_word) + len(normal_candidate)
        else 0.0
    )


def closest_or_translated_name_or_none(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that `word` most likely means, by translation or likeness, or None."""
    candidates = tuple(candidates)
    translated_word = TRANSLATED_VALUES.get(normalize_word(word))
    if translated_word in candidates:
        return translated_word
    best_candidate = max(
        candidates, key=lambda candidate: word_likeness(word, candidate), default=""
    )
    # A lower value would suggest unrelated words.
    return best_candidate if word_likeness(word, best_candidate) >= 0.6 else None
