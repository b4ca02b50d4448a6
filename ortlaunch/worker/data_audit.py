"""An audit of samples as the model will see them: faults of data that a training does not report.

Time and memory are linear in the audited rows, which are evenly spread over larger data.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ortlaunch.recipe.fields.data import HeldOut
from ortlaunch.worker.data import (
    ChatSamples,
    LabelledTexts,
    LabelSets,
    LoadedData,
    UserSamples,
)
from ortlaunch.worker.data.file_rows import DataError
from ortlaunch.worker.data.media.samples import LabelledImages, Recordings
from ortlaunch.worker.data.mixture import (
    indices_of_all_or_first_streamed_samples,
    streamed_sources_of_samples,
)
from ortlaunch.worker.data.samples import IGNORED
from ortlaunch.worker.data.streams.samples import StreamedSamples

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
_EXAMPLE = 60
# Share of unknown tokens that is no finding.
_USUAL_UNKNOWN_SHARE = 0.001
# Attributes of samples that have other samples within: packs, and parts held out.
_INNER = ("samples", "whole")
# Samples without tokens.
_OF_TENSORS = (UserSamples, LabelledImages, Recordings)
_Ints = NDArray[np.int64]
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
    """The label of the whole row: a class, a number, a list of classes, or the tokens to write;
    None: tokens have labels."""
    sample: int
    tags: _Ints | None = None
    """(tokens,): the class of each token, where words have classes."""
    longest: int = 0
    """Tokens of the longest text of a row with several."""


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
        streamed_chats = [
            item.streamed.chats
            for item in sources
            if isinstance(item, StreamedSamples) and item.streamed.chats
        ]
        row_findings = [
            *(item.row_findings for item in chats),
            *(item.row_findings() for item in streamed_chats),
        ]
        findings = itertools.chain(
            _unlearned_chat_findings(chats),
            _empty_text_findings(sources),
            _unknown_and_cut_token_findings(
                rows,
                # Longer ones have ended the start.
                length + (recipe.model.traits.label == "sequence" and not recipe.data.cut_long),
                bool(row_findings),
                data.tokenizer,
            ),
            (AuditFinding(*named) for each in row_findings for named in each.items()),
            _duplicate_findings(rows, data.tokenizer),
        )
        stream_text = (
            " of the stream's next window; later ones are not audited" if is_streamed else ""
        )
        # Several rows are packed into a sample.
        is_padded = (
            len(rows) == len(audited_places)
            and not recipe.data.padding_bucket_or_multiple_of_8_lengths
            and not recipe.model.traits.compares
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
        if data.class_names and type(part) in (LabelledTexts, LabelSets, LabelledImages):
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
        cut_chats = sum(chat_source.cut_before_answer for chat_source in chats)
        causes = {
            "are cut off before an answer (data.sequence_length)": cut_chats,
            "have nothing that counts in the loss (train_on, train_parts, train_key)": unlearned
            - cut_chats,
        }
        causes_text = ", ".join(f"{count:,} {cause}" for cause, count in causes.items() if count)
        text = f"{unlearned:,} of {total:,} chats have no learned token: {causes_text}"
        yield AuditFinding("no_answers", text, unlearned / total, total)


def _empty_text_findings(sources: Sequence[Any]) -> Iterator[AuditFinding]:
    for source in sources:
        count, location = source.empty if isinstance(source, LabelledTexts) else (0, "")
        if count:
            text = f"{location}: the text is empty ({count:,} of {len(source):,} are)"
            yield AuditFinding("empty_texts", text)


def _audit_rows_of_sample(sample: Any, sample_index: int, label_type: str) -> Iterator[AuditRow]:
    """Yield the rows of a sample: the documents of a pack, or one.

    Args:
        sample: the sample.
        sample_index: its index.
        label_type: the type of its labels, as in model_tasks.py; "": they are tokens.
    """
    ids = np.asarray(sample["input_ids"])
    if ids.ndim > 1:
        mask = np.asarray(sample["attention_mask"]) > 0
        all_ids = ids[mask]
        none_learned = np.zeros(len(all_ids), bool)
        longest = int(mask.sum(-1).max())
        yield AuditRow(all_ids, none_learned, None, sample_index, longest=longest)
        return
    labels = np.asarray(sample.get("labels", IGNORED))
    # A float for each class, of which there may be as many as tokens.
    is_class_vector = labels.ndim == 1 and labels.dtype.kind == "f"
    by_token = labels.shape == ids.shape and not is_class_vector and label_type != "sequence"
    learned = labels != IGNORED if by_token else np.zeros(len(ids), bool)
    if "start_positions" in sample:
        learned[int(sample["start_positions"]) : int(sample["end_positions"]) + 1] = True
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
            if is_class_vector:
                row_label = labels.nonzero()[0].tolist()
            else:
                row_label = (labels[labels != IGNORED] if labels.ndim else labels).tolist()
            yield AuditRow(
                ids[is_in_document],
                learned[is_in_document],
                None if by_token or "labels" not in sample else row_label,
                sample_index,
                tags,
            )


def _unknown_and_cut_token_findings(
    rows: Sequence[AuditRow],
    max_length: int,
    are_chats: bool,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[AuditFinding]:
    """Yield findings on tokens: unknown ones, and answers and labelled texts that are cut off."""
    unknown = tokenizer.unk_token_id
    tokens = np.concatenate([row.ids for row in rows])
    # Of some tokenizers one mark is all of these.
    is_mark = unknown in (
        None,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    share = 0.0 if is_mark else float((tokens == unknown).mean())
    cut_rows = sum(
        (
            len(row.ids) >= max_length
            and (row.label is not None or (are_chats and bool(row.learned[-1])))
        )
        or row.longest >= max_length
        for row in rows
    )
    if share > _USUAL_UNKNOWN_SHARE:
        text = f"{share:.1%} of the tokens are unknown to the tokenizer"
        yield AuditFinding("unknown_tokens", text, share, len(rows))
    if cut_rows:
        text = f"{cut_rows:,} of {len(rows):,} rows reach data.sequence_length ({max_length})"
        yield AuditFinding("cut_rows", f"{text}; longer ones are cut")


def _duplicate_findings(
    rows: Sequence[AuditRow], tokenizer: PreTrainedTokenizerBase
) -> Iterator[AuditFinding]:
    first_rows = dict[bytes, AuditRow]()
    for row in rows:
        first_rows.setdefault(row.ids.tobytes(), row)
    if repeated_rows := [row for row in rows if first_rows[row.ids.tobytes()] is not row]:
        text = f"exact duplicates of other rows: {len(repeated_rows):,}, as "
        yield AuditFinding("duplicates", text + _end_of_text(repeated_rows[0], tokenizer))


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
        example = _end_of_text(shared_rows[0], tokenizer)
        yield AuditFinding("overlap", text + example, share, len(evaluation_rows))


def _end_of_text(row: AuditRow, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the last characters of a row's text: chats and prompts begin alike."""
    text = " ".join(str(tokenizer.decode(row.ids.tolist(), skip_special_tokens=True)).split())
    return repr("... " * (len(text) > _EXAMPLE) + text[-_EXAMPLE:])
