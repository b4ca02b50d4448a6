"""Why a repository of the Hugging Face hub cannot be read or written, and what helps.

huggingface_hub, transformers and `datasets` wrap one refusal in errors of their own.
"""

from __future__ import annotations

from ortlaunch.base.errors import error_chain, first_message_line

_ABSENT = {"RepositoryNotFoundError", "DatasetNotFoundError"}
_UNREACHABLE = {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError"}


def hub_error_reason_and_remedy(
    error: BaseException, repository: str, repository_prefix: str = "", is_writing: bool = False
) -> str:
    """Return the reason of an error on one line; of a hub's refusal or silence, with the remedy.

    Args:
        error: the error; an error that is not the hub's keeps its first line.
        repository: name on the hub, or name@revision.
        repository_prefix: the begin of its page's address: "datasets/"; "": of models.
        is_writing: whether the repository is written, not read.
    """
    from huggingface_hub import constants, get_token

    names = {item.__name__ for part in error_chain(error) for item in type(part).__mro__}
    server_messages = (getattr(item, "server_message", None) for item in error_chain(error))
    server_message = " ".join(next(filter(None, server_messages), "").split())
    name, _, revision = repository.partition("@")
    page = f"{constants.ENDPOINT}/{repository_prefix}{name}"
    if "RevisionNotFoundError" in names:
        return f"the hub has no revision {revision} of it: see {page}/commits/main"
    if hub_http_status_or_0(error) in (401, 403) or names & _ABSENT:
        state = "may not be written" if is_writing else "is missing on the hub, private or gated"
        token = "the token that is set gives no access" if get_token() else "no token is set"
        remedy = (
            "make one that may write" if is_writing else f"ask for access at {page}, make a token"
        )
        return (
            f"{name} {state}{server_message and f' ({server_message})'}, and {token}: {remedy} "
            f"({constants.ENDPOINT}/settings/tokens), and set HF_TOKEN, or type hf auth login; "
            "for other hosts launch.forward: [HF_TOKEN]"
        )
    if not names & _UNREACHABLE:
        return server_message or first_message_line(error)
    state = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{page} is not reached"
    remedy = f"type once where there is a network: hf download {name}"
    # Tokens of a commit are found without a network.
    remedy = "to train offline, give the commit as data.*.revision" if repository_prefix else remedy
    return f"{state}, and the cache has no {name}; {remedy}"


def hub_http_status_or_0(error: BaseException) -> int:
    """Return the HTTP status of the hub's answer; 0 if there is none."""
    answers = (getattr(chained_error, "response", None) for chained_error in error_chain(error))
    return max((getattr(answer, "status_code", 0) for answer in answers), default=0)
