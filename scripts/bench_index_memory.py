"""Measure the memory and the seconds that a process takes for the index of many samples, before its first step.

    python -m scripts.bench_index_memory --folder DIR [--samples 1000000 100000000]

Writes the columns of an index of that many made-up samples with an image each into DIR; there are no media. Two
processes then start as ranks do, one after the other: the first also computes the order of the stream, the second maps
it. Seconds are those of a processor. Private memory is what only this process holds, beyond what imports take. Files
are mapped: their pages are in memory once for all processes of a machine, as far as they were read. The last rows
compute a billion samples from the largest number that was measured.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mmtrain.api.plans import make_plan
from mmtrain.balance.columns import BLOCK_ROWS, ColumnFacts, FilePlace, LengthColumn, StoredColumn
from mmtrain.data import GroupStream
from mmtrain.data.index.data_index import from_stored
from mmtrain.data.index.index_cache import StoredIndex
from mmtrain.data.index.sample_table import SampleTable
from mmtrain.planning.artifact.balancing_targets import derive_step_targets
from mmtrain.recipe.settings.schema import Recipe
from scripts.measurements import arguments, start

GLOBAL_BATCH = 512
BILLION = 10**9
# Columns of an index with one image a sample, in the types that these lengths need.
COLUMNS = {
    "tokens": "<u2",
    "targets": "<u2",
    "source": "<u1",
    "ends": "<u8",
    "vision.first": "<u4",
    "vision.rows": "<u1",
    "vision.cols": "<u1",
    "vision.part": "<u1",
    "vision.time": "<u1",
}
MEAN_RECORD_BYTES = 300
_CHILD = "--child"


@dataclass(frozen=True)
class Start:
    """What one process took."""

    start_s: float  # until the stream of groups exists
    first_step_s: float  # until its first step is known, too
    plan_s: float  # to plan for 8 GPUs; only the first rank does
    targets_s: float  # to derive what the loader balances; likewise
    plan_bytes: int  # of private memory that both leave behind, with the search's own
    window_s: float  # to group a window, and to count its groups before if no process has
    num_windows: int
    private_bytes: int
    read_bytes: int  # of the mapped files
    file_bytes: int


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="where columns are, or are written")
    parser.add_argument("--samples", type=int, nargs="+", default=[10**6, 10**8])
    options = parser.parse_args()
    report = start("Memory of the index", options)
    columns = (
        "private",
        "files",
        "of them read",
        "start",
        "with first step",
        "plan",
        "targets",
        "private of both",
        "a window",
    )
    report.table("samples", "process", *columns)
    for num_samples in options.samples:
        folder = options.folder / str(num_samples)
        facts = write_columns(folder, num_samples)
        starts = {name: run_process(folder, num_samples, facts) for name in ("first", "next")}
        for name, took in starts.items():
            report.row(f"{num_samples:,}", name, *_cells(took))
    for name, took in starts.items():
        report.row(f"{BILLION:,}, computed", name, *_cells(_scaled(took, BILLION / options.samples[-1])))


def _scaled(took: Start, ratio: float) -> Start:
    """Return what `ratio` times as many samples take: what reads all of them grows with them."""
    start_s = took.start_s * ratio
    return replace(
        took,
        start_s=start_s,
        first_step_s=start_s + took.first_step_s - took.start_s,
        targets_s=took.targets_s * ratio,
        num_windows=round(took.num_windows * ratio),
        read_bytes=round(took.read_bytes * ratio),
        file_bytes=round(took.file_bytes * ratio),
    )


def _cells(took: Start) -> list[str]:
    return [
        f"{took.private_bytes / 1e6:,.0f} MB",
        f"{took.file_bytes / 1e9:,.2f} GB",
        f"{took.read_bytes / 1e9:,.2f} GB",
        f"{took.start_s:,.1f} s",
        f"{took.first_step_s:,.1f} s",
        f"{took.plan_s:,.1f} s",
        f"{took.targets_s:,.1f} s",
        f"{took.plan_bytes / 1e6:,.0f} MB",
        f"{took.window_s * 1e3:,.0f} ms, of {took.num_windows:,}",
    ]


def write_columns(folder: Path, num_samples: int) -> dict[str, ColumnFacts]:
    """Write the columns, unless they exist; return what holds for all rows of each."""
    facts_file = folder / "facts.json"
    if facts_file.exists():
        return {name: ColumnFacts(*facts) for name, facts in json.loads(facts_file.read_text()).items()}
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: open(folder / name, "wb") for name in COLUMNS}  # noqa: SIM115
    files["vision.first"].write(np.zeros(1, dtype=COLUMNS["vision.first"]).tobytes())
    rng = np.random.default_rng(0)
    for first in range(0, num_samples, BLOCK_ROWS):
        numbers = np.arange(first, min(first + BLOCK_ROWS, num_samples))
        sides = 2 * rng.integers(8, 33, (2, len(numbers)))
        text = np.minimum(rng.lognormal(4.5, 1.0, len(numbers)), 2000).astype(np.int64) + 8
        zeros = np.zeros_like(numbers)
        columns = {
            "tokens": text + sides[0] * sides[1] // 4,
            "targets": text // 2,
            "source": zeros,
            "ends": (numbers + 1) * MEAN_RECORD_BYTES,
            "vision.first": numbers + 1,
            "vision.rows": sides[0],
            "vision.cols": sides[1],
            "vision.part": zeros,
            "vision.time": zeros,
        }
        for name, values in columns.items():
            files[name].write(values.astype(COLUMNS[name]).tobytes())
    for file in files.values():
        file.close()
    facts = {name: column.facts for name, column in _columns(folder, num_samples, {}).items()}
    facts_file.write_text(json.dumps(facts))
    return facts


def _columns(folder: Path, num_samples: int, facts: dict[str, ColumnFacts]) -> dict[str, StoredColumn]:
    return {
        name: StoredColumn.mapped(
            FilePlace(folder / name, 0, dtype, num_samples + (name == "vision.first")), facts.get(name)
        )
        for name, dtype in COLUMNS.items()
    }


def run_process(folder: Path, num_samples: int, facts: dict[str, ColumnFacts]) -> Start:
    """Start as a rank does, in a process of its own."""
    arguments_of_child = [_CHILD, str(folder), str(num_samples), json.dumps(facts)]
    command = [sys.executable, "-m", "scripts.bench_index_memory", *arguments_of_child]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return Start(**json.loads(result.stdout))


def child(folder: Path, num_samples: int, facts: dict[str, ColumnFacts]) -> Start:
    """Open the index, and do with it what a rank does before and in its first step."""
    recipe = _recipe(folder)
    private_before, read_before = _memory()
    start_s = time.process_time()
    columns = _columns(folder, num_samples, facts)
    table = SampleTable(b"", columns["ends"])
    index = from_stored(StoredIndex(table, columns, (), "", (), folder), recipe, recipe.data.sources)
    stream = GroupStream.of(recipe, index)
    started_s = time.process_time() - start_s
    stream.groups(0, GLOBAL_BATCH)
    stream.epochs_done(GLOBAL_BATCH)
    first_step_s = time.process_time() - start_s
    private_after, read_after = _memory()
    start_s = time.process_time()
    plan = make_plan(recipe, index.lengths).plan
    plan_s = time.process_time() - start_s
    derive_step_targets(recipe, plan, index.lengths)
    targets_s = time.process_time() - start_s - plan_s
    plan_bytes = _memory()[0] - private_after
    num_windows = -(-num_samples // recipe.data.grouping_window)
    window_s = mean_window_s(recipe, index.lengths.tokens, stream)
    return Start(
        started_s,
        first_step_s,
        plan_s,
        targets_s,
        plan_bytes,
        window_s,
        num_windows,
        private_after - private_before,
        read_after - read_before,
        sum(file.stat().st_size for file in folder.iterdir()),
    )


def mean_window_s(recipe: Recipe, tokens: LengthColumn, stream: GroupStream) -> float:
    """Return the seconds of a window, mean over as many as lie before a later group."""
    groups_per_window = recipe.data.grouping_window * tokens.sum() / len(tokens) / recipe.data.seq_len
    num_windows = 5
    start_s = time.process_time()
    stream.groups(round(num_windows * groups_per_window), 1)
    return (time.process_time() - start_s) / num_windows


def _memory() -> tuple[int, int]:
    """Return the bytes of this process that are private, and those of mapped files."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    kib = {name.rstrip(":"): int(value) for name, value, *_ in map(str.split, lines)}
    return kib["Anonymous"] * 1024, (kib["Rss"] - kib["Anonymous"]) * 1024


def _recipe(folder: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "bench",
            "model": {
                "vision": {"layers": 1, "hidden": 64, "heads": 4, "ffn": 64, "merge": 2, "downsample": "pixel_shuffle"},
                "llm": {"layers": 1, "hidden": 64, "heads": 4, "ffn": 64, "vocab": 1024},
            },
            "cluster": {"hardware": "h100-80g", "ranks": 8},
            "data": {"sources": [{"path": folder / "a.json"}], "tokenizer": folder / "tokenizer.json", "seq_len": 4096},
            "train": {"steps": 1, "global_batch": GLOBAL_BATCH, "optimizer": {"lr": 1e-3}},
        }
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        of_child = {name: ColumnFacts(*values) for name, values in json.loads(sys.argv[4]).items()}
        os.write(1, json.dumps(vars(child(Path(sys.argv[2]), int(sys.argv[3]), of_child))).encode())
    else:
        main()
