"""Model folders with anything in their JSON files are inspected, or refused with a message."""

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmtrain.errors import MmtrainError
from mmtrain.families import FAMILIES
from mmtrain.system_errors import system_errors_named
from mmtrain.weights.inspect_folder import inspect_folder
from mmtrain.weights.tiny_model import write_tiny_model
from tests.fuzz.mutations import JSON_VALUES, mutate

# As folders hold them; others would take minutes to build, and say nothing about how a value is read.
VALUES = [value for value in JSON_VALUES if not isinstance(value, str) or len(value) < 5000]
NAMES = ("qwen2_vl", "internvl", "gemma3", "qwen3_vl", "qwen2_audio", "llava_next", "qwen3_5", "mixtral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_folders(tmp_path_factory.mktemp("models"))


def write_folders(root: Path) -> list[Path]:
    """Write a tiny model of each of some families."""
    for name in NAMES:
        write_tiny_model(FAMILIES[name], root / name, seed=0, num_train=4)
    return [root / name for name in NAMES]


def check(seed: int, folders: list[Path], scratch: Path) -> None:
    rng = random.Random(seed)
    source, folder = rng.choice(folders), scratch / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, copy_function=shutil.os.link)  # type: ignore[attr-defined]
    files = sorted(path.name for path in folder.glob("*.json") if path.name != "tokenizer.json")
    name = rng.choice(["config.json", *files])
    content: Any = json.loads((folder / name).read_text())
    for _ in range(rng.choice((1, 1, 2))):
        content = mutate(content, rng, VALUES)
    text = json.dumps(content)
    if rng.random() < 0.1:
        text = rng.choice(
            ("", "[" * 100_000, text[: len(text) // 2], text.replace("1", "9" * 5000, 1), "null", "\ud800")
        )
    (folder / name).unlink()
    (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        with contextlib.suppress(MmtrainError), system_errors_named():
            inspect_folder(folder)
    except Exception as error:
        shown = f"{source.name}/{name}: {type(error).__name__}: {error}"
        shutil.copy(folder / name, scratch / "found.json")
        raise AssertionError(f"seed {seed}: {shown:.300}; {text[:300]}") from error


def test_folders(folders: list[Path], tmp_path: Path) -> None:
    for seed in range(100):
        check(seed, folders, tmp_path)


@pytest.mark.slow  # two minutes
def test_many_folders(folders: list[Path], tmp_path: Path) -> None:
    for seed in range(100, 1100):
        check(seed, folders, tmp_path)
