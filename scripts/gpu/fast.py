"""`first_gpu.py --part fast`: how fast are training steps, and what takes their time?

First FlashAttention-4 against the reference, for the cases run on it. Then the three cases that say most, with their
kernels, idle time and lines that wait; the loss of a 7B model's head; and, as far as there is time, work side by side
in one step (`overlap`), the costs of layers as `mmtrain profile` measures them, and all other cases.
"""

import json
from dataclasses import replace
from typing import Any

import torch

from mmtrain.models.attention import backend_problems
from scripts import bench_gpu
from scripts.gpu.cases import DRY_TOKENS, TINY_MODELS, BenchCase, Choice, bench_cases, first_cases
from scripts.gpu.findings import card_memory_gib
from scripts.gpu.limited import python_command
from scripts.gpu.session import Session, file_stem
from scripts.gpu.training_run import profile_and_plan

CASE_LIMIT_S, LOSS_LIMIT_S, ATTENTION_LIMIT_S, OVERLAP_LIMIT_S = 150, 60, 60, 180
# Of a 7B model's head, with all tokens of a microbatch as targets, and with half.
LOSS_SIZES = ("--tokens", "8192", "--hidden", "3584", "--vocab", "152064", "--targets", "1.0", "0.5", "--rounds", "5")
DRY_LOSS_SIZES = ("--tokens", "32", "--hidden", "16", "--vocab", "64", "--targets", "1.0", "--rounds", "2")
KERNELS_FILE, TRACE_FILE = "kernels.txt", "step-trace.json.gz"
MAX_WAITS = 6  # lines of a case that are shown; all are in its JSON


def measure(session: Session) -> None:
    """Run the part."""
    (session.folder / KERNELS_FILE).unlink(missing_ok=True)
    for setting, value in bench_gpu.automatic_choices(session.dry).items():
        session.add(f"train.{setting}: auto", value)
    cases = cases_by_value(session)
    measure_case(session, cases[0], ["--trace", str((session.folder / TRACE_FILE).absolute())])
    measure_case(session, cases[1])
    measure_loss(session)
    for case in cases[2:3]:
        measure_case(session, case)
    session.run_rows("overlap", OVERLAP_LIMIT_S)
    session.guard(profile_and_plan)
    for case in cases[3:]:
        measure_case(session, case)


def cases_by_value(session: Session) -> list[BenchCase]:
    """Return the first three cases and then all others; in a dry run the tiny models once each."""
    if session.dry:
        return bench_cases(list(TINY_MODELS), DRY_TOKENS[:1], ["auto"], ["auto"], dry=True)
    best, other = choose_kernels(session)
    every = bench_gpu.all_cases(dry=False)
    others = [replace(case, attention=best[0]) if case.attention == "auto" else case for case in every]
    return list(dict.fromkeys([*first_cases(card_memory_gib(), best, other), *others]))


def choose_kernels(session: Session) -> tuple[Choice, Choice]:
    """Return `train.attention` and `train.kernels` of the best cases, and those to compare them with.

    FlashAttention-4 must first compute what the reference does: what breaks or computes nonsense is no kernel to
    measure.
    """
    device = torch.device("cuda")
    problem = backend_problems(device, torch.bfloat16)["flash_attn_4"]
    if problem is not None:
        session.add("flash_attn_4", problem, "left out")
        return ("auto", "auto"), ("auto", "torch")
    # If only the time was over, while kernels were compiled, the rows so far decide.
    code = session.run_rows("flash_attn_4", ATTENTION_LIMIT_S)
    if code == 0 or (code is None and (session.folder / "flash_attn_4.json").exists()):
        return ("auto", "auto"), ("varlen", "auto")
    return ("varlen", "auto"), ("varlen", "torch")


def measure_case(session: Session, case: BenchCase, options: list[str] | None = None) -> None:
    """Time a case's steps, and add its row and its kernels."""
    limit_s = session.limit_s(case.name, CASE_LIMIT_S)
    if limit_s is None:
        return
    stem = session.folder / f"case-{file_stem(case.name)}"
    row = bench_gpu.run_case(case, stem, limit_s, ["--profile", *(options or [])], session.environment)
    session.cases.append(row)
    if row["problem"]:
        session.add(case.name, str(row["problem"]), "failed")
        return
    session.add(case.name, describe_row(row), "failed" if "ended" in row else "")
    for line in row["waits_for_device"][:MAX_WAITS]:
        session.add("a step waits for the GPU", line)
    with (session.folder / KERNELS_FILE).open("a", encoding="utf-8") as file:
        file.write(f"{case.name}\n{row['kernels']}\n{json.dumps(row['allocator'])}\n\n")


def describe_row(row: dict[str, Any]) -> str:
    """Return the figures of a case as one line."""
    steps, text = row["steps"], row["text_steps"]
    parts = [
        f"MFU {steps['mfu']:.1%}",
        f"step {steps['step_s']:.4g} s, predicted {row['predicted_step_s']:.4g} s",
        f"{steps['tokens_per_s']:,.0f} LLM tokens/s",
    ]
    if text:
        share = steps["tokens_per_s"] / text["tokens_per_s"]
        parts.append(f"{share:.0%} of those of text alone, whose MFU is {text['mfu']:.1%}")
    parts.append(f"{row['allocated_gib']:.1f} GiB, predicted {row['predicted_gib']:.1f} GiB")
    if row["idle_share"] is not None:
        parts.append(f"device idle {row['idle_share']:.1%}")
    parts.append(f"{sum(row['recomputed_layers'].values())} layers recomputed")
    parts.append(f"loss {row['losses'][0]:.2f} to {row['losses'][-1]:.2f}")
    return "; ".join([*parts, *([row["ended"]] if "ended" in row else [])])


def measure_loss(session: Session) -> None:
    """Compare the loss with all logits and by chunks."""
    sizes = DRY_LOSS_SIZES if session.dry else LOSS_SIZES
    ended = session.run("loss", python_command("scripts/bench_loss.py", *sizes), LOSS_LIMIT_S)
    for line in ended.output.splitlines():
        share, separator, figures = line.partition(" with a target: ")
        if separator:
            session.add(f"loss, {share} of the tokens with a target", figures)
