"""Show that a change of the planner leaves every plan as it was: save plans with one tree, compare with another.

    python -m scripts.compare_plans save FOLDER [--tree CHECKOUT] [--only NAME]
    python -m scripts.compare_plans diff OLD NEW

`save` runs `mmtrain plan --explain --json` of CHECKOUT (default: this one) on every case. It writes one JSON file per
case, with the processor seconds it took beside it. `diff` compares all numbers, layouts and orders exactly. It counts
apart what is no change of a plan: sentences meant for people (reasons of alternatives) and keys the old tree lacks.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.measurements import children_s, set_options

ROOT = Path(__file__).resolve().parents[1]
WHAT_IF = sorted(p for p in (ROOT / "recipes/whatif").glob("*.yaml"))
SENTENCES = ("reason",)  # keys of a plan file that hold sentences
MISSING = object()  # what a plan without some key holds there


def cases() -> Iterator[tuple[str, list[str]]]:
    """Return names of cases and arguments of `mmtrain plan`; paths are relative to the checkout."""
    for path in WHAT_IF:
        yield path.stem, [str(path.relative_to(ROOT))]
    small = "recipes/whatif/optimus_14b.yaml"
    for placement in ("unified", "disaggregated", "colocated"):
        yield f"optimus_14b-{placement}", [small, "--placement", placement]
    yield "internvl_26b-a100", ["recipes/whatif/internvl_26b.yaml", "--cluster", "a100:nodes=4"]
    yield "internvl_26b-max_gpus", ["recipes/whatif/internvl_26b.yaml", "--set", "parallel.max_gpus=48"]
    yield "orchmllm_10b-vpp2", ["recipes/whatif/orchmllm_10b.yaml", "--set", "parallel.llm.vpp=2"]
    yield "mmscale_7b-flops", ["recipes/whatif/mmscale_7b.yaml", "--baseline", "flops"]
    for rule in ("megatron", "balanced", "profile-only"):
        yield f"internvl_26b-{rule}", ["recipes/whatif/internvl_26b.yaml", "--baseline", rule]
    if (ROOT / "demo-data/train.json").exists():
        demo = f"data.sources.0.path={ROOT / 'demo-data/train.json'}"
        tokenizer = f"data.tokenizer={ROOT / 'demo-data/tokenizer.json'}"
        for ranks, placement in ((1, "unified"), (2, "disaggregated"), (2, "auto"), (4, "auto")):
            settings = [demo, tokenizer, f"cluster.ranks={ranks}", f"parallel.placement={placement}"]
            yield f"demo-{placement}-{ranks}", ["recipes/demo.yaml", *set_options(settings)]


def plan(tree: Path, arguments: list[str]) -> tuple[dict[str, Any], float]:
    """Plan with the code of `tree`; return the plan, or a reason and a code if there is none, and processor seconds."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mmtrain", "plan", *arguments, "--json"]
    before = children_s()
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    seconds = children_s() - before
    if done.returncode == 0:
        return json.loads(done.stdout), seconds
    lines = [line for line in done.stderr.splitlines() if not line.startswith("planning: ")]
    return {"reason": "\n".join(lines), "code": done.returncode}, seconds


def save(folder: Path, tree: Path, only: str | None) -> None:
    """Plan every case with the code of `tree`; write its plan and seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, arguments in cases():
        if only is not None and only not in name:
            continue
        result, seconds = plan(tree, [*arguments, "--explain"])
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (folder / f"{name}.seconds").write_text(f"{seconds:.2f}\n", encoding="utf-8")
        ended = f", exit {result['code']}" if "code" in result else ""
        print(f"{name}: {seconds:.1f} s{ended}", flush=True)


def differences(old: object, new: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield (path, old, new) wherever two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            yield from differences(old.get(key, MISSING), new.get(key, MISSING), f"{path}.{key}" if path else str(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (left, right) in enumerate(zip(old, new, strict=True)):
            yield from differences(left, right, f"{path}[{i}]")
    elif old != new:
        yield path, old, new


def diff(old: Path, new: Path) -> int:
    """Print what differs between two folders that `save` wrote; return the number of plans that changed."""
    changed = 0
    for path in sorted(new.glob("*.json")):
        before, after = (json.loads((folder / path.name).read_text(encoding="utf-8")) for folder in (old, new))
        changes = list(differences(before, after))
        wording = [where for where, _, _ in changes if where.rsplit(".", 1)[-1] in SENTENCES]
        added = [where for where, left, _ in changes if left is MISSING]
        real = [entry for entry in changes if entry[0] not in (*wording, *added)]
        seconds = [float((folder / f"{path.stem}.seconds").read_text()) for folder in (old, new)]
        verdict = "DIFFERS" if real else "identical"
        reworded = f", {len(wording)} sentences reworded" if wording else ""
        keys = f", new keys: {', '.join(added)}" if added else ""
        print(f"{path.stem}: {verdict}{reworded}{keys}; {seconds[0]:.1f} s -> {seconds[1]:.1f} s")
        for where, left, right in real[:8]:
            print(f"    {where}: {str(left)[:160]} -> {str(right)[:160]}")
        changed += bool(real)
    print(f"{changed} plans differ")
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    saving = commands.add_parser("save")
    saving.add_argument("folder", type=Path)
    saving.add_argument("--tree", type=Path, default=ROOT)
    saving.add_argument("--only")
    comparing = commands.add_parser("diff")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    asked = parser.parse_args()
    if asked.command == "save":
        save(asked.folder.resolve(), asked.tree.resolve(), asked.only)
        return 0
    return 1 if diff(asked.old, asked.new) else 0


if __name__ == "__main__":
    sys.exit(main())
