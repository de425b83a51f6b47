"""How the first cases of `first_gpu.py` are planned on each GPU preset: a CPU shows whether they fit before a GPU does.

python -m scripts.gpu.preset_plans rows.json [--dry-run]
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from mmtrain.costs.hardware import GB, GIB
from mmtrain.costs.hardware_presets import PRESETS
from mmtrain.errors import MmtrainError
from scripts.gpu.cases import BenchCase, first_cases
from scripts.gpu.findings import Finding, predicted_allocation_gib, write_json
from scripts.gpu.synthetic import SIZES, SyntheticSamples
from scripts.plans import fastest_plan

CHOICE = ("auto", "auto")
MIN_CARD_BYTES = 80 * GB


def main() -> None:
    """Write the rows to a file. They are the same in a dry run."""
    write_json(Path(sys.argv[1]), [asdict(finding) for finding in plan_findings()])


def plan_findings() -> Iterator[Finding]:
    """Yield a row for each case and GPU; one that does not fit is `failed`."""
    for name in gpus_of_first_cases():
        hardware = PRESETS[name]
        for case in dict.fromkeys(first_cases(hardware.memory_bytes / GIB, CHOICE, CHOICE)):
            yield plan_finding(case, name)


def gpus_of_first_cases() -> list[str]:
    """Return the presets of GPUs that the cases are made for, each once: one rank needs no network."""
    large = [name for name, hardware in PRESETS.items() if hardware.memory_bytes >= MIN_CARD_BYTES]
    return [name for name in large if not any(name.startswith(f"{other}-") for other in large)]


def plan_finding(case: BenchCase, hardware: str) -> Finding:
    """Plan a case for one GPU of a preset."""
    recipe = case.recipe()
    lengths = SyntheticSamples(recipe, SIZES).lengths
    check = f"plan on {hardware}: {case.model}, {case.tokens} tokens"
    try:
        plan = fastest_plan(recipe, lengths, 1, hardware)
    except MmtrainError as error:
        return Finding(check, f"no plan: {str(error).splitlines()[0]}", "failed")
    predicted = plan.predicted
    num_recomputed = sum(part.num_recomputed for part in plan.units.values())
    return Finding(
        check,
        f"{predicted.step_time_s:.2f} s a step, MFU {predicted.mfu:.1%}, "
        f"{predicted_allocation_gib(predicted):.0f} GiB, {num_recomputed} layers recomputed",
    )


if __name__ == "__main__":
    main()
