"""What `first_gpu.py` keeps while it runs: the time that is left, and every row, on disk as soon as it is known."""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.gpu.findings import Finding, Verdict, describe_machine, write_json
from scripts.gpu.limited import (
    CommandResult,
    Deadline,
    cpu_only,
    end_running,
    kernel_cache,
    python_command,
    run_limited,
)

DRY_LIMITS_FACTOR = 6  # a dry run shows that everything runs, beside whatever else a CPU does
MIN_TIME_TO_START_S = 12  # a step with less does not get beyond its imports
SUCCESS: Mapping[int, Verdict] = {0: "ok"}


@dataclass
class Session:
    """One run of the script; its rows go to the terminal, to `progress-PART.txt` and to `results-PART.json`."""

    part: str
    folder: Path  # of results
    work: Path  # of what is large and need not be kept: data, checkpoints, compiled kernels
    deadline: Deadline
    dry: bool = False
    findings: list[Finding] = field(default_factory=list)
    cases: list[dict[str, Any]] = field(default_factory=list)  # `CaseResult`s
    _started_s: float = field(default_factory=time.monotonic)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        """Forget an earlier run in the same folder."""
        (self.folder / f"progress-{self.part}.txt").unlink(missing_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """What a command's environment has besides this one's."""
        return cpu_only() if self.dry else kernel_cache(self.work)

    @property
    def dry_run_flag(self) -> list[str]:
        """The flag of commands that can run dry."""
        return ["--dry-run"] if self.dry else []

    def add(self, check: str, found: str, verdict: Verdict = "") -> None:
        """Add a row and write all of them: the machine may be taken away before the next one."""
        with self._lock:
            self.findings.append(Finding(check, found, verdict))
            seconds = time.monotonic() - self._started_s
            line = f"[{seconds:4.0f} s] {verdict or '-':<8} {check}: {found}"
            print(line, flush=True)
            with (self.folder / f"progress-{self.part}.txt").open("a", encoding="utf-8") as progress:
                progress.write(f"{line}\n")
            content = {"part": self.part, "dry": self.dry, "seconds": seconds, "machine": describe_machine()}
            rows = [asdict(finding) for finding in self.findings]
            write_json(self.folder / f"results-{self.part}.json", {**content, "rows": rows, "cases": self.cases})

    def limit_s(self, name: str, seconds: float) -> float | None:
        """Return the limit of a step that may take `seconds`; None, after a row that says so, if no time is left."""
        left_s = self.deadline.left_s
        if left_s < MIN_TIME_TO_START_S:
            self.add(name, "no time", "left out")
            return None
        return min(seconds * (DRY_LIMITS_FACTOR if self.dry else 1), left_s)

    def run(
        self, name: str, command: list[str], seconds: float, verdicts: Mapping[int, Verdict] = SUCCESS, **more: Any
    ) -> CommandResult:
        """Run a step and add its row; its output goes to NAME.log. Exit codes not in `verdicts` are `failed`.

        more: arguments of `run_limited`.
        """
        limit_s = self.limit_s(name, seconds)
        if limit_s is None:
            return CommandResult(None, "", 0)
        env = {**self.environment, **more.pop("env", {})}
        ended = run_limited(command, limit_s, self.folder / f"{file_stem(name)}.log", env=env, **more)
        how = "its time was over" if ended.code is None else f"exit code {ended.code}"
        verdict = "failed" if ended.code is None else verdicts.get(ended.code, "failed")
        self.add(name, f"{how}, {ended.seconds:.0f} of {limit_s:.0f} s: {ended.last_line}", verdict)
        return ended

    def mmtrain(self, name: str, arguments: list[object], seconds: float, **more: Any) -> bool:
        """Run a command of mmtrain; return whether it ended as it should."""
        verdicts = more.get("verdicts", SUCCESS)
        ended = self.run(name, python_command("-m", "mmtrain", *arguments), seconds, **more)
        return ended.code in verdicts

    def run_rows(self, module: str, seconds: float) -> int | None:
        """Run a module that writes findings to a file; take over those that it wrote, whether it ended or not.

        Return its exit code; None if its time was over.
        """
        rows = self.folder / f"{module}.json"
        rows.unlink(missing_ok=True)
        command = python_command("-m", f"scripts.gpu.{module}", rows.absolute(), *self.dry_run_flag)
        ended = self.run(module, command, seconds)
        for row in json.loads(rows.read_text(encoding="utf-8")) if rows.exists() else ():
            self.add(**row)
        return ended.code

    def run_side_by_side(self, *sequences: "Callable[[Session], object]") -> None:
        """Run what is not timed at the same time. An error of one becomes a row; Ctrl-C and SIGTERM end all."""
        with ThreadPoolExecutor(len(sequences)) as pool:
            try:
                for done in [pool.submit(self.guard, sequence) for sequence in sequences]:
                    done.result()
            except BaseException:
                self.deadline.end_now()
                end_running()
                raise

    def guard(self, sequence: "Callable[[Session], object]") -> None:
        """Run some of the steps; an error of the script itself must not end the others."""
        try:
            sequence(self)
        except Exception as error:
            self.add(f"the script: {sequence.__name__}", f"{type(error).__name__}: {error}", "failed")

    def close(self) -> int:
        """Say what was wrong; return the exit code."""
        bad = [finding for finding in self.findings if finding.verdict in ("WRONG", "failed")]
        num_left_out = sum(finding.verdict == "left out" for finding in self.findings)
        self.add("end", f"{len(self.findings)} rows, {len(bad)} WRONG or failed, {num_left_out} left out")
        for finding in bad:
            print(f"  {finding.verdict}: {finding.check}: {finding.found}")
        return 1 if bad else 0


def file_stem(name: str) -> str:
    """Return a name as part of a file's name.

    >>> file_stem("0.6B + 3B, 8192 tokens")
    '0.6B-3B-8192-tokens'
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)
