"""What this machine's device reaches at best: large GEMMs and copies, the ceilings of every other figure.

python -m scripts.gpu.ceilings rows.json [--dry-run]
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from mmtrain.runtime.execution.recorder import clock_for
from mmtrain.runtime.world import prepare_allocator
from scripts.gpu.findings import Finding, write_json

# (m, k, n). A square GEMM, and the largest of a 7B model's MLP (gate and up, of 4,096 tokens).
GEMMS = ((8192, 8192, 8192), (4096, 3584, 37_888))
DRY_GEMMS = ((256, 256, 256), (64, 32, 128))
COPY_BYTES, DRY_COPY_BYTES = 2**30, 2**20
REPEATS = 10


def main() -> None:
    """Write the rows to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="small, on the CPU")
    options = parser.parse_args()
    prepare_allocator()
    device = torch.device("cpu" if options.dry_run else "cuda")
    findings = []
    for finding in measure_ceilings(device, options.dry_run):
        findings.append(asdict(finding))
        write_json(options.out, findings)


def measure_ceilings(device: torch.device, dry: bool) -> Iterator[Finding]:
    """Yield the rates of GEMMs in bf16, of copies on the device, and of those from the host."""
    for m, k, n in DRY_GEMMS if dry else GEMMS:
        # Random: on constants a GPU draws less power, and so clocks up to 13% higher than on weights.
        a, b = (torch.randn(shape, device=device).bfloat16() for shape in ((m, k), (k, n)))
        seconds = _median_seconds(device, lambda a=a, b=b: a @ b)  # type: ignore[misc]
        yield Finding(f"GEMM {m} x {k} x {n}, bf16", f"{2 * m * k * n / seconds / 1e12:.4g} TFLOP/s")
        del a, b
    nbytes = DRY_COPY_BYTES if dry else COPY_BYTES
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _median_seconds(device, lambda: target.copy_(source))
    yield Finding("copy on the device, read and written", f"{2 * nbytes / seconds / 1e9:.4g} GB/s")
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    seconds = _median_seconds(device, lambda: target.copy_(pinned, non_blocking=True))
    yield Finding("copy from pinned host memory", f"{nbytes / seconds / 1e9:.4g} GB/s")


def _median_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Return the seconds of one run, by the device's clock; the median after one that warms up."""
    clock = clock_for(device)
    run()
    clock.start()
    marks = [clock.mark()]
    for _ in range(REPEATS):
        run()
        marks.append(clock.mark())
    seconds = clock.seconds(marks)
    return statistics.median(end - start for start, end in itertools.pairwise(seconds))


if __name__ == "__main__":
    main()
