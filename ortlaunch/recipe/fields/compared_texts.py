"""The sections `model.embedding` and `model.reranker`: losses that compare texts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ortlaunch.recipe.fields.section import (
    OTHER_MODEL,
    NameIn,
    Positive,
    Section,
    Text,
    convert_list_to_tuple,
    effect_rule,
)
from ortlaunch.tables.text_losses import EMBEDDING_LOSSES, RERANKER_LOSSES, TextLoss


class Embedding(Section, resume_rule=OTHER_MODEL):
    """One vector for each text, for task embedding, and the loss that compares the vectors.

    A sample is the texts of a row in the order of `text_columns`: a query, and documents.
    """

    loss: Annotated[str, NameIn(EMBEDDING_LOSSES)] = "multiple-negatives-ranking"
    """`multiple-negatives-ranking` (InfoNCE): the first document is the right one, those of the
    other samples of the batch, of all ranks, and the further columns are wrong ones. `cosent`,
    `cosine-mse`: pairs with a score in `label_column`. `triplet`: query, right and wrong document.
    `margin-mse`: as many wrong ones as there are columns, with the margin of a teacher in
    `label_column`: a number, or a list of one for each wrong document, or the scores of all
    documents. All as in sentence-transformers."""
    pooling: Literal["mean", "cls", "last"] = "mean"
    """Vector of a text: the mean of its tokens' vectors, the first token's, or the last one's."""
    normalize: bool = True
    """Whether vectors have length 1. Cosines, in most losses, do not depend on it."""
    temperature: Annotated[float, Field(gt=0)] = 0.05
    """Divides the cosines of `multiple-negatives-ranking` and `cosent`; 1 / `scale`."""
    symmetric: bool = False
    """For `multiple-negatives-ranking`: the mean of that loss and of the one that finds the query of
    each right document."""
    distance: Literal["euclidean", "cosine"] = "euclidean"
    """Distance of `triplet`."""
    margin: Annotated[float, Field(gt=0)] = 5.0
    """For `triplet`: how much farther the wrong document shall be."""
    dimensions: Annotated[tuple[Positive, ...], BeforeValidator(convert_list_to_tuple)] = ()
    """Lengths of the vector's beginnings that shall be embeddings, too, as [384, 128, 64]
    (Matryoshka): the loss is the sum over these lengths."""
    mini_batch: Annotated[Positive | None, effect_rule("the same values with other memory use")] = (
        None
    )
    """Texts of a pass: a large batch is computed in parts, whose activations are computed again in
    the backward pass, so that memory is that of one part (cached losses, GradCache). null: one
    pass."""
    query_prompt: Text | None = None
    """Text before the first text of each row, as "query: "."""
    document_prompt: Text | None = None
    """Text before the others, as "passage: "."""

    @property
    def traits(self) -> TextLoss:
        """The loss's row in the table."""
        return EMBEDDING_LOSSES[self.loss]


class Reranker(Section, resume_rule=OTHER_MODEL):
    """A number for each pair of a query and a document, for task reranker.

    A sample is the texts of a row in the order of `text_columns`: a query, and documents. The model
    reads the query with each document.
    """

    loss: Annotated[str, NameIn(RERANKER_LOSSES)] = "binary-cross-entropy"
    """`binary-cross-entropy`: of each pair, with a label from 0 to 1; `mse`: with any score.
    `listnet`: softmax over a row's documents. `margin-mse`: the margin of a teacher between the first
    and each other document. `label_column` has a number, or a list with one for each document.
    Without that column the first document is right (1) and the others are wrong (0). All as in
    sentence-transformers."""

    @property
    def traits(self) -> TextLoss:
        """The loss's row in the table."""
        return RERANKER_LOSSES[self.loss]
