"""Publish an exported folder on the Hugging Face hub."""

from pathlib import Path
from shlex import quote
from typing import Any

from mmtrain.errors import RunError, UserError
from mmtrain.extras import HUB, require_extra
from mmtrain.families.hub_models import is_hub_name
from mmtrain.redaction import Redactor


def create_repository(repo: str, *, public: bool) -> None:
    """Create a model's repository on the hub unless it exists, before any weights are written.

    A new one is private unless `public`; one that exists stays as it is.

    Raises:
        UserError: the name is none of a repository, or `huggingface_hub` is not installed.
        RunError: the hub cannot be reached, or does not let this user write there.
    """
    if not is_hub_name(repo) or "@" in repo:
        raise UserError(f"--push: found {repo!r}; allowed: the name of a repository, ORG/NAME")
    require_extra(HUB, "--push")
    import huggingface_hub

    try:
        huggingface_hub.HfApi().create_repo(repo, private=not public, exist_ok=True)
    except Exception as error:  # those of the library, and of its HTTP client
        raise RunError(_explain(error, repo, huggingface_hub)) from None


def push_folder(folder: Path, repo: str, message: str) -> str:
    """Upload all files of a folder as one commit; return its address.

    Raises:
        RunError: the upload broke off; the message says how it goes on.
    """
    import huggingface_hub

    try:
        commit = huggingface_hub.HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except Exception as error:  # those of the library, and of its HTTP client
        raise RunError(
            f"{_explain(error, repo, huggingface_hub)}. {folder} is complete; `hf upload {repo} {quote(str(folder))}` "
            "uploads it, without what has arrived"
        ) from None
    return str(commit.commit_url)


def _explain(error: Exception, repo: str, hub: Any) -> str:
    """Return why the hub took nothing, and what to do, without credentials."""
    endpoint = hub.constants.ENDPOINT
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(error, hub.errors.LocalTokenNotFoundError) or status == 401:
        return (
            f"--push {repo}: the hub at {endpoint} does not know you: log in with `hf auth login`, or set HF_TOKEN to "
            "a token that may write"
        )
    if status == 403:
        return f"--push {repo}: you may not write there; name a repository of yours, or use a token that may write"
    first_line = (str(error).splitlines() or [""])[0]
    return Redactor()(f"--push {repo}: the hub at {endpoint} took nothing: {type(error).__name__}: {first_line}")
