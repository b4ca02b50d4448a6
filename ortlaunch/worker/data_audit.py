"""An audit of samples as the model will see them: faults of data that a training does not report.

Time and memory are linear in the audited rows, which are evenly spread over larger data.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ortlaunch.recipe.fields.data import HeldOut, uses_template
from ortlaunch.worker.data import Conversations, LabelledTexts, LoadedData, OwnSamples
from ortlaunch.worker.data.media.samples import LabelledImages, Recordings
from ortlaunch.worker.data.mixture import at_hand, streams_of
from ortlaunch.worker.data.reading import DataError
from ortlaunch.worker.data.samples import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Samples of each part that a training audits, in a fraction of a second; of samples longer than
# `_USUAL` tokens as many fewer, but not fewer than `_LEAST`.
AT_START = 1000
_USUAL = 256
_LEAST = 50
# A finding of this share of the rows ends a training, unless data.allow_findings has its name.
_SEVERE = {"no_answers": 0.9, "unknown_tokens": 0.5, "overlap": 0.5}
# Fewer rows are a first try, whose findings are printed only.
_ENOUGH = 100
# Words such as <|im_end|> in a template's text.
_MARKS = re.compile(r"<\|[^|<>]+\|>|<\w+_of_\w+>")
# Tokens of a shingle; hashes of a row's signature, and those of them that make one bucket.
_SHINGLE = 3
_HASHES = 16
_BAND = 4
# Share of equal hashes from which two rows are near duplicates, an estimate of their Jaccard index.
_NEAR = 0.75
# A shingle of more than this share of the rows is one of the template.
_COMMON = 0.05
# Classes that are compared by name, and the share of the largest class below which one is rare.
_MOST_CLASSES = 200
_RARE = 0.05
_EXAMPLE = 60
# Tokens before the first one of an example that differs.
_BEFORE = 2
# Share of unknown tokens that is no finding.
_FEW = 0.001
# Attributes of samples that have other samples within: packs, and parts held out.
_INNER = ("samples", "whole")
# Samples without tokens.
_OF_TENSORS = (OwnSamples, LabelledImages, Recordings)
_Ints = NDArray[np.int64]
_FACTORS = np.random.default_rng(0).integers(1, 1 << 62, (_HASHES + _SHINGLE)).astype(
    np.uint64
) * np.uint64(2) + np.uint64(1)


# A share of padding from which on a remedy is printed.
_MUCH_PADDING = 0.3


class AuditFinding(NamedTuple):
    """A fault of the data."""

    name: str
    text: str
    share: float = 0.0
    """Share of the rows or tokens, where it decides whether the finding is severe."""
    rows: int = 0
    """Rows of which it is a share."""

    @property
    def severe(self) -> bool:
        """Whether it ends a training, unless the recipe allows it."""
        return self.share >= _SEVERE.get(self.name, 2.0) and self.rows >= _ENOUGH


class AuditRow(NamedTuple):
    """A sample without its padding; of a pack, one of its chats."""

    ids: _Ints
    learned: NDArray[np.bool_]
    """(tokens,): whether a token counts in the loss."""
    label: Any
    """The label of the whole row: a class or a number; None: tokens have labels."""
    sample: int
    tags: _Ints | None = None
    """(tokens,): the class of each token, where words have classes."""


class PartAudit(NamedTuple):
    """The audit of the training or the evaluation samples."""

    key: str
    samples: int
    rows: list[AuditRow]
    """The audited rows."""
    findings: list[AuditFinding]
    of: str = ""
    """The part of a stream that the samples are from."""
    places: int = 0
    """Tokens that each row is padded to; 0: rows are not padded to one length."""

    def lines(self) -> list[str]:
        """Return lines for the user: lengths, the share of tokens that count, and findings."""
        sizes = [len(row.ids) for row in self.rows]
        learned = sum(row.learned.sum() for row in self.rows) / sum(sizes)
        span = f"{min(sizes)} to {max(sizes)} tokens a row, median {np.median(sizes):.0f}"
        counts = f"{sizes[0]} tokens a row" if len({*sizes}) == 1 else span
        counts += (
            f", {learned:.1%} of them learned"
            if 0 < learned < 1
            else ", all learned" * bool(learned)
        )
        padding = 1 - sum(sizes) / (len(sizes) * self.places) if self.places else 0.0
        if padding > _MUCH_PADDING:
            counts += f"; {padding:.0%} of each batch is padding: data.padding=longest avoids it"
        return [
            f"{self.key}: {counts} (audit of {len(sizes):,} rows from {self.samples:,} samples{self.of})",
            *(f"{self.key}: {each.text} ({each.name})" for each in self.findings),
        ]


# A training uses its audit twice.
@functools.lru_cache(maxsize=1)
def audits(data: LoadedData, most: int = AT_START, streams: bool = True) -> list[PartAudit]:
    """Return the audits of the training and the evaluation samples; [] for custom data.

    Args:
        data: the data of the recipe.
        most: largest number of samples of each part.
        streams: whether to audit streams, too, and so to wait for a window of each.
    """
    recipe = data.recipe
    length = recipe.data.sequence_length or 1
    most = max(_LEAST, min(most, most * _USUAL // length))
    made = list[PartAudit]()
    for key, samples in data.parts.items():
        sources = [*_sources(samples)]
        if any(isinstance(each, _OF_TENSORS) for each in sources):
            continue
        flows = bool(streams_of(samples))
        if flows and not streams:
            continue
        hand = at_hand(samples)
        chosen = np.unique(np.linspace(0, len(hand) - 1, min(most, len(hand))).astype(int))
        rows = [
            row
            for index in (hand[place] for place in chosen.tolist())
            for row in _rows(samples.sample(index, 0), index, recipe.model.traits.label)
        ]
        chats = [each for each in sources if isinstance(each, Conversations)]
        # Neighbouring windows of plain text share phrases, and nobody wrote them twice.
        apart = chats or any(isinstance(each, LabelledTexts) for each in sources)
        found = itertools.chain(
            _left_out(chats),
            _tokens(rows, length, data.tokenizer),
            _equal(rows, data.tokenizer, near=bool(apart)),
            _answers(rows, length, data.tokenizer) if chats else (),
        )
        of = " of the stream's next window; later ones are not audited" if flows else ""
        # Several rows are packed into a sample.
        is_padded = len(rows) == len(chosen) and not recipe.data.lengths
        made.append(PartAudit(key, len(hand), rows, [*found], of, length if is_padded else 0))
    if len(made) > 1:
        held = recipe.data.evaluation
        same = isinstance(held, HeldOut) or recipe.data.train == held
        made[1].findings.extend(_overlap(made[0].rows, made[1].rows, data.tokenizer, same))
    if made:
        template = any(uses_template(source) for _, source in recipe.data.sources())
        made[0].findings.extend(_split_marks(data.tokenizer) if template else ())
        made[0].findings.extend(_misspelt(class_counts(data)))
    return made


def require_sound(data: LoadedData, streams: bool) -> None:
    """Refuse severe findings that the recipe does not allow.

    Args:
        data: the data of the recipe.
        streams: whether to audit streams, too.

    Raises:
        DataError: with the first one.
    """
    for key, each in (
        (part.key, each) for part in audits(data, streams=streams) for each in part.findings
    ):
        if each.severe and each.name not in data.recipe.data.allow_findings:
            raise DataError(
                f"{key}: {each.text}; see `ortlaunch data show`, and correct the data, or train "
                f"all the same with data.allow_findings=[{each.name}]"
            )


def class_counts(data: LoadedData) -> Counter[str]:
    """Return the training rows of each class that has a name, for texts and images with a class."""
    counts = Counter[str]()
    for part in _sources(data.train):
        if data.class_names and type(part) in (LabelledTexts, LabelledImages):
            counts.update({data.class_names[n]: rows for n, rows in zip(part.labels, part.counts)})
    return counts


def _sources(samples: Any) -> Iterator[Any]:
    """Yield the samples of each source, without packs and parts around them."""
    for part in getattr(samples, "parts", [samples]):
        inner = [value for name, value in getattr(part, "__dict__", {}).items() if name in _INNER]
        yield from _sources(inner[0]) if inner else [part]


def _left_out(chats: Sequence[Conversations]) -> Iterator[AuditFinding]:
    total = sum(len(each.ends) for each in chats)
    if without := total - sum(len(each.kept) for each in chats):
        text = f"{without:,} of {total:,} chats have no learned token"
        yield AuditFinding("no_answers", text, without / total, total)


def _rows(sample: Any, index: int, label: str) -> Iterator[AuditRow]:
    """Yield the rows of a sample: the documents of a pack, or one.

    Args:
        sample: the sample.
        index: its index.
        label: the type of its labels, as in model_tasks.py; "": they are tokens.
    """
    ids = np.asarray(sample["input_ids"])
    labels = np.asarray(sample.get("labels", IGNORED))
    by_token = labels.shape == ids.shape
    learned = labels != IGNORED if by_token else np.zeros(len(ids), bool)
    # Where a token is masked, its label is the text.
    ids = np.where(learned, labels, ids) if not label and by_token else ids
    is_pack = "document_ids" in sample
    documents = np.asarray(
        sample["document_ids"] if is_pack else sample.get("attention_mask", np.ones(len(ids))) - 1
    )
    for number in range(int(documents.max()) + 1):
        of = documents == number
        # The padding of a pack is a document without labels.
        if not is_pack or learned[of].any():
            tags = labels[of] if label == "word" else None
            yield AuditRow(ids[of], learned[of], None if by_token else labels.item(), index, tags)


def _tokens(
    rows: Sequence[AuditRow], length: int, tokenizer: PreTrainedTokenizerBase
) -> Iterator[AuditFinding]:
    """Yield findings on tokens: unknown ones, two begin marks, and texts that are cut off."""
    unknown = tokenizer.unk_token_id
    begin = tokenizer.bos_token_id
    tokens = np.concatenate([row.ids for row in rows])
    # Of some tokenizers one mark is all of these.
    is_mark = unknown in (None, tokenizer.eos_token_id, begin, tokenizer.pad_token_id)
    share = 0.0 if is_mark else float((tokens == unknown).mean())
    twice = sum(begin is not None and [*row.ids[:2]] == [begin, begin] for row in rows)
    cut = sum(row.label is not None and len(row.ids) >= length for row in rows)
    if share > _FEW:
        text = f"{share:.1%} of the tokens are unknown to the tokenizer"
        yield AuditFinding("unknown_tokens", text, share, len(rows))
    if twice:
        yield AuditFinding("two_begin_marks", f"rows that begin with two begin marks: {twice:,}")
    if cut:
        text = f"{cut:,} of {len(rows):,} rows reach data.sequence_length ({length})"
        yield AuditFinding("cut_rows", f"{text}; longer ones are cut")


def _equal(
    rows: Sequence[AuditRow], tokenizer: PreTrainedTokenizerBase, near: bool
) -> Iterator[AuditFinding]:
    """Yield findings on equal and, with `near`, nearly equal rows."""
    first = dict[bytes, AuditRow]()
    for row in rows:
        first.setdefault(row.ids.tobytes(), row)
    again = [row for row in rows if first[row.ids.tobytes()] is not row]
    for name, found, text in (
        ("duplicates", again, "exact duplicates of other rows"),
        (
            "conflicting_labels",
            [row for row in again if row.label != first[row.ids.tobytes()].label],
            "duplicates of other rows with another label",
        ),
        (
            "near_duplicates",
            [*_near([*first.values()])] if near else [],
            "near duplicates of other rows",
        ),
    ):
        if found:
            example = _text(found[0], [*first.values()], tokenizer)
            yield AuditFinding(name, f"{text}: {len(found):,}, as {example}")


def _near(rows: Sequence[AuditRow]) -> Iterator[AuditRow]:
    """Yield rows that differ little from an earlier one, by MinHash (Broder 1997) in linear time."""
    kept = [row for row in rows if len(row.ids) > 2 * _SHINGLE]
    found = [np.unique(_shingles(row.ids)) for row in kept]
    if not found:
        return
    known, counts = np.unique(np.concatenate(found), return_counts=True)
    common = known[counts > max(10, _COMMON * len(kept))]
    buckets = dict[tuple[int, bytes], NDArray[np.uint64]]()
    for row, shingles in zip(kept, found):
        own = shingles[~np.isin(shingles, common, assume_unique=True)]
        if len(own) < _SHINGLE:
            continue
        signature = (own[:, None] * _FACTORS[:_HASHES] >> np.uint64(7)).min(0)
        bands = [(at, signature[at : at + _BAND].tobytes()) for at in range(0, _HASHES, _BAND)]
        others = [buckets.setdefault(band, signature) for band in bands]
        if any(other is not signature and (other == signature).mean() >= _NEAR for other in others):
            yield row


def _shingles(ids: _Ints) -> NDArray[np.uint64]:
    """Return a hash of each run of `_SHINGLE` tokens."""
    runs = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), _SHINGLE)
    mixed = (runs + np.uint64(1)) * _FACTORS[_HASHES:]
    found: NDArray[np.uint64] = np.bitwise_xor.reduce(mixed ^ (mixed >> np.uint64(29)), axis=1)
    return found


def _answers(
    rows: Sequence[AuditRow], length: int, tokenizer: PreTrainedTokenizerBase
) -> Iterator[AuditFinding]:
    """Yield findings on answers: cut off, empty, or without an end mark."""
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(number for number, each in added if each.special)}
    # It is no end mark, unless one mark is all of them.
    special -= {tokenizer.unk_token_id} - {tokenizer.eos_token_id}
    counts = Counter[str]()
    for row in rows:
        edges = np.flatnonzero(np.diff(row.learned, prepend=False, append=False))
        for first, after in edges.reshape(-1, 2).tolist():
            # A line end may follow the mark.
            ends = not special.isdisjoint(row.ids[max(first, after - 2) : after + 1].tolist())
            words = {*row.ids[first:after].tolist()} - special
            empty = len(words) <= 1 and not str(tokenizer.decode([*words])).strip()
            counts["cut_answers" if after == length else "no_end_mark"] += not ends
            counts.update({"answers": 1, "empty_answers": empty})
    for name, text in (
        ("cut_answers", f"are cut off by data.sequence_length ({length})"),
        (
            "no_end_mark",
            "have no end mark, so the model does not learn to end an answer: write {{ eos_token }} "
            "after them in data.chat_template, or name the template's mark, as "
            "data.special_tokens={eos_token: '<|im_end|>'}",
        ),
        ("empty_answers", "are empty"),
    ):
        if counts[name]:
            yield AuditFinding(name, f"{counts[name]:,} of {counts['answers']:,} answers {text}")


def _split_marks(tokenizer: PreTrainedTokenizerBase) -> Iterator[AuditFinding]:
    """Yield the marks of the chat template that are no tokens of the tokenizer."""
    known = tokenizer.get_vocab()
    if split := sorted({*_MARKS.findall(str(tokenizer.chat_template))} - known.keys()):
        text = f"{', '.join(split)} of the chat template are no tokens of data.tokenizer"
        yield AuditFinding("split_marks", f"{text}; is it another model's? (data.added_tokens)")


def _overlap(
    train: Sequence[AuditRow],
    rows: Sequence[AuditRow],
    tokenizer: PreTrainedTokenizerBase,
    same: bool,
) -> Iterator[AuditFinding]:
    """Yield the evaluation rows that are training rows, too.

    Args:
        train, rows: the rows of the training and of the evaluation samples.
        tokenizer: their tokenizer.
        same: whether the recipe has one source for both, so that its user knows of it.
    """
    known = {row.ids.tobytes() for row in train}
    if found := [row for row in rows if row.ids.tobytes() in known]:
        text = f"{len(found):,} of {len(rows):,} rows are in data.train, too, as "
        share = 0.0 if same else len(found) / len(rows)
        example = _text(found[0], train, tokenizer)
        yield AuditFinding("overlap", text + example, share, len(rows))


def _misspelt(counts: dict[str, int]) -> Iterator[AuditFinding]:
    """Yield rare classes whose name is nearly that of another one.

    Args:
        counts: rows of each class.
    """
    names = sorted(counts, key=lambda name: -counts[name])[:_MOST_CLASSES]
    for number, name in enumerate(names):
        folded = {other.strip().lower(): other for other in names[:number]}
        rare = counts[name] <= max(1, _RARE * counts[names[0]])
        close = difflib.get_close_matches(name.strip().lower(), folded, 1, 0.8 if rare else 1.0)
        if close:
            other = folded[close[0]]
            yield AuditFinding(
                "misspelt_class",
                f"class {name!r} (rows: {counts[name]:,}) looks like {other!r} ({counts[other]:,})",
            )


def _text(row: AuditRow, others: Sequence[AuditRow], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a row from the token in which it differs from all other rows."""
    start = max((_shared(row.ids, each.ids) for each in others), default=0)
    # A token is often a part of a word.
    first = max(0, start - _BEFORE)
    text = str(tokenizer.decode(row.ids[first:].tolist(), skip_special_tokens=True))
    return repr(("... " if first else "") + " ".join(text.split())[:_EXAMPLE])


def _shared(ids: _Ints, others: _Ints) -> int:
    """Return the number of tokens with which two rows begin alike; 0 for equal rows."""
    size = min(len(ids), len(others))
    differs = np.flatnonzero(ids[:size] != others[:size])
    equal = size if size < len(ids) else 0
    return int(differs[0]) if len(differs) else equal
