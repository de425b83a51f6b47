import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmtrain.balance import Grouping
from mmtrain.data import DataIndex, GroupStream, build_index
from mmtrain.data.synthetic.demo import train_tokenizer
from mmtrain.recipe.settings.schema import Recipe
from tests.data.rows import Row, row
from tests.data.steps import Dataset


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(iter(["What colour is the circle? red", "How many shapes? 3", "What is 1 + 2?"])).save(str(path))
    return path


@pytest.fixture
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read sources in this process, as systems do that cannot fork: a test that counts what is read sees no child."""
    monkeypatch.setattr("mmtrain.limited_reads.can_fork", lambda: False)


@pytest.fixture
def picture(tmp_path: Path) -> Callable[..., Path]:
    """Write an image into the sample folder."""

    def write(name: str, width: int = 16, height: int = 16, colour: str = "red", **options: Any) -> Path:
        path = tmp_path / name
        Image.new("RGB", (width, height), colour).save(path, **options)
        return path

    return write


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_path: Path) -> Callable[..., Recipe]:
    """Write rows as a data file and make a recipe that reads it; keywords override `data` settings."""

    def make(rows: list[Row], validation: list[Row] | None = None, **data: Any) -> Recipe:
        (tmp_path / "train.json").write_text(json.dumps(rows))
        settings: dict[str, Any] = {
            "sources": [{"path": tmp_path / "train.json"}],
            "tokenizer": tokenizer_path,
            "seq_len": 64,
            "image": {"min_pixels": 64, "max_pixels": 1024},
            "max_bad_rate": 1.0,
            "workers": 0,
        }
        if validation is not None:
            (tmp_path / "heldout.json").write_text(json.dumps(validation))
            settings["validation"] = [{"path": tmp_path / "heldout.json"}]
        vision = {"layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "patch": 8, "max_side": 8}
        llm = {"layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "vocab": 512}
        train = {"steps": 1, "global_batch": 2, "optimizer": {"lr": 1e-3}}
        model = {"vision": vision, "llm": llm}
        return Recipe.model_validate({"name": "t", "model": model, "data": settings | data, "train": train})

    return make


@pytest.fixture
def made(tmp_path: Path, recipe: Callable[..., Recipe]) -> Dataset:
    """Make a dataset of samples with no, one and two images."""

    def make(**data: Any) -> tuple[Recipe, DataIndex, GroupStream]:
        rng = np.random.default_rng(0)
        rows = []
        for s in range(12):
            names = [f"{s}-{i}.png" for i in range(s % 3)]
            for name in names:
                width, height = rng.integers(1, 4, 2) * 8
                Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(tmp_path / name)
            rows.append(row("x<image>" * len(names) + "why", f"answer {s}", *names, name=str(s)))
        made_recipe = recipe(rows, **data)
        index = build_index(made_recipe)
        return made_recipe, index, GroupStream(index.lengths, Grouping(made_recipe.data.seq_len, 100, 2), seed=0)

    return make
