"""Measure training steps of a 0.6B encoder with LLMs of 1.5B to 7B on one GPU: MFU, idle time, memory, tokens/s.

    python scripts/bench_gpu.py                                          # every combination that there is time for
    python scripts/bench_gpu.py --models "0.6B + 3B" --attention auto --profile
    python scripts/bench_gpu.py --dry-run                                # tiny widths, on the CPU

Each case is planned for one rank, built and trained as `mmtrain train` does it, on made-up samples of one picture and a
question. It runs in a process of its own. The table and `bench_gpu.json` come after each case, so that what was
measured is kept if time runs out.

MFU counts forward and the gradients that are needed, of both units, without recomputation, and the head only for tokens
with a target; it is a share of the peak of the GPU's preset.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mmtrain.models.attention import backend_problems, choose_backend
from mmtrain.models.attention.backends import USUAL_HEAD_DIM
from mmtrain.models.kernels.liger import fused_problem
from scripts.gpu.cases import DRY_TOKENS, MODELS, TINY_MODELS, BenchCase, bench_cases, cases_of_card
from scripts.gpu.findings import card_memory_gib, describe_machine, write_json
from scripts.gpu.limited import Deadline, cpu_only, kernel_cache, python_command, run_limited
from scripts.gpu.requirements import use_folders_of_target_installs

CASE_LIMIT_S = 240.0
MINUTES = 8.0
RESULT_FILE = "bench_gpu.json"
Row = dict[str, Any]  # the fields of a `CaseResult`


def main() -> int:
    """Measure what the arguments name; return 1 if a case did not end by itself."""
    options = _parse()
    use_folders_of_target_installs()
    cases = all_cases(options.dry_run, options.models, options.tokens, options.attention, options.kernels)
    rows = run_cases(cases, options.out, Deadline(60 * options.minutes), options.profile)
    print_waits(rows)
    return 1 if any(row.get("problem") == "ended abnormally" for row in rows) else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help=f"of: {', '.join(MODELS)}")
    parser.add_argument("--tokens", nargs="+", type=int, help="of a microbatch; default: by the card's memory")
    parser.add_argument("--attention", nargs="+", help="values of train.attention; default: auto and all usable here")
    parser.add_argument("--kernels", nargs="+", help="values of train.kernels; default: all")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no case starts later; default %(default)s")
    parser.add_argument("--profile", action="store_true", help="also list the 25 kernels that take most time")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-gpu"), help="folder; default %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="tiny widths on the CPU")
    return parser.parse_args()


def all_cases(
    dry: bool,
    models: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    attention: Sequence[str] | None = None,
    kernels: Sequence[str] | None = None,
) -> list[BenchCase]:
    """Return every combination of these; where nothing is named, of what can run here."""
    usable_models, usable_tokens = list(TINY_MODELS), DRY_TOKENS
    if torch.cuda.is_available() and not dry:
        usable_models, usable_tokens = cases_of_card(card_memory_gib())
    return bench_cases(
        models or usable_models,
        tokens or usable_tokens,
        attention or usable_backends(dry),
        kernels or usable_kernels(dry),
        dry,
    )


def usable_backends(dry: bool) -> list[str]:
    """Return `auto`, and the attention backends that work here besides the one it takes and the quadratic reference."""
    device, dtype = _device(dry)
    problems = backend_problems(device, dtype)
    automatic = choose_backend("auto", device, dtype, USUAL_HEAD_DIM)
    return ["auto", *(name for name in problems if not problems[name] and name not in (automatic, "reference"))]


def usable_kernels(dry: bool) -> list[str]:
    """Return `auto`, and `torch` where that is another choice."""
    return ["auto"] if fused_problem(_device(dry)[0]) else ["auto", "torch"]


def automatic_choices(dry: bool) -> dict[str, str]:
    """Return what `auto` takes here, by setting."""
    device, dtype = _device(dry)
    kernels = "torch" if fused_problem(device) else "fused"
    return {"attention": choose_backend("auto", device, dtype, USUAL_HEAD_DIM), "kernels": kernels}


def _device(dry: bool) -> tuple[torch.device, torch.dtype]:
    device = torch.device("cuda" if torch.cuda.is_available() and not dry else "cpu")
    return device, torch.float32 if device.type == "cpu" else torch.bfloat16


def run_cases(cases: Sequence[BenchCase], out: Path, deadline: Deadline, with_kernels: bool = False) -> list[Row]:
    """Measure the cases one after another until the time is over; write what is known after each."""
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for number, case in enumerate(cases):
        limit_s = min(CASE_LIMIT_S, deadline.left_s)
        if not limit_s:
            rows.append({"case": asdict(case), "problem": "left out: no time"})
            continue
        print(f"{number + 1} of {len(cases)}: {case.name}", file=sys.stderr, flush=True)
        env = cpu_only() if case.dry else kernel_cache(out)
        row = run_case(case, out / f"case-{number:02}", limit_s, ["--profile"] if with_kernels else [], env)
        if row.get("kernels"):
            print(row["kernels"])
        rows.append(row)
        write_json(out / RESULT_FILE, {"machine": describe_machine(), "cases": rows})
    write_json(out / RESULT_FILE, {"machine": describe_machine(), "cases": rows})
    Console(width=None if sys.stdout.isatty() else 200).print(table(rows))
    return rows


def run_case(case: BenchCase, stem: Path, limit_s: float, options: Sequence[str], env: Mapping[str, str]) -> Row:
    """Measure one case in a process of its own; files that start with `stem` hold its output and its result.

    What it measured before it was ended is kept. options: of `measure_case.py`.
    """
    result_file, log = Path(f"{stem}.json"), Path(f"{stem}.log")
    result_file.unlink(missing_ok=True)
    fields = json.dumps(asdict(case))
    command = python_command("-m", "scripts.gpu.measure_case", fields, result_file.absolute(), *options)
    ended = run_limited(command, limit_s, log, env=env)
    row: Row = {"case": asdict(case), "problem": None, "steps": None}
    if result_file.exists():
        row = json.loads(result_file.read_text(encoding="utf-8"))
    if ended.code != 0:
        why = f"ended after its {limit_s:.0f} s" if ended.code is None else f"ended with exit code {ended.code}"
        print(f"{case.name}: {why}: {ended.last_line} (see {log})", file=sys.stderr)
        row["ended"] = why
        if not row["steps"]:
            row["problem"] = why if ended.code is None else "ended abnormally"
    return row


def table(rows: Sequence[Row]) -> Table:
    """Lay the rows out as one table."""
    shown = Table(title=f"Training steps on {describe_machine().get('gpu', 'a CPU')}, torch {torch.__version__}")
    for heading in ("model", "tokens", "attention", "kernels"):
        shown.add_column(heading)
    for heading in ("step / predicted", "MFU", "MFU, text", "LLM tokens/s", "of text's", "idle", "GiB / predicted"):
        shown.add_column(heading, justify="right")
    shown.add_column("reserved", justify="right")
    for row in rows:
        case = row["case"]
        first = [case["model"], str(case["tokens"]), case["attention"], case["kernels"]]
        shown.add_row(*first, *_figures(row))
    return shown


def _figures(row: Row) -> list[str]:
    if row["problem"]:
        return [escape(str(row["problem"]).splitlines()[0])]  # names of extras have brackets, as markup has
    steps, text = row["steps"], row["text_steps"]
    return [
        f"{_seconds(steps['step_s'])} / {_seconds(row['predicted_step_s'])}",
        f"{steps['mfu']:.1%}",
        f"{text['mfu']:.1%}" if text else "-",
        f"{steps['tokens_per_s']:,.0f}",
        f"{steps['tokens_per_s'] / text['tokens_per_s']:.0%}" if text else "-",
        "-" if row["idle_share"] is None else f"{row['idle_share']:.1%}",
        f"{row['allocated_gib']:.1f} / {row['predicted_gib']:.1f}",
        "-" if row["reserved_gib"] is None else f"{row['reserved_gib']:.1f}",
    ]


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def print_waits(rows: Sequence[Row]) -> None:
    """List the lines at which a step's host waited for the GPU, over all cases."""
    lines = list(dict.fromkeys(line for row in rows for line in row.get("waits_for_device", ())))
    if lines:
        print("Lines at which the host waits for the GPU (torch.cuda.set_sync_debug_mode):")
        print("\n".join(f"  {line}" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
