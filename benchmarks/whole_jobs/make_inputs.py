"""Write the data and the models of the jobs: python make_inputs.py FOLDER.

Text is what every Python installation has: the language's reference, the standard library's
sources, and docstrings of installed packages, whose package is the class. Models have random
weights of a fixed seed, and tokenizers are trained on the text. Nothing is downloaded.
"""

import ast
import importlib.util
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CLASSES = {  # folders of the docstrings of a class, in a package
    "torch": ("torch", ["nn", "optim", "distributed"]),
    "numpy": ("numpy", ["."]),
    "stdlib": (None, ["."]),
    "transformers": ("transformers", ["models"]),
    "onnx": ("onnx", ["."]),
}
STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
TEXT_CHARACTERS = 2_300_000
CHATS = 200
# The assistant's words are marked, for losses on them alone.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def paragraphs_of_reference() -> list[str]:
    """Return the paragraphs of Python's language reference."""
    from pydoc_data.topics import topics

    return [
        text.strip()
        for topic in topics.values()
        for text in re.split(r"\n\s*\n", topic)
        if text.strip()
    ]


def write_text(path: Path) -> None:
    """Write the reference and sources of the standard library, as paragraphs."""
    parts = paragraphs_of_reference()
    size = 0
    for file in sorted(STANDARD_LIBRARY.glob("*.py")):
        source = re.sub(r"\n[ \t]*\n(\s*\n)*", "\n\n", file.read_text(errors="ignore"))
        parts.append(source)
        size += len(source)
        if size > TEXT_CHARACTERS:
            break
    path.write_text("\n\n".join(parts))


def write_classes(train: Path, evaluation: Path) -> None:
    """Write docstrings with the package that they are from: 2,000 and 400 rows."""
    rows = []
    for label, (package, folders) in CLASSES.items():
        root = STANDARD_LIBRARY
        if package is not None:
            spec = importlib.util.find_spec(package)
            assert spec is not None
            assert spec.origin is not None
            root = Path(spec.origin).parent
        texts = list(long_docstrings([root / folder for folder in folders]))
        random.Random(0).shuffle(texts)
        # Equal texts could be in both files.
        rows += [{"text": text, "label": label} for text in list(dict.fromkeys(texts))[:520]]
    random.Random(1).shuffle(rows)
    for path, part in ((train, rows[:2000]), (evaluation, rows[2000:2400])):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in part))


def long_docstrings(folders: list[Path]) -> Iterator[str]:
    """Yield the docstrings of classes and functions, at most about 3,000 of each folder."""
    for folder in folders:
        count = 0
        for file in sorted(folder.rglob("*.py")):
            if "site-packages" in str(file.relative_to(folder)) or count > 3000:
                continue
            try:
                tree = ast.parse(file.read_text(errors="ignore"))
            # Python's own tests have files with intended errors.
            except (SyntaxError, ValueError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    text = ast.get_docstring(node)
                    if text and len(text) > 60:
                        count += 1
                        yield " ".join(text.split())[:600]


def write_chats(path: Path) -> None:
    """Write chats of 6 to 12 turns about paragraphs of the reference."""
    random_numbers = random.Random(2)
    paragraphs = [
        re.sub(r"\s+", " ", text) for text in paragraphs_of_reference() if 80 < len(text) < 700
    ]
    lines = []
    for _ in range(CHATS):
        messages = []
        for _ in range(random_numbers.randint(3, 6)):
            text = random_numbers.choice(paragraphs)
            first, *others = text.split(". ")
            answer = ". ".join(others)[:350] or text[:350]
            messages += [
                {"role": "user", "content": f"Explain: {first[:120]}"},
                {"role": "assistant", "content": answer},
            ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    path.write_text("".join(lines))


def wordpiece_tokenizer(text: Path) -> Any:
    """Return a tokenizer as BERT's, trained on a file."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=8000, special_tokens=special, show_progress=False
    )
    made.train([str(text)], trainer)
    made.decoder = decoders.WordPiece()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=512, **dict(zip(names, special))
    )


def byte_tokenizer(text: Path) -> Any:
    """Return a byte-level BPE tokenizer with a chat template, trained on a file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=6000,
        special_tokens=["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train([str(text)], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_models(folder: Path, text: Path) -> None:
    """Write the models with random weights, each with its tokenizer."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    words = wordpiece_tokenizer(text)
    pieces = byte_tokenizer(text)
    bert = {
        "vocab_size": len(words),
        "max_position_embeddings": 128,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    torch.manual_seed(0)
    made = {
        "bert256": BertForMaskedLM(
            BertConfig(
                **bert,
                hidden_size=256,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=1024,
            )
        ),
        "llama256": LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(pieces),
                hidden_size=256,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=688,
                max_position_embeddings=512,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=0,
            )
        ),
        "bert64": BertForMaskedLM(
            BertConfig(
                **bert,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=256,
            )
        ),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        (pieces if name == "llama256" else words).save_pretrained(folder / name)


def main(folder: Path) -> None:
    """Write data/ and models/."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    write_text(data / "text.txt")
    write_classes(data / "classes-train.jsonl", data / "classes-evaluation.jsonl")
    write_chats(data / "chats.jsonl")
    # LLaMA-Factory's list of data sets.
    tags = {"role_tag": "role", "content_tag": "content"}
    roles = {"user_tag": "user", "assistant_tag": "assistant"}
    chats = {
        "file_name": "chats.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {**tags, **roles},
    }
    (data / "dataset_info.json").write_text(json.dumps({"chats": chats}))
    write_models(folder / "models", data / "text.txt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
