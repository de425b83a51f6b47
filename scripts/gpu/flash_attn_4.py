"""Compare FlashAttention-4 with the fp32 reference, by the rows of `correctness.py`; exit with 1 if it is broken.

    python -m scripts.gpu.flash_attn_4 rows.json

A row that misses its tolerance by little is WRONG, and yet no reason to measure speed without the kernel.
"""

import sys
from dataclasses import asdict
from pathlib import Path

import torch

from scripts.gpu.correctness import ATTENTION_TOLERANCE, attention_rows
from scripts.gpu.findings import write_json

BROKEN = 2 * ATTENTION_TOLERANCE[torch.bfloat16]


def main() -> int:
    findings = []
    is_broken = False
    for row in attention_rows(torch.device("cuda"), ("flash_attn_4",)):
        findings.append(asdict(row.finding()))
        write_json(Path(sys.argv[1]), findings)
        is_broken |= not isinstance(row.difference, str) and not row.difference <= BROKEN
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
