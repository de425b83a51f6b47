"""Run the first fifteen minutes on a machine with a GPU by itself.

    python scripts/first_gpu.py --out runs/first-gpu         # everything, by value, for at most fifteen minutes
    python scripts/first_gpu.py --part right --minutes 5     # what is right: comparisons, tests, a run
    python scripts/first_gpu.py --part fast --minutes 6      # what is fast: MFU, kernels, the loss
    python scripts/first_gpu.py --dry-run                    # all steps on a CPU, with tiny widths and sixfold limits
    python scripts/first_gpu.py --pack FOLDER --part-mib 50  # packages for a machine without a network
    python scripts/first_gpu.py --packed FOLDER              # on that machine: install them first

Each step has a limit of time, and none starts without time left. Nothing is stopped by a WRONG. After each step the
folder holds all that is known: `progress-PART.txt`, `results-PART.json` and logs. What is large, such as checkpoints,
lies in `--work`, which a later part on the same machine uses again. Exits with 0 if all is well, 1 if something is
not, 2 where it cannot start.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.gpu.limited import Deadline
from scripts.gpu.pack import SITE, pack, unpack
from scripts.gpu.requirements import missing_packages, use_folders_of_target_installs

MINUTES = 15.0


def main() -> int:
    """Pack, or run the parts that the arguments name."""
    options = _parse()
    if options.pack is not None:
        return pack_for_another_machine(options.pack, options.part_mib)
    deadline = Deadline(60 * options.minutes)
    work = (options.work or options.out / "work").absolute()
    for folder in (options.out, work):
        folder.mkdir(parents=True, exist_ok=True)
    installed = []
    if options.packed is not None:
        try:
            installed = unpack(options.packed, work)
        except (ValueError, OSError) as error:
            return _refuse(f"{error}.")
    use_packages(work / SITE)
    if missing := missing_packages():
        return _refuse(f"not installed here: {', '.join(missing)}. Install mmtrain: pip install -e '.[dev,cuda]'")
    return run_parts(options, work, deadline, installed)


def run_parts(options: argparse.Namespace, work: Path, deadline: Deadline, installed: list[str]) -> int:
    """Run the parts, once everything can be imported."""
    import torch

    from scripts.gpu import fast, right
    from scripts.gpu.session import DRY_LIMITS_FACTOR, Session

    if options.dry_run:
        deadline = Deadline(60 * options.minutes * DRY_LIMITS_FACTOR)
    elif not torch.cuda.is_available():
        return _refuse(
            f"torch {torch.__version__} sees no CUDA device here; run this on a machine with one, or with --dry-run. "
            "On a CPU `make test` holds the same equalities."
        )
    session = Session(options.part, options.out, work, deadline, options.dry_run)
    for line in installed:
        session.add("packages", line, "failed" if "damaged" in line else "")
    session.guard(right.describe)
    if options.part != "fast":
        session.guard(right.check)
    if options.part != "right":
        session.guard(fast.measure)
    return session.close()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all steps together; default %(default)s")
    parser.add_argument("--part", choices=("all", "right", "fast"), default="all", help="default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/first-gpu"), help="results; default %(default)s")
    parser.add_argument("--work", type=Path, help="data, checkpoints (18 GiB), kernels; default: OUT/work")
    parser.add_argument("--packed", type=Path, metavar="FOLDER", help="one or more parts of --pack, to install first")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny widths")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="download packages into FOLDER, and end")
    parser.add_argument("--part-mib", type=float, default=1024, help="at most, of each part; default %(default)s")
    return parser.parse_args()


def _refuse(why: str) -> int:
    print(f"first_gpu: {why}", file=sys.stderr)
    return 2


def pack_for_another_machine(folder: Path, part_mib: float) -> int:
    """Write the parts, and say how large they are."""
    try:
        parts = pack(folder, part_mib)
    except (ValueError, subprocess.CalledProcessError) as error:
        return _refuse(f"{error}.")
    for part in parts:
        size = sum(file.stat().st_size for file in part.iterdir())
        print(f"{part}: {size / 2**20:.1f} MiB")
    return 0


def use_packages(site: Path) -> None:
    """Let this process and those that it starts import what was unpacked, before the machine's own packages."""
    if site.is_dir():
        sys.path.insert(1, str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    use_folders_of_target_installs()


if __name__ == "__main__":
    # SIGTERM must end what the steps have started too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
