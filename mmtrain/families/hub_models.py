"""Models of the Hugging Face hub, `org/name` or `org/name@revision`, fetched into the hub's cache on this machine.

Config, tokenizer and processors are fetched when a recipe is loaded, weights only when they are needed. The cache keeps
each commit in a folder of its own, so that whoever has the path of that folder has this commit and no other, and can
fetch what is missing there. The cache locks a file while it is fetched: of several ranks on a machine one fetches it,
and the others wait for it.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError
from mmtrain.families.folder_files import INDEX_FILE, SINGLE_FILE

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.][\w./-]*)?")
# Nothing that is executed, and no weights. The index of the weights is a JSON file.
_SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "NOTICE*")
# Subfolders hold the same weights in other formats, but one may hold chat templates.
_IN_SUBFOLDERS = tuple(f"*/{pattern}" for pattern in _SMALL_FILES if pattern != "*.jinja")
_CACHED_REPO_PREFIX, _SNAPSHOTS = "models--", "snapshots"  # models--ORG--NAME/snapshots/COMMIT


def is_hub_name(text: str) -> bool:
    """Return whether a text may be the name of a model of the hub. Relative paths of two parts look the same."""
    return _NAME.fullmatch(text) is not None


def is_model_of_hub(text: str, folder: Path | None = None) -> bool:
    """Return whether a text names a model of the hub: a folder of that name goes before it.

    folder: where a path of this text leads, if that is not relative to the working directory.
    """
    return is_hub_name(text) and not (folder or Path(text)).exists()


def hub_name_of(folder: Path) -> str | None:
    """Return the name of the model whose commit a folder of the hub's cache holds; None for other folders."""
    cached_repo = folder.parent.parent.name
    if folder.parent.name != _SNAPSHOTS or not cached_repo.startswith(_CACHED_REPO_PREFIX):
        return None
    return cached_repo.removeprefix(_CACHED_REPO_PREFIX).replace("--", "/")


def fetch_config(name: str) -> Path:
    """Fetch all files of a model but its weights; return their folder. What the cache has is not fetched again.

    Raises ModelFolderError.
    """
    repo, _, revision = name.partition("@")
    return _fetch(repo, revision or None, None, _SMALL_FILES, shows_progress=False)


def fetch_weights(folder: Path) -> None:
    """Fetch the weights of a folder of the hub's cache, unless it has them; leave other folders as they are.

    Raises ModelFolderError.
    """
    repo = hub_name_of(folder)
    if repo is None:
        return
    missing = [name for name in _weight_files(folder) if not (folder / name).exists()]
    if not missing:
        return
    _fetch(repo, folder.name, folder.parents[2], missing, shows_progress=True)
    lacking = [name for name in missing if not (folder / name).exists()]
    if lacking:
        raise ModelFolderError(
            f"{repo} of the hub has no {lacking[0]}; allowed: a model with weights in safetensors (pickled weights can "
            "run code and are not read)"
        )


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the files of weights, which the index lists if there is one."""
    try:
        names = set(json.loads((folder / INDEX_FILE).read_bytes())["weight_map"].values())
    except FileNotFoundError:
        return [SINGLE_FILE]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # whoever reads the weights says what is wrong with the index
    return sorted(name for name in names if isinstance(name, str) and name.endswith(".safetensors"))


def _fetch(repo: str, revision: str | None, cache: Path | None, files: Sequence[str], shows_progress: bool) -> Path:
    """Fetch files by patterns of their names; return the folder of the commit. Raises ModelFolderError."""
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise ModelFolderError(
            f"there is no folder {repo}, and fetching a model of that name from the hub needs the `huggingface_hub` "
            "package, which is not installed here: pip install 'mmtrain[hf]'"
        ) from None

    class Progress(huggingface_hub.utils.tqdm):  # type: ignore[misc]  # its types are not read here
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | ({} if shows_progress else {"disable": True}))

    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache,
            allow_patterns=list(files),
            ignore_patterns=list(_IN_SUBFOLDERS),
            tqdm_class=Progress,
        )
    except Exception as error:  # those of the library, of its HTTP client and of the disk
        raise ModelFolderError(_explain(error, repo, revision, huggingface_hub)) from None
    return Path(folder)


def _explain(error: Exception, repo: str, revision: str | None, hub: Any) -> str:
    """Return what went wrong when a model was fetched, and what to do."""
    errors, endpoint = hub.errors, hub.constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo} is gated: accept its terms at {endpoint}/{repo}, then log in with `hf auth login`, or set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} of the hub at {endpoint} has no branch, tag or commit {revision}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no folder {repo}, and the hub at {endpoint} has no model of that name that it shows you; log in "
            "with `hf auth login`, or set HF_TOKEN, if it is private"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{repo} is neither a folder nor complete in the cache {hub.constants.HF_HUB_CACHE}, and the hub at "
            f"{endpoint} cannot be reached from here (or HF_HUB_OFFLINE forbids it): fetch it where there is a network "
            f"with `hf download {repo}`, and name the folder"
        )
    return f"{repo} cannot be fetched from the hub at {endpoint}: {type(error).__name__}: {error}"
