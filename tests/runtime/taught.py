"""A model whose answers are known, because it was taught them."""

import json
from pathlib import Path
from typing import Any

from PIL import Image

from mmtrain.data.synthetic.demo import train_tokenizer
from mmtrain.recipe import Recipe
from tests.data.rows import Row, row
from tests.runtime.models import recipe, teach

COLOURS = ["red", "green", "blue"]


def asking(template: str | None, question: Row) -> Row:
    return question | ({"template": template} if template else {})


def colour_rows(folder: Path, template: str | None = "colour") -> list[Row]:
    for colour in COLOURS:
        Image.new("RGB", (16, 16), colour).save(folder / f"{colour}.png")
    return [asking(template, row("<image>What colour?", colour, f"{colour}.png")) for colour in COLOURS]


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text(json.dumps(rows))
    return path


class Taught:
    """A run whose model knows three colours by sight, and one sum by heart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._num_recipes = 0
        self.rows = [*colour_rows(folder), asking("sum", row("What is 1 + 2?", "3"))]
        rare = asking("colour", row("What else?", "blue"))  # makes blue the most frequent answer
        texts = (turn["value"] for r in self.rows for turn in r["conversations"])
        train_tokenizer(texts).save(str(folder / "tokenizer.json"))
        self.settings = self.recipe([*self.rows, rare], self.rows)
        self.model = teach(self.settings)

    def recipe(self, train: list[Row], heldout: list[Row], **data: Any) -> Recipe:
        """Return a recipe with data files of its own, so that those of an earlier recipe stay as they are."""
        self._num_recipes += 1
        names = (f"{kind}{self._num_recipes}.json" for kind in ("train", "heldout"))
        paths = [write(self.folder / name, rows) for name, rows in zip(names, (train, heldout), strict=True)]
        made = recipe(self.folder / "tokenizer.json", *paths)
        return made.model_copy(update={"data": made.data.model_copy(update=data)})
