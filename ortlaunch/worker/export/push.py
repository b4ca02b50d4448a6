"""`ortlaunch export --push`: the upload of an export to the hub, with its model card.

A request without a run only checks, before the export is made, whether the upload is possible.
huggingface_hub handles the token, of HF_TOKEN or `hf auth login`; it is never printed.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from ortlaunch.base.errors import InputError, LaunchError, MissingDependency
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.tables.tasks import PushRequest
from ortlaunch.worker.data.streams.hub import hub_error_reason_and_remedy


def run(request: PushRequest) -> None:
    """Check the repository, or push to it."""
    # Set before the import of huggingface_hub, which reads it then.
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if not request.run:
        require_token_and_create_repository(request.repo)
    else:
        commit_url = write_missing_model_card_and_upload_to_existing_repository(
            request.repo, RunDir(request.run), request.step, Path(request.folder)
        )
        print(f"pushed: {commit_url}")


def require_token_and_create_repository(repository: str) -> None:
    """Check that the upload is possible; a missing repository is created, private.

    Raises:
        InputError: there is no token, the token may not write to the repository, or its name is
            invalid.
        LaunchError: the hub cannot be reached.
        MissingDependency: huggingface_hub is not installed.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants, errors
    except ImportError:
        raise MissingDependency(
            "--push needs huggingface_hub, which comes with transformers"
        ) from None
    if constants.HF_HUB_OFFLINE:
        raise InputError("--push: HF_HUB_OFFLINE is set: nothing is sent to the hub")
    if not hub.get_token():
        raise InputError("--push: no token is set; export HF_TOKEN, or log in with `hf auth login`")
    try:
        hub.HfApi().create_repo(repository, private=True, exist_ok=True)
    except errors.HFValidationError as error:
        raise InputError(f"--push: {error}") from None
    except errors.HfHubHTTPError as error:
        raise InputError(
            f"--push {repository}: {hub_error_reason_and_remedy(error, repository, is_writing=True)}"
        ) from None
    # The errors of the HTTP library, which differs between versions of huggingface_hub.
    except Exception as error:
        raise LaunchError(
            f"--push: {constants.ENDPOINT} cannot be reached: {type(error).__name__}: {error}"
        ) from None


def write_missing_model_card_and_upload_to_existing_repository(
    repository: str, run: RunDir, checkpoint_step: int, export_folder: Path
) -> str:
    """Write the model card, unless the export has one, and upload the export in one commit.

    Returns:
        The address of the commit.

    Raises:
        LaunchError: the upload failed; the export stays.
    """
    import huggingface_hub as hub
    from huggingface_hub import errors

    from ortlaunch.worker.export.model_card import build_model_card

    card = export_folder / "README.md"
    if not card.exists():
        build_model_card(run, checkpoint_step, repository, export_folder).save(card)
    try:
        with warnings.catch_warnings():
            # The upload's warnings are printed once each, independent of the process's filters.
            warnings.simplefilter("default")
            commit = hub.HfApi().upload_folder(
                repo_id=repository,
                folder_path=export_folder,
                commit_message=f"Step {checkpoint_step} of {run.path.name}, by ortlaunch",
            )
    except errors.HfHubHTTPError as error:
        raise LaunchError(
            f"--push {repository}: "
            f"{hub_error_reason_and_remedy(error, repository, is_writing=True)}; the export is in {export_folder}"
        ) from None
    # Includes errors about metadata of the card that the hub refuses.
    except Exception as error:
        raise LaunchError(
            f"--push {repository}: {error}; the export is in {export_folder}"
        ) from None
    return str(commit.commit_url)
