"""What the steps of `first_gpu.py` find: rows, in JSON files, and what figures depend on."""

import functools
import json
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from mmtrain.costs.hardware import GIB
from mmtrain.planning.artifact.plan import Prediction
from scripts.gpu.limited import ROOT

Verdict = Literal["ok", "WRONG", "failed", "left out", ""]  # "": a figure, which is neither right nor wrong


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what was found, and whether that is right."""

    check: str
    found: str
    verdict: Verdict = ""


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2), encoding="utf-8")
    part.replace(path)


def first_json(text: str) -> dict[str, Any]:
    """Return the object that starts the first line with a brace and can be read; other lines may lie around it.

    >>> first_json("a library's {note}\\n{broken\\n{\\"a\\": 1}\\nbye")
    {'a': 1}
    """
    start = -1
    while True:
        start = text.index("{", start + 1)
        if start == 0 or text[start - 1] == "\n":
            try:
                found: dict[str, Any] = json.JSONDecoder().raw_decode(text, start)[0]
            except json.JSONDecodeError:
                continue
            return found


@functools.cache
def describe_machine() -> dict[str, str]:
    """Return what figures depend on."""
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": str(os.cpu_count())}
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    machine["commit"] = asked.stdout.strip() or "not a git checkout"
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name(0)
        machine["gpu_memory_gib"] = f"{card_memory_gib():.1f}"
        machine["gpus"] = str(torch.cuda.device_count())
        machine["cuda"] = str(torch.version.cuda)
        machine["cudnn"] = str(torch.backends.cudnn.version())
        machine["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return machine


def card_memory_gib() -> float:
    """Return the memory of the first GPU in GiB."""
    return torch.cuda.get_device_properties(0).total_memory / GIB


def predicted_allocation_gib(predicted: Prediction) -> float:
    """Return the GiB that torch's allocator should hold on the fullest rank at most.

    The margin of a plan is for what nobody can count, and communicators lie outside the allocator.
    """
    fullest = max(predicted.peak_memory_gib, key=lambda ranks: predicted.peak_memory_gib[ranks])
    kinds = predicted.memory_kinds_gib[fullest]
    return sum(gib for kind, gib in kinds.items() if kind not in ("margin", "communicators"))
