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

from ortlaunch.recipe.fields.data import HeldOut, is_written_by_chat_template
from ortlaunch.worker.data import ChatSamples, LabelledTexts, LoadedData, UserSamples
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.media.samples import LabelledImages, Recordings
from ortlaunch.worker.data.mixture import (
    indices_of_all_or_first_streamed_samples,
    streamed_sources_of_samples,
)
from ortlaunch.worker.data.samples import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Samples of each part that a training audits, in a fraction of a second; of samples longer than
# `_USUAL` tokens as many fewer, but not fewer than `_LEAST`.
AT_START = 1000
_USUAL_TOKENS = 256
_LEAST = 50
# A finding of this share of the rows ends a training, unless data.allow_findings has its name.
_SEVERE = {"no_answers": 0.9, "unknown_tokens": 0.5, "overlap": 0.5}
# Fewer rows are a first try, whose findings are printed only.
_LEAST_SEVERE_ROWS = 100
# Words such as <|im_end|> in a template's text.
_MARKS = re.compile(r"<\|[^|<>]+\|>|<\w+_of_\w+>")
# Tokens of a shingle; hashes of a row's signature, and those of them that make one bucket.
_SHINGLE = 3
_HASHES = 16
_BAND = 4
# Share of equal hashes from which two rows are near duplicates, an estimate of their Jaccard index.
_NEAR_SHARE = 0.75
# A shingle of more than this share of the rows is one of the template.
_COMMON_SHARE = 0.05
# Classes that are compared by name, and the share of the largest class below which one is rare.
_MOST_CLASSES = 200
_RARE_SHARE = 0.05
_EXAMPLE = 60
# Tokens before the first one of an example that differs.
_TOKENS_BEFORE = 2
# Share of unknown tokens that is no finding.
_USUAL_UNKNOWN_SHARE = 0.001
# Attributes of samples that have other samples within: packs, and parts held out.
_INNER = ("samples", "whole")
# Samples without tokens.
_OF_TENSORS = (UserSamples, LabelledImages, Recordings)
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
    def is_severe(self) -> bool:
        """Whether it ends a training, unless the recipe allows it."""
        return self.share >= _SEVERE.get(self.name, 2.0) and self.rows >= _LEAST_SEVERE_ROWS


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
    stream_text: str = ""
    """The part of a stream that the samples are from."""
    padded_length: int = 0
    """Tokens that each row is padded to; 0: rows are not padded to one length."""

    def summary_lines(self) -> list[str]:
        """Return lines for the user: lengths, the share of tokens that count, and findings."""
        sizes = [len(row.ids) for row in self.rows]
        learned = sum(row.learned.sum() for row in self.rows) / sum(sizes)
        span_text = f"{min(sizes)} to {max(sizes)} tokens a row, median {np.median(sizes):.0f}"
        length_text = f"{sizes[0]} tokens a row" if len({*sizes}) == 1 else span_text
        length_text += (
            f", {learned:.1%} of them learned"
            if 0 < learned < 1
            else ", all learned" * bool(learned)
        )
        padding = 1 - sum(sizes) / (len(sizes) * self.padded_length) if self.padded_length else 0.0
        if padding > _MUCH_PADDING:
            length_text += (
                f"; {padding:.0%} of each batch is padding: data.padding=longest avoids it"
            )
        return [
            f"{self.key}: {length_text} (audit of {len(sizes):,} rows from {self.samples:,} samples{self.stream_text})",
            *(f"{self.key}: {finding.text} ({finding.name})" for finding in self.findings),
        ]


