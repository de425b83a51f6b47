"""Producers in processes of their own, as `mmtrain data serve` starts them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from mmtrain.recipe import dump_recipe
from mmtrain.recipe.settings.schema import Recipe


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
        self.process = self._start([sys.executable, "-m", "mmtrain", *command])

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
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


class ServedInTerminal(Served):
    """A running `mmtrain data serve` in a terminal, which `process` holds: it closes when that is killed."""

    def __init__(self, recipe: Recipe, folder: Path, hang_up: str) -> None:
        """Let the terminal's shell handle SIGHUP by the command `hang_up`, or ignore it, and so does the producer."""
        self._hang_up, self._pid_file, self._code_file = hang_up, folder / "pid", folder / "code"
        super().__init__(recipe, folder)

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        script = f"""
            trap '{self._hang_up}' HUP
            "$@" & echo $! > {self._pid_file}
            while kill -0 $!; do wait $!; code=$?; done
            echo $code > {self._code_file}
        """
        shell = ["bash", "-c", script, "bash", *command]
        return super()._start([sys.executable, "-c", f"import pty; pty.spawn({shell})"])

    def has_ended(self) -> bool:
        """Whether the producer has ended."""
        return self._code_file.exists() and bool(self._code_file.read_text())

    def end_producer(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal the producer, if it has not ended."""
        if not self.has_ended():
            os.kill(int(self._pid_file.read_text()), number)

    def __exit__(self, *error: object) -> None:
        self.end_producer(signal.SIGKILL)
        super().__exit__(*error)

    @property
    def exit_code(self) -> int:
        """The exit code of the producer."""
        return int(self._code_file.read_text())
