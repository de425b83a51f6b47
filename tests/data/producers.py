"""Producers in processes of their own, as `mmtrain data serve` starts them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Self

from mmtrain.recipe import dump_recipe
from mmtrain.recipe.schema import Recipe


def asking(recipe: Recipe, *producers: str) -> Recipe:
    """Return the recipe of a trainer that uses these producers."""
    data = recipe.data.model_copy(update={"producers": producers})
    return recipe.model_copy(update={"data": data})


class Served:
    """A running `mmtrain data serve`."""

    def __init__(self, recipe: Recipe, folder: Path, address: str = "tcp://127.0.0.1:*", *changes: str) -> None:
        path = folder / "served.yaml"
        path.write_text(dump_recipe(recipe))
        sets = [argument for change in changes for argument in ("--set", change)]
        command = ["data", "serve", str(path), "--bind", address, "--workers", "1", "--json", *sets]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mmtrain", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    @property
    def address(self) -> str:
        """Wait until it listens, and return its address."""
        assert self.process.stdout is not None
        if not hasattr(self, "_address"):
            self._address = json.loads(self.process.stdout.readline())["address"]
        return self._address

    def end(self) -> tuple[int, str]:
        """Terminate it, and return its exit code and its stderr."""
        self.process.terminate()
        _, stderr = self.process.communicate()
        return self.process.returncode, stderr

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()
