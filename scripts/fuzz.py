"""Give foreign files with anything in them to what reads them, and say what neither reads nor refuses them.

    python -m scripts.fuzz [KIND ...] [--rounds 50000] [--first 0] [--seconds 600] [--log]

A round makes a file from its seed and reads it as a command would (`tests/fuzz/kinds.py`, `test_recipes.py`,
`test_rows.py` and `test_folders.py`). It is bad if it raises anything but an error with a message, ends its process,
takes more than 10 s of processor time, or more than 1 GiB of memory. Each bad round is printed with its seed, by which
`python -m scripts.fuzz KIND --first SEED --rounds 1` repeats it.
"""

import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from scripts.measurements import arguments, children_s, start
from tests.fuzz import test_recipes, test_rows
from tests.fuzz.kinds import KINDS, Check
from tests.fuzz.test_folders import check as check_folder
from tests.fuzz.test_folders import write_folders

MAX_ROUND_S = 10.0
MAX_ROUND_GIB = 1.0
BATCH_ROUNDS = 200  # in one process, whose end is that of one of them


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(ALL_KINDS)}; all by default")
    parser.add_argument("--rounds", type=int, default=50_000, help="of each kind")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of each kind, by the clock, at most")
    options = parser.parse_args()
    report = start("Fuzzing of foreign files", options)
    report.table("kind", "rounds", "bad", "processor time of the slowest", "memory of the largest")
    bad: list[str] = []
    for kind in options.kinds or ALL_KINDS:
        found = fuzz(kind, range(options.first, options.first + options.rounds), options.seconds)
        bad += [f"{kind}, seed {seed}: {reason}" for seed, reason in found.bad.items()]
        cells = f"{len(found.bad)}", f"{found.slowest_s:.2f} s", f"{found.largest_gib:.2f} GiB"
        report.row(kind, f"{found.num_rounds:,}", *cells)
    report.line()
    for line in bad:
        report.line(f"* {line}")
    sys.exit(bool(bad))


@dataclass
class Found:
    """What came of the rounds of a kind."""

    num_rounds: int
    bad: dict[int, str]  # seed -> reason
    slowest_s: float
    largest_gib: float


def fuzz(kind: str, seeds: range, limit_s: float) -> Found:
    """Run the rounds of a kind in batches, each in a process of its own."""
    found = Found(0, {}, 0.0, 0.0)
    deadline_s = time.monotonic() + limit_s
    next_seed = seeds.start
    with tempfile.TemporaryDirectory(prefix="mmtrain-fuzz-") as folder:
        check = ALL_KINDS[kind](Path(folder))
        while next_seed < seeds.stop and time.monotonic() < deadline_s:
            next_seed = _run_batch(check, range(next_seed, min(next_seed + BATCH_ROUNDS, seeds.stop)), found)
    found.num_rounds = next_seed - seeds.start
    return found


def _run_batch(check: Check, seeds: range, found: Found) -> int:
    """Fork a process for the rounds; return the seed of the next one, behind a round that ended the process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        with (
            os.fdopen(writer, "w", buffering=1) as file,
            open(os.devnull, "w") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
        ):
            _run_rounds(check, seeds, file.write)
        os._exit(0)
    os.close(writer)
    next_seed = seeds.start
    with os.fdopen(reader) as file:
        for line in file:
            seconds, gib, reason = line.rstrip("\n").split("\t", 2)
            found.slowest_s = max(found.slowest_s, float(seconds))
            found.largest_gib = max(found.largest_gib, float(gib))
            if reason:
                found.bad[next_seed] = reason
            next_seed += 1
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if exit_code and next_seed < seeds.stop:
        found.bad[next_seed] = f"its process ended with {exit_code}"
        next_seed += 1
    return next_seed


def _run_rounds(check: Check, seeds: range, write: Callable[[str], object]) -> None:
    for seed in seeds:
        start_s = time.process_time() + children_s()
        reason = ""
        try:
            check(seed)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            reason = f"{type(error).__name__} in {Path(frames[-1].filename).name}:{frames[-1].lineno}: {error}"
        seconds = time.process_time() + children_s() - start_s
        peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        gib = max(peaks) / 2**20
        if not reason and seconds > MAX_ROUND_S:
            reason = "too slow"
        if not reason and gib > MAX_ROUND_GIB:
            reason = "too much memory"
        shown = reason.encode("unicode_escape").decode("ascii")[:300]
        write(f"{seconds}\t{gib}\t{shown}\n")
        if gib > MAX_ROUND_GIB:  # the peak stays that of this round; another process goes on
            return


def _recipes(folder: Path) -> Check:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return test_recipes.check


def _rows(folder: Path) -> Check:
    return lambda seed: test_rows.check(seed, folder)


def _folders(folder: Path) -> Check:
    folders = write_folders(folder / "models")
    return lambda seed: check_folder(seed, folders, folder)


ALL_KINDS = {"recipes": _recipes, "json": _rows, "folders": _folders, **KINDS}


if __name__ == "__main__":
    main()