# A training uses its audit twice.
@functools.lru_cache(maxsize=1)
def audit_training_and_evaluation_samples(
    data: LoadedData, max_samples: int = AT_START, audits_streams: bool = True
) -> list[PartAudit]:
    """Return the audits of the training and the evaluation samples; [] for custom data.

    Args:
        data: the data of the recipe.
        max_samples: largest number of samples of each part.
        audits_streams: whether to audit streams, too, and so to wait for a window of each.
    """
    recipe = data.recipe
    length = recipe.data.sequence_length or 1
    max_samples = max(_LEAST, min(max_samples, max_samples * _USUAL_TOKENS // length))
    part_audits = list[PartAudit]()
    for key, samples in data.parts.items():
        sources = [*_samples_of_each_source(samples)]
        if any(isinstance(item, _OF_TENSORS) for item in sources):
            continue
        is_streamed = bool(streamed_sources_of_samples(samples))
        if is_streamed and not audits_streams:
            continue
        available_indices = indices_of_all_or_first_streamed_samples(samples)
        audited_places = np.unique(
            np.linspace(
                0, len(available_indices) - 1, min(max_samples, len(available_indices))
            ).astype(int)
        )
        rows = [
            row
            for index in (
                available_indices[audited_place] for audited_place in audited_places.tolist()
            )
            for row in _audit_rows_of_sample(
                samples.sample(index, 0), index, recipe.model.traits.label
            )
        ]
        chats = [item for item in sources if isinstance(item, ChatSamples)]
        # Neighbouring windows of plain text share phrases, and nobody wrote them twice.
        finds_near = chats or any(isinstance(item, LabelledTexts) for item in sources)
        findings = itertools.chain(
            _unlearned_chat_findings(chats),
            _without_text(sources),
            _unknown_and_cut_token_findings(rows, length, data.tokenizer),
            _duplicate_conflicting_and_near_duplicate_findings(
                rows, data.tokenizer, includes_near_duplicates=bool(finds_near)
            ),
            _cut_empty_or_unended_answer_findings(rows, length, data.tokenizer) if chats else (),
        )
        stream_text = (
            " of the stream's next window; later ones are not audited" if is_streamed else ""
        )
        # Several rows are packed into a sample.
        is_padded = (
            len(rows) == len(audited_places)
            and not recipe.data.padding_bucket_or_multiple_of_8_lengths
        )
        part_audits.append(
            PartAudit(
                key,
                len(available_indices),
                rows,
                [*findings],
                stream_text,
                length if is_padded else 0,
            )
        )
    if len(part_audits) > 1:
        evaluation_source = recipe.data.evaluation
        is_same_source = (
            isinstance(evaluation_source, HeldOut) or recipe.data.train == evaluation_source
        )
        part_audits[1].findings.extend(
            _evaluation_rows_in_training_findings(
                part_audits[0].rows, part_audits[1].rows, data.tokenizer, is_same_source
            )
        )
    if part_audits:
        template = any(
            is_written_by_chat_template(source) for _, source in recipe.data.key_and_source_pairs()
        )
        part_audits[0].findings.extend(
            _split_template_token_findings(data.tokenizer) if template else ()
        )
        part_audits[0].findings.extend(
            _misspelt_class_findings(training_row_count_by_class_name(data))
        )
    return part_audits


def refuse_severe_findings_not_allowed(data: LoadedData, audits_streams: bool) -> None:
    """Refuse severe findings that the recipe does not allow.

    Args:
        data: the data of the recipe.
        audits_streams: whether to audit streams, too.

    Raises:
        DataError: with the first one.
    """
    for key, finding in (
        (part.key, finding)
        for part in audit_training_and_evaluation_samples(data, audits_streams=audits_streams)
        for finding in part.findings
    ):
        if finding.is_severe and finding.name not in data.recipe.data.allow_findings:
            raise DataError(
                f"{key}: {finding.text}; see `ortlaunch data show`, and correct the data, or train "
                f"all the same with data.allow_findings=[{finding.name}]"
            )


def training_row_count_by_class_name(data: LoadedData) -> Counter[str]:
    """Return the training rows of each class that has a name, for texts and images with a class."""
    counts = Counter[str]()
    for part in _samples_of_each_source(data.train):
        if data.class_names and type(part) in (LabelledTexts, LabelledImages):
            counts.update({data.class_names[n]: rows for n, rows in zip(part.labels, part.counts)})
    return counts


def _samples_of_each_source(samples: Any) -> Iterator[Any]:
    """Yield the samples of each source, without packs and parts around them."""
    for part in getattr(samples, "parts", [samples]):
        inner = [value for name, value in getattr(part, "__dict__", {}).items() if name in _INNER]
        yield from _samples_of_each_source(inner[0]) if inner else [part]


def _unlearned_chat_findings(chats: Sequence[ChatSamples]) -> Iterator[AuditFinding]:
    total = sum(len(chat_source.ends) for chat_source in chats)
    if unlearned := total - sum(len(chat_source.kept) for chat_source in chats):
        text = f"{unlearned:,} of {total:,} chats have no learned token"
        yield AuditFinding("no_answers", text, unlearned / total, total)


def _without_text(sources: Sequence[Any]) -> Iterator[AuditFinding]:
    for each in sources:
        count, location = each.empty if isinstance(each, LabelledTexts) else (0, "")
        if count:
            text = f"{location}: the text is empty ({count:,} of {len(each):,} are)"
            yield AuditFinding("empty_texts", text)


def _audit_rows_of_sample(sample: Any, sample_index: int, label_type: str) -> Iterator[AuditRow]:
    """Yield the rows of a sample: the documents of a pack, or one.

    Args:
        sample: the sample.
        sample_index: its index.
        label_type: the type of its labels, as in model_tasks.py; "": they are tokens.
    """
    ids = np.asarray(sample["input_ids"])
    labels = np.asarray(sample.get("labels", IGNORED))
    by_token = labels.shape == ids.shape
    learned = labels != IGNORED if by_token else np.zeros(len(ids), bool)
    # Where a token is masked, its label is the text.
    ids = np.where(learned, labels, ids) if not label_type and by_token else ids
    is_pack = "document_ids" in sample
    documents = np.asarray(
        sample["document_ids"] if is_pack else sample.get("attention_mask", np.ones(len(ids))) - 1
    )
    for document_index in range(int(documents.max()) + 1):
        is_in_document = documents == document_index
        # The padding of a pack is a document without labels.
        if not is_pack or learned[is_in_document].any():
            tags = labels[is_in_document] if label_type == "word" else None
            yield AuditRow(
                ids[is_in_document],
                learned[is_in_document],
                None if by_token else labels.item(),
                sample_index,
                tags,
            )


def _unknown_and_cut_token_findings(
    rows: Sequence[AuditRow], max_length: int, tokenizer: PreTrainedTokenizerBase
) -> Iterator[AuditFinding]:
    """Yield findings on tokens: unknown ones, two begin marks, and texts that are cut off."""
    unknown = tokenizer.unk_token_id
    begin = tokenizer.bos_token_id
    tokens = np.concatenate([row.ids for row in rows])
    # Of some tokenizers one mark is all of these.
    is_mark = unknown in (None, tokenizer.eos_token_id, begin, tokenizer.pad_token_id)
    share = 0.0 if is_mark else float((tokens == unknown).mean())
    double_begins = sum(begin is not None and [*row.ids[:2]] == [begin, begin] for row in rows)
    cut_rows = sum(row.label is not None and len(row.ids) >= max_length for row in rows)
    if share > _USUAL_UNKNOWN_SHARE:
        text = f"{share:.1%} of the tokens are unknown to the tokenizer"
        yield AuditFinding("unknown_tokens", text, share, len(rows))
    if double_begins:
        yield AuditFinding(
            "two_begin_marks", f"rows that begin with two begin marks: {double_begins:,}"
        )
    if cut_rows:
        text = f"{cut_rows:,} of {len(rows):,} rows reach data.sequence_length ({max_length})"
        yield AuditFinding("cut_rows", f"{text}; longer ones are cut")


def _duplicate_conflicting_and_near_duplicate_findings(
    rows: Sequence[AuditRow], tokenizer: PreTrainedTokenizerBase, includes_near_duplicates: bool
) -> Iterator[AuditFinding]:
    """Yield findings on equal and, with `includes_near_duplicates`, nearly equal rows."""
    first_rows = dict[bytes, AuditRow]()
    for row in rows:
        first_rows.setdefault(row.ids.tobytes(), row)
    repeated_rows = [row for row in rows if first_rows[row.ids.tobytes()] is not row]
    for name, faulty_rows, text in (
        ("duplicates", repeated_rows, "exact duplicates of other rows"),
        (
            "conflicting_labels",
            [row for row in repeated_rows if row.label != first_rows[row.ids.tobytes()].label],
            "duplicates of other rows with another label",
        ),
        (
            "near_duplicates",
            [*_rows_nearly_equal_to_earlier([*first_rows.values()])]
            if includes_near_duplicates
            else [],
            "near duplicates of other rows",
        ),
    ):
        if faulty_rows:
            example = _text_from_first_differing_token(
                faulty_rows[0], [*first_rows.values()], tokenizer
            )
            yield AuditFinding(name, f"{text}: {len(faulty_rows):,}, as {example}")


def _rows_nearly_equal_to_earlier(rows: Sequence[AuditRow]) -> Iterator[AuditRow]:
    """Yield rows that differ little from an earlier one, by MinHash (Broder 1997) in linear time."""
    long_rows = [row for row in rows if len(row.ids) > 2 * _SHINGLE]
    shingles_by_row = [np.unique(_shingle_hashes(row.ids)) for row in long_rows]
    if not shingles_by_row:
        return
    all_shingles, counts = np.unique(np.concatenate(shingles_by_row), return_counts=True)
    common = all_shingles[counts > max(10, _COMMON_SHARE * len(long_rows))]
    buckets = dict[tuple[int, bytes], NDArray[np.uint64]]()
    for row, shingles in zip(long_rows, shingles_by_row):
        rare_shingles = shingles[~np.isin(shingles, common, assume_unique=True)]
        if len(rare_shingles) < _SHINGLE:
            continue
        signature = (rare_shingles[:, None] * _FACTORS[:_HASHES] >> np.uint64(7)).min(0)
        bands = [
            (band_start, signature[band_start : band_start + _BAND].tobytes())
            for band_start in range(0, _HASHES, _BAND)
        ]
        others = [buckets.setdefault(band, signature) for band in bands]
        if any(
            other is not signature and (other == signature).mean() >= _NEAR_SHARE
            for other in others
        ):
            yield row


def _shingle_hashes(token_ids: _Ints) -> NDArray[np.uint64]:
    """Return a hash of each run of `_SHINGLE` tokens."""
    runs = np.lib.stride_tricks.sliding_window_view(token_ids.astype(np.uint64), _SHINGLE)
    mixed = (runs + np.uint64(1)) * _FACTORS[_HASHES:]
    hashes: NDArray[np.uint64] = np.bitwise_xor.reduce(mixed ^ (mixed >> np.uint64(29)), axis=1)
    return hashes


def _cut_empty_or_unended_answer_findings(
    rows: Sequence[AuditRow], max_length: int, tokenizer: PreTrainedTokenizerBase
) -> Iterator[AuditFinding]:
    """Yield findings on answers: cut off, empty, or without an end mark."""
    added = tokenizer.added_tokens_decoder.items()
    special = {
        *tokenizer.all_special_ids,
        *(token_id for token_id, added_token in added if added_token.special),
    }
    # It is no end mark, unless one mark is all of them.
    special -= {tokenizer.unk_token_id} - {tokenizer.eos_token_id}
    counts = Counter[str]()
    for row in rows:
        edges = np.flatnonzero(np.diff(row.learned, prepend=False, append=False))
        for answer_start, answer_end in edges.reshape(-1, 2).tolist():
            # A line end may follow the mark.
            ends = not special.isdisjoint(
                row.ids[max(answer_start, answer_end - 2) : answer_end + 1].tolist()
            )
            answer_tokens = {*row.ids[answer_start:answer_end].tolist()} - special
            empty = len(answer_tokens) <= 1 and not str(tokenizer.decode([*answer_tokens])).strip()
            counts["cut_answers" if answer_end == max_length else "no_end_mark"] += not ends
            counts.update({"answers": 1, "empty_answers": empty})
    for name, text in (
        ("cut_answers", f"are cut off by data.sequence_length ({max_length})"),
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


def _split_template_token_findings(tokenizer: PreTrainedTokenizerBase) -> Iterator[AuditFinding]:
    """Yield the marks of the chat template that are no tokens of the tokenizer."""
    vocabulary = tokenizer.get_vocab()
    if split_marks := sorted({*_MARKS.findall(str(tokenizer.chat_template))} - vocabulary.keys()):
        text = f"{', '.join(split_marks)} of the chat template are no tokens of data.tokenizer"
        yield AuditFinding("split_marks", f"{text}; is it another model's? (data.added_tokens)")


def _evaluation_rows_in_training_findings(
    train_rows: Sequence[AuditRow],
    evaluation_rows: Sequence[AuditRow],
    tokenizer: PreTrainedTokenizerBase,
    is_same_source: bool,
) -> Iterator[AuditFinding]:
    """Yield the evaluation rows that are training rows, too.

    Args:
        train_rows, evaluation_rows: the rows of the training and of the evaluation samples.
        tokenizer: their tokenizer.
        is_same_source: whether the recipe has one source for both, so that its user knows of it.
    """
    training_rows = {row.ids.tobytes() for row in train_rows}
    if shared_rows := [row for row in evaluation_rows if row.ids.tobytes() in training_rows]:
        text = f"{len(shared_rows):,} of {len(evaluation_rows):,} rows are in data.train, too, as "
        share = 0.0 if is_same_source else len(shared_rows) / len(evaluation_rows)
        example = _text_from_first_differing_token(shared_rows[0], train_rows, tokenizer)
        yield AuditFinding("overlap", text + example, share, len(evaluation_rows))


def _misspelt_class_findings(row_count_by_class: dict[str, int]) -> Iterator[AuditFinding]:
    """Yield rare classes whose name is nearly that of another one.

    Args:
        row_count_by_class: rows of each class.
    """
    names = sorted(row_count_by_class, key=lambda name: -row_count_by_class[name])[:_MOST_CLASSES]
    for class_index, name in enumerate(names):
        name_by_folded = {other.strip().lower(): other for other in names[:class_index]}
        rare = row_count_by_class[name] <= max(1, _RARE_SHARE * row_count_by_class[names[0]])
        close = difflib.get_close_matches(
            name.strip().lower(), name_by_folded, 1, 0.8 if rare else 1.0
        )
        if close:
            other = name_by_folded[close[0]]
            yield AuditFinding(
                "misspelt_class",
                f"class {name!r} (rows: {row_count_by_class[name]:,}) looks like {other!r} "
                f"({row_count_by_class[other]:,})",
            )


def _text_from_first_differing_token(
    row: AuditRow, other_rows: Sequence[AuditRow], tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the text of a row from the token in which it differs from all other rows."""
    start = max(
        (_common_prefix_tokens_or_0_if_equal(row.ids, other_row.ids) for other_row in other_rows),
        default=0,
    )
    # A token is often a part of a word.
    first_token = max(0, start - _TOKENS_BEFORE)
    text = str(tokenizer.decode(row.ids[first_token:].tolist(), skip_special_tokens=True))
    return repr(("... " if first_token else "") + " ".join(text.split())[:_EXAMPLE])


def _common_prefix_tokens_or_0_if_equal(token_ids: _Ints, other_token_ids: _Ints) -> int:
    """Return the number of tokens with which two rows begin alike; 0 for equal rows."""
    size = min(len(token_ids), len(other_token_ids))
    differs = np.flatnonzero(token_ids[:size] != other_token_ids[:size])
    equal = size if size < len(token_ids) else 0
    return int(differs[0]) if len(differs) else equal
