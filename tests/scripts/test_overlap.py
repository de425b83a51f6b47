"""`scripts/gpu/overlap.py` on a CPU: colocated, recomputed and offloaded steps have equal losses."""

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.gpu.overlap import VARIANTS, Outcome, compare, rows


@pytest.mark.slow  # 10 s
def test_all_variants_train_alike(tmp_path: Path) -> None:
    as_planned, memory, *others = rows(dry=True, snapshot=tmp_path / "memory.pickle")
    assert as_planned.check.startswith("dry: as planned")
    assert "planned" in memory.found
    assert "activations" in memory.found
    assert [(row.check, row.verdict) for row in others] == [(f"dry: {variant.name}", "ok") for variant in VARIANTS]


@pytest.mark.parametrize(("loss", "verdict"), [(2.001, "ok"), (2.1, "WRONG"), (float("nan"), "WRONG")])
def test_a_variant_with_other_losses_is_wrong(loss: float, verdict: str) -> None:
    planned = Outcome(2.0, 1.0, 3.0, 4.0, (3.0, 2.0))
    row = compare("recomputed", replace(planned, step_s=1.5, losses=(3.0, loss)), planned)
    assert row.verdict == verdict
    assert "-25.0% time" in row.found
