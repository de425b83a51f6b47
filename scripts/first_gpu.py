"""Run the first half hour on a machine with GPUs by itself, in four blocks of less than ten minutes each.

    python scripts/first_gpu.py --out runs/first-gpu             # all blocks
    python scripts/first_gpu.py --block 2 --out runs/first-gpu   # one of them
    python scripts/first_gpu.py --dry-run                        # all of it on the CPU, with tiny widths

1. Correctness: attention backends, training and meshes against one process on the CPU. A wrong row ends it all.
2. MFU: `bench_gpu.py` on every combination that there is time for.
3. A run: profile, plan, train, stop, resume, evaluate, run out of memory; predictions beside measurements.
4. Kernels: those that take most time in the best case of block 2, a timeline, the allocator.

Each block ends in a table and `block-N.json`; logs, plans and traces lie beside it. Whatever runs over its limit is
ended, and what it had written is kept. Exits with 0 if all is well, 1 if something is not, 2 where there is no CUDA.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.gpu.requirements import missing_packages

if missing := missing_packages():
    sys.exit(f"first_gpu: not installed here: {', '.join(missing)}. Install mmtrain: pip install -e '.[dev,cuda]'")

import torch

from scripts.gpu.blocks import DRY_LIMITS_FACTOR, BlockContext, check_correctness, list_kernels, measure_mfu
from scripts.gpu.findings import BlockReport
from scripts.gpu.limited import Deadline
from scripts.gpu.training_run import train_and_resume


@dataclass(frozen=True)
class Block:
    """A part of the half hour."""

    title: str
    run: Callable[[BlockContext, BlockReport], None]
    limit_s: float


BLOCKS = {
    1: Block("correctness", check_correctness, 540),
    2: Block("MFU", measure_mfu, 540),
    3: Block("a run", train_and_resume, 540),
    4: Block("kernels", list_kernels, 360),
}


def main() -> int:
    """Run the blocks that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", type=int, choices=BLOCKS, action="append", help="repeatable; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/first-gpu"), help="folder; default %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny widths")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print(
            f"first_gpu: torch {torch.__version__} sees no CUDA device here; run this on a machine with one, or with "
            "--dry-run. On a CPU `make test` holds the same equalities.",
            file=sys.stderr,
        )
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    has_failed = False
    for number in options.block or BLOCKS:
        report = run_block(number, options.out, options.dry_run)
        has_failed |= report.has_failed
        if report.is_wrong:
            print("first_gpu: something computes wrong numbers; nothing else is worth measuring", file=sys.stderr)
            break
    return 1 if has_failed else 0


def run_block(number: int, folder: Path, dry: bool) -> BlockReport:
    """Run one block; an error of its own becomes a row."""
    block = BLOCKS[number]
    print(f"Block {number}: {block.title}, at most {block.limit_s / 60:.0f} minutes", flush=True)
    report = BlockReport(number, block.title)
    deadline = Deadline(block.limit_s * (DRY_LIMITS_FACTOR if dry else 1))
    try:
        block.run(BlockContext(folder, deadline, dry), report)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        report.add("the block itself", f"{type(error).__name__}: {error}", "failed")
    report.close(folder)
    return report


if __name__ == "__main__":
    sys.exit(main())
