"""What a block of `first_gpu.py` found: rows of a table, and a JSON file."""

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from mmtrain.planning.artifact.plan import Prediction

Verdict = Literal["ok", "WRONG", "failed", "left out", ""]  # "": a figure, which is neither right nor wrong


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, what was found, and whether that is right."""

    check: str
    found: str
    verdict: Verdict = ""


@dataclass
class BlockReport:
    """The rows of one block."""

    number: int
    title: str
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def is_wrong(self) -> bool:
        """Whether something computed wrong numbers, so that figures of later blocks would mean nothing."""
        return any(finding.verdict == "WRONG" for finding in self.findings)

    @property
    def has_failed(self) -> bool:
        """Whether something is wrong or did not end as it should."""
        return any(finding.verdict in ("WRONG", "failed") for finding in self.findings)

    def add(self, check: str, found: str, verdict: Verdict = "") -> None:
        """Add a row, and print it at once: the block may be ended before its table."""
        self.findings.append(Finding(check, found, verdict))
        print(f"  {verdict or '-':<9}{check}: {found}", flush=True)

    def close(self, folder: Path) -> None:
        """Write `block-N.json`, and print the table."""
        self.seconds = time.monotonic() - self.started_s
        rows = [asdict(finding) for finding in self.findings]
        content = {"block": self.number, "title": self.title, "seconds": self.seconds, "machine": describe_machine()}
        write_json(folder / f"block-{self.number}.json", {**content, "findings": rows})
        shown = Table(title=f"Block {self.number}: {self.title} ({self.seconds:.0f} s)", title_justify="left")
        for heading in ("", "what", "found"):
            shown.add_column(heading, overflow="fold")
        for finding in self.findings:
            shown.add_row(finding.verdict, finding.check, finding.found)
        Console().print(shown)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2), encoding="utf-8")
    part.replace(path)


def describe_machine() -> dict[str, str]:
    """Return what figures depend on."""
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": str(os.cpu_count())}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name(0)
        machine["gpus"] = str(torch.cuda.device_count())
        machine["cuda"] = str(torch.version.cuda)
        machine["cudnn"] = str(torch.backends.cudnn.version())
        machine["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return machine


def predicted_allocation_gib(predicted: Prediction) -> float:
    """Return the GiB that torch's allocator should hold on the fullest rank at most.

    The margin of a plan is for what nobody can count, and communicators lie outside the allocator.
    """
    fullest = max(predicted.peak_memory_gib, key=lambda ranks: predicted.peak_memory_gib[ranks])
    kinds = predicted.memory_kinds_gib[fullest]
    return sum(gib for kind, gib in kinds.items() if kind not in ("margin", "communicators"))
