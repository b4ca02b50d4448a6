"""Refusals of the hub, each from a local server, in every place that reads from it."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub import constants

from ortlaunch.base.errors import InputError
from ortlaunch.recipe.fields.data import Corpus, Data
from ortlaunch.worker.data.corpus import corpus_fingerprint, read_corpus_rows_up_to_limit
from ortlaunch.worker.data.streams.remote import remote_files_of_url
from ortlaunch.worker.data.tokenizer import load_tokenizer_with_added_tokens_or_none
from ortlaunch.worker.model.model import build_transformers_config_fitting_data_or_refuse
from ortmodule_tests.hub import Hub, hub
from tests.makers import bert

__all__ = ["hub"]

HUB = Corpus(format="hub", name="o/n")


def read_config(name: str) -> None:
    recipe = bert(model={"task": "masked-lm", "pretrained": name})
    data: Any = None
    build_transformers_config_fitting_data_or_refuse(recipe, data)


# Each function that reads from the hub; each has an error path of its own in a library.
READERS = {
    "tokenizer": lambda: load_tokenizer_with_added_tokens_or_none(
        Data.model_validate({"train": "python-docs", "tokenizer": "o/n"})
    ),
    "revision": lambda: read_config("o/n@v2"),
    "model": lambda: read_config("o/n"),
    "data": lambda: [*read_corpus_rows_up_to_limit(HUB)],
    "commit": lambda: corpus_fingerprint(HUB),
    "stream": lambda: remote_files_of_url("hf://datasets/o/n/*.parquet"),
}
# The hub answers 404 for a repository that is private, so that nobody learns that it exists.
CASES = {
    "gated": ((401, "GatedRepo"), "", "no token is set"),
    "not on the list": ((403, "GatedRepo"), "hf_secret", "the token that is set gives no access"),
    "private": ((404, "RepoNotFound"), "hf_secret", "the token that is set gives no access"),
    "wrong token": ((401, ""), "hf_secret", "the token that is set gives no access"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("reader", READERS)
def test_a_refusal(
    reader: str, case: str, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A repository that may not be read is named, with the token, its page and other hosts."""
    hub.denies, token, state = CASES[case]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    # A token of the person who runs the tests must not be sent.
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token or None)
    with pytest.raises(InputError) as raised:
        READERS[reader]()
    message = str(raised.value)
    page = f"{hub.address}/{'datasets/' if reader in ('data', 'commit', 'stream') else ''}o/n"
    assert f"and {state}: ask for access at {page}, make a token" in message
    assert (
        "set HF_TOKEN, or type hf auth login; for other hosts launch.forward: [HF_TOKEN]" in message
    )
    assert "\n" not in message
    # A message goes into logs and records that others read.
    assert "hf_secret" not in message


@pytest.mark.parametrize("reader", READERS)
def test_a_revision_that_is_missing(reader: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing revision is no matter of a token."""
    hub.denies = 404, "RevisionNotFound"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "nowhere")
    with pytest.raises(InputError, match=r"no revision .* of it: see http.*o/n/commits/main"):
        READERS[reader]()


@pytest.mark.parametrize("reader", [name for name in READERS if name != "stream"])
def test_a_hub_that_is_not_reached(reader: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the command that fills the cache is named."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "nowhere")
    with pytest.raises(InputError) as raised:
        READERS[reader]()
    assert "HF_HUB_OFFLINE is set, and the cache has no o/n; " in str(raised.value)
