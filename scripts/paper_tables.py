"""What the tables and figures of the published systems state, and which of our figures stand beside each.

Published values have their source. Optimus' are those of the paper's text. OmniBal's are what two public pages say of
its tables. Of DistTrain and OrchMLLM only abstracts could be read, so their tables appear with what we can say of the
same question. `scripts.papers` prints all of it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mmtrain.planning.artifact.plan import Plan

Kind = Literal["predicted", "measured", "not comparable"]


@dataclass(frozen=True)
class PlanRun:
    """A recipe of recipes/whatif, and settings that replace those of it."""

    recipe: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class PaperRow:
    """One published figure, and how ours is made of plans."""

    what: str
    published: str | None  # None: no public page that could be read states it
    kind: Kind
    runs: tuple[PlanRun, ...] = ()
    ours: Callable[[Sequence[Plan]], str] = field(default=lambda plans: describe(plans[0]))
    why: str = ""


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper."""

    paper: str  # as `--only` calls it
    title: str
    source: str
    rows: tuple[PaperRow, ...]


def rule_step_s(plan: Plan, rule: str) -> float | None:
    """Return the step of a rule of thumb in a plan's ranking; None where it is not listed."""
    seconds = (a.step_time_s for a in plan.alternatives if a.summary.startswith(f"{rule} baseline,"))
    return next(seconds, None)


def placement_step_s(plan: Plan, placement: str) -> float | None:
    """Return the best step of a placement in a plan's ranking."""
    if plan.placement == placement:
        return plan.predicted.step_time_s
    steps = (
        a.step_time_s
        for a in plan.alternatives
        if a.placement == placement and a.step_time_s is not None and " baseline, " not in a.summary
    )
    return min(steps, default=None)


def describe(plan: Plan) -> str:
    """Return the chosen step and MFU, and the best step of each placement and of each rule of thumb that lost."""
    predicted = plan.predicted
    parts = [f"{plan.placement} {predicted.step_time_s:.2f} s, MFU {predicted.mfu:.1%}"]
    labels: set[str] = {plan.placement}
    for loser in plan.alternatives:  # the fastest first
        rule, _, _ = loser.summary.rpartition(" baseline, ")
        label = f"`{rule}` rule of thumb" if rule else loser.placement
        if label not in labels and loser.step_time_s is not None:
            labels.add(label)
            parts.append(f"{label} {loser.step_time_s:.2f} s")
    return "; ".join(parts)


def seconds(step_s: float | None) -> str:
    """Return a step in words."""
    return "does not fit" if step_s is None else f"{step_s:.2f} s"


def ratio(slower_s: float | None, faster_s: float | None) -> str:
    """Return how many times as fast the second is."""
    return "-" if slower_s is None or faster_s is None else f"{slower_s / faster_s:.2f}x"


# Optimus

OPTIMUS = "Optimus, arXiv 2408.03505v2 and USENIX ATC 2025"


def optimus_runs(recipe: str, dp: int) -> tuple[PlanRun, PlanRun]:
    """Return the paper's mesh (appendix D: tp 8, so many replicas) in one pipeline, and with encoders in bubbles.

    In one pipeline the number of chunks is free. Beside encoders in bubbles the LLM has as many as its layers allow. On
    1,536 GPUs and more the encoder's pipeline has 8 ranks, as in the best plan on 512, which has the same replicas.
    """
    mesh = ("parallel.llm.tp=8", f"parallel.llm.dp={dp}")
    name = f"papers/optimus_{recipe}"
    encoders = ("encoders.first", "encoders.second") if recipe.startswith("dual") else ("vision",)
    chunks = 10 if recipe in ("82b", "92b") else 12  # of LLAMA-70B on 4 pipeline ranks, of GPT-175B on 8
    colocated = (f"parallel.llm.vpp={chunks}", *(f"parallel.{encoder}.tp=8" for encoder in encoders))
    if dp > 8:
        colocated = (*colocated, "parallel.vision.pp=8")
    return (
        PlanRun(name, ("parallel.placement=unified", *mesh)),
        PlanRun(name, ("parallel.placement=colocated", *mesh, *colocated)),
    )


def optimus_steps(plans: Sequence[Plan]) -> str:
    """Return the steps of Megatron-LM, of Megatron-LM balanced and of encoders in bubbles, and the ratios."""
    unified, colocated = plans
    megatron_s, balanced_s = rule_step_s(unified, "megatron"), rule_step_s(unified, "balanced")
    ours_s, unified_s = colocated.predicted.step_time_s, unified.predicted.step_time_s
    return (
        f"`megatron` {seconds(megatron_s)}, `balanced` {seconds(balanced_s)}, colocated {ours_s:.2f} s: "
        f"{ratio(megatron_s, ours_s)} and {ratio(balanced_s, ours_s)}; our `unified` {unified_s:.2f} s"
    )


def optimus_small(plans: Sequence[Plan]) -> str:
    """Return what the ranking of the smallest model says of each column of the paper's table 4."""
    plan = plans[0]
    columns = {
        "FSDP": rule_step_s(plan, "fsdp"),
        "Megatron-LM": rule_step_s(plan, "megatron"),
        "balanced": rule_step_s(plan, "balanced"),
        "Optimus (colocated)": placement_step_s(plan, "colocated"),
        f"chosen ({plan.placement})": plan.predicted.step_time_s,
    }
    return ", ".join(f"{name} {seconds(step_s)}" for name, step_s in columns.items())


def bubbles(plans: Sequence[Plan]) -> str:
    """Return the shares of a step in which ranks idle, by kind."""
    names = ("dp_gather", "dp_reduce", "pp_warmup", "pp_cooldown", "pp_other", "tp", "tp_layers", "imbalance")
    shares = plans[0].predicted.bubbles
    return ", ".join(f"{name} {shares.get(name, 0.0):.1%}" for name in names)


def efficiency(plans: Sequence[Plan]) -> str:
    """Return the share of the encoder's compute inside the LLM's own step, of the coarse order and of the planned."""
    predicted = plans[1].predicted
    coarse, fine = predicted.coarse_scheduling_efficiency, predicted.scheduling_efficiency
    return "-" if coarse is None or fine is None else f"{coarse:.1%} coarse, {fine:.1%} fine"


def memory_overhead(plans: Sequence[Plan]) -> str:
    """Return the peak of the colocated plan over the least peak of the two baselines."""
    unified, colocated = plans
    peaks = [
        a.peak_memory_gib
        for a in unified.alternatives
        if a.summary.startswith(("megatron baseline,", "balanced baseline,")) and a.peak_memory_gib is not None
    ]
    peak = max(colocated.predicted.peak_memory_gib.values())
    return f"{peak:.1f} GiB" + (f", {peak / min(peaks) - 1:+.0%}" if peaks else "")


WEAK = (("82b", "A: ViT-11B, LLAMA-70B, 64 GPUs", 2), ("92b", "B: ViT-22B, LLAMA-70B, 128 GPUs", 4))
WEAK_175B = (("186b", "C: ViT-11B, GPT-175B, 256 GPUs", 4), ("197b_512", "D: ViT-22B, GPT-175B, 512 GPUs", 8))
STRONG = (  # GPUs, replicas, published seconds of Megatron-LM, of Megatron-LM balanced, of Optimus, and efficiencies
    (1536, 24, "10.65, 10.43, 9.80 s: 1.09x and 1.06x", "34.3% coarse, 57.5% fine, in 322 s"),
    (2048, 32, "8.26, 8.06, 7.29 s: 1.13x and 1.11x", "45.8% coarse, 69.3% fine, in 90 s"),
    (3072, 48, "5.91, 5.87, 4.87 s: 1.21x and 1.21x", "68.7% coarse, 85.0% fine, in 15 s"),
)
DUAL = (("11b_5b", "1.25x"), ("22b_5b", "1.26x"), ("22b_11b", "1.27x"))
HARDER_BASELINE = (
    "the paper's two baselines lie within 2% of each other; by our costs a first stage with the whole encoder cannot "
    "be so near, and how the paper divides the LLM beside it is not stated"
)

OPTIMUS_TABLES = (
    PaperTable(
        "optimus",
        "Table 1: bubbles of a step",
        OPTIMUS,
        (
            PaperRow(
                "shares of an average step of 5.12 s, more than 3,000 GPUs",
                "dp_gather 3.3%, dp_reduce 8.9%, pp_warmup 5.0%, pp_cooldown 9.2%, pp_other 8.7%, tp 11.2%",
                "not comparable",
                optimus_runs("197b_3072", 48)[:1],
                bubbles,
                "an internal model of over 100B; ours: `unified` of the 197B model on 3,072 GPUs, whose stages are "
                "even; its tp bubbles are our tp and tp_layers; replica groups wait for the slowest in `imbalance`, "
                "which the paper counts to its collectives",
            ),
        ),
    ),
    PaperTable(
        "optimus",
        "Table 3 and figure 15: weak scaling",
        OPTIMUS,
        tuple(
            PaperRow(
                f"model {title}",
                "of the four: up to 1.22x over Megatron-LM and 1.18x over balanced",
                "predicted",
                optimus_runs(recipe, dp),
                optimus_steps,
                HARDER_BASELINE,
            )
            for recipe, title, dp in (*WEAK, *WEAK_175B)
        ),
    ),
    PaperTable(
        "optimus",
        "Table 4 (and 10): ViT-3B and GPT-11B on 8 A100, batch 16",
        OPTIMUS,
        (
            PaperRow(
                "seconds of a step",
                "Alpa 8.61, FSDP 3.20 s, Megatron-LM 3.42 s, balanced 3.04 s, Optimus 2.78 s",
                "predicted",
                (PlanRun("papers/optimus_14b"),),
                optimus_small,
                "we have no Alpa; whether the paper's plans recompute is not stated, ours do not",
            ),
        ),
    ),
    PaperTable(
        "optimus",
        "Table 5: strong scaling, ViT-22B and GPT-175B, batch 1,536",
        OPTIMUS,
        tuple(
            PaperRow(
                f"{num_gpus:,} GPUs: Megatron-LM, balanced, Optimus",
                published,
                "predicted",
                optimus_runs(f"197b_{num_gpus}", dp),
                optimus_steps,
                HARDER_BASELINE,
            )
            for num_gpus, dp, published, _ in STRONG
        ),
    ),
    PaperTable(
        "optimus",
        "Table 6 and figure 16: two encoders and GPT-175B on 512 GPUs, batch 256",
        OPTIMUS,
        tuple(
            PaperRow(
                f"ViT-{pair.replace('_', ', ViT-').upper().replace('VIT', 'ViT')}: over Megatron-LM",
                f"up to {published}",
                "predicted",
                optimus_runs(f"dual_{pair}", 8),
                optimus_steps,
                "the paper has no `balanced` here, since its division of layers knows one encoder",
            )
            for pair, published in DUAL
        ),
    ),
    PaperTable(
        "optimus",
        "Figure 17: memory of the fullest rank over the baseline with less",
        OPTIMUS,
        tuple(
            PaperRow(
                f"model {title[0]}",
                "of the four: at most +12%",
                "predicted",
                optimus_runs(recipe, dp),
                memory_overhead,
                "our plans spend the memory that is left on not recomputing",
            )
            for recipe, title, dp in (*WEAK, *WEAK_175B)
        ),
    ),
    PaperTable(
        "optimus",
        "Table 7: share of the encoder's compute in the LLM's bubbles",
        OPTIMUS,
        tuple(
            PaperRow(
                f"{num_gpus:,} GPUs",
                published,
                "predicted",
                optimus_runs(f"197b_{num_gpus}", dp),
                efficiency,
                "both from simulations; ours of the fastest plan, with messages and reductions",
            )
            for num_gpus, dp, _, published in STRONG
        ),
    ),
)

# OmniBal

OMNIBAL = "OmniBal, arXiv 2407.20761, as en.papernotes.org (ICML 2025) and a public review of it state"
NINE = (
    ("6b_8b", "InternViT-6B, Llama-3 8B"),
    ("6b_20b", "InternViT-6B, InternLM2-20B"),
    ("6b_34b", "InternViT-6B, Yi-34B"),
    ("6b_70b", "InternViT-6B, Llama-3 70B"),
    ("6b_110b", "InternViT-6B, Qwen1.5-110B"),
    ("eva_1b_8b", "EVA-CLIP 1B, Llama-3 8B"),
    ("eva_4b_8b", "EVA-CLIP 4B, Llama-3 8B"),
    ("eva_8b_8b", "EVA-CLIP 8B, Llama-3 8B"),
    ("eva_18b_8b", "EVA-CLIP 18B, Llama-3 8B"),
)
ONE_PIPELINE = ("parallel.placement=unified", "parallel.llm.tp=1", "parallel.llm.pp=8")
PADDED = ("data.grouping=random", "data.pad=true")
ALL_RECOMPUTED = ("parallel.vision.recompute=all", "parallel.llm.recompute=all")


def gpu_days(plan: Plan, num_samples: float, rule: str | None = None) -> float | None:
    """Return the GPU-days of so many samples by a plan, or by a rule of thumb; None: its ranking does not list that."""
    days = num_samples * plan.data.tokens["llm"] / plan.predicted.tokens_per_s_per_gpu / 86_400
    rule_s = plan.predicted.step_time_s if rule is None else rule_step_s(plan, rule)
    return None if rule_s is None else days * rule_s / plan.predicted.step_time_s


def omnibal_ablation(plans: Sequence[Plan]) -> str:
    """Return GPU-days of 1.2 million samples: padded and all recomputed, then packed, then recomputed by need."""
    names = ("padded, all layers recomputed", "packed by ISF", "recomputed where memory demands")
    return ", ".join(f"{name} {gpu_days(plan, 1.2e6):.1f}" for name, plan in zip(names, plans, strict=True))


def omnibal_partitions(plans: Sequence[Plan]) -> str:
    """Return forward variances and bytes of the rules of thumb and of the plan."""
    plan = plans[0]
    rows = [("the plan", plan.predicted.step_time_s, plan.predicted.balance)]
    rows += [
        (a.summary.partition(" baseline,")[0], a.step_time_s, a.balance)
        for a in plan.alternatives
        if a.summary.startswith(("equal-parameters baseline,", "equal-layers baseline,", "profile-only baseline,"))
    ]
    return "; ".join(
        f"{name}: {step_s:.2f} s, forward {balance.forward_variance:.3g}, {balance.sent_gib:.2f} GiB sent"
        for name, step_s, balance in rows
        if step_s is not None and balance is not None
    )


def over_padded_rule(plans: Sequence[Plan]) -> str:
    """Return how much longer padded groups take with layers divided by parameters, then what the division costs."""
    padded, free = plans
    days, packed_days = gpu_days(free, 1e6), gpu_days(free, 1e6, "equal-parameters")
    padded_days = gpu_days(padded, 1e6, "equal-parameters") or gpu_days(padded, 1e6)
    return (
        f"{ratio(padded_days, days)}, {ratio(packed_days, days)} of it by the division of layers; "
        f"{free.placement} {free.predicted.step_time_s:.2f} s, MFU {free.predicted.mfu:.1%}"
    )


def omnibal_run(recipe: str, *settings: str) -> PlanRun:
    return PlanRun(f"papers/omnibal_{recipe}", ("parallel.placement=unified", *settings))


OMNIBAL_TABLES = (
    PaperTable(
        "omnibal",
        "Table 1: GPU-days of 1.2 million samples, and table 2: one balance after another",
        OMNIBAL,
        (
            PaperRow(
                "InternViT-6B and InternLM2-20B, DeepSpeed",
                "38.9 -> 25.3: 1.54x",
                "not comparable",
                ours=lambda plans: "-",
                why="data balance under ZeRO-3: see OrchMLLM's ablations",
            ),
            PaperRow(
                "the same, Megatron-DeepSpeed: no balance, data, data and model, data and model and memory",
                "61.8, 51.9, 29.0, 21.3: 2.9x (1.83x over DeepSpeed's 38.9)",
                "predicted",
                (
                    omnibal_run("6b_20b", *ONE_PIPELINE[1:], *PADDED, *ALL_RECOMPUTED),
                    omnibal_run("6b_20b", *ONE_PIPELINE[1:], "data.grouping=isf", *ALL_RECOMPUTED),
                    omnibal_run("6b_20b", *ONE_PIPELINE[1:], "data.grouping=isf"),
                ),
                omnibal_ablation,
                "64 A100, stated lengths, our mesh (tp 1, pp 8) and partition; the paper's are not known here",
            ),
        ),
    ),
    PaperTable(
        "omnibal",
        "Table 3: padding and imbalance of groupings",
        OMNIBAL,
        (
            PaperRow(
                "pad ratio: random, sorted by length, grouped by device, ISF",
                "0.31, 0.014, 0.378, 0",
                "measured",
                ours=lambda plans: "0.475, 0.001, 0.475, 0; `matched` 0",
                why="another mixture, 8 replicas (docs/measurements/2026-11-21.md, scripts.bench_balance)",
            ),
            PaperRow(
                "dist ratio of images / LLM tokens: sorted by length, ISF",
                "0.47 / 0.40, 0.02 / 0.14",
                "measured",
                ours=lambda plans: (
                    "0.627 / 0.518, 0.228 / 0.253; `matched` 0.098 / 0.003, 8 microbatches: 0.006 / 0.001"
                ),
                why="the same; our mixture has text and speech, which strand in ISF's budgets",
            ),
            PaperRow(
                "what padding costs",
                None,
                "measured",
                ours=lambda plans: "docs/measurements/2026-11-25.md, What padding costs",
            ),
        ),
    ),
    PaperTable(
        "omnibal",
        "Table 4: partitions",
        OMNIBAL,
        (
            PaperRow(
                "bytes sent beside the partition by parameters, and GPU-days: profile-based, BMP",
                "+16.6 MB and 30.9, -21.0 MB and 29.0",
                "predicted",
                (omnibal_run("6b_20b", *ONE_PIPELINE[1:], "data.grouping=isf", *ALL_RECOMPUTED),),
                omnibal_partitions,
                "ours of a whole step; `plan --explain` prints this for every candidate",
            ),
        ),
    ),
    PaperTable(
        "omnibal",
        "Table 5: nine models, speed-up over the unbalanced baseline",
        OMNIBAL,
        tuple(
            PaperRow(
                title,
                "of the nine: 1.9x to 3.2x" + (", this one 3.2x" if recipe == "6b_110b" else ""),
                "predicted",
                (omnibal_run(recipe, *PADDED), omnibal_run(recipe)),
                over_padded_rule,
                "ours over `equal-parameters` with random, padded groups; numbers of GPUs are ours",
            )
            for recipe, title in NINE
        ),
    ),
    PaperTable(
        "omnibal",
        "Tables 6 to 8: other data, tasks and settings",
        OMNIBAL,
        (
            PaperRow(
                "dist ratios on LLaVA-665K, InternVL-1.2M and LCS-558K",
                None,
                "not comparable",
                ours=lambda plans: "docs/benchmarks.md, Steps that training reads: five sets and their mixture",
                why="the page says that they are low, not how low",
            ),
        ),
    ),
)

# DistTrain (MMScale)

MMSCALE = "DistTrain (MMScale), arXiv 2408.04275, abstract; no public page that could be read states its tables"
UNIFIED = "parallel.placement=unified"
MADE_UP_LENGTHS = "the paper's GPUs and sizes of models, but lengths and a batch of our own"


def over_stages(plans: Sequence[Plan]) -> str:
    """Return the ratio of the paper's baseline to its placement, and the ranking."""
    plan = plans[0]
    stages_s, apart_s = rule_step_s(plan, "megatron-stages"), placement_step_s(plan, "disaggregated")
    return f"`disaggregated` over `megatron-stages` {ratio(stages_s, apart_s)}; {describe(plan)}"


MMSCALE_TABLES = (
    PaperTable(
        "mmscale",
        "Tables 2 and 3, figures 15 to 20",
        MMSCALE,
        (
            PaperRow(
                "MFU of the 72B multimodal LLM on 1,172 GPUs",
                "54.7%",
                "not comparable",
                (PlanRun("papers/mmscale_70b"),),
                over_stages,
                MADE_UP_LENGTHS,
            ),
            *(
                PaperRow(
                    f"the {size.upper()} model on 1,296 GPUs, beside Megatron-LM",
                    "of all: up to 2.2x",
                    "not comparable",
                    (PlanRun(f"papers/mmscale_{size}"),),
                    over_stages,
                    MADE_UP_LENGTHS,
                )
                for size in ("7b", "13b")
            ),
            PaperRow(
                "reordering, the 7B model on 128 GPUs in one pipeline",
                None,
                "predicted",
                (PlanRun("mmscale_7b", (UNIFIED, "data.reorder=false")), PlanRun("mmscale_7b", (UNIFIED,))),
                lambda plans: (
                    f"without {plans[0].predicted.step_time_s:.2f} s, with {plans[1].predicted.step_time_s:.2f} s: "
                    f"{ratio(plans[0].predicted.step_time_s, plans[1].predicted.step_time_s)}"
                ),
            ),
        ),
    ),
)

# OrchMLLM

ORCHMLLM = "OrchMLLM, arXiv 2503.23830, abstract; no public page that could be read states its tables"
DISPATCH = "docs/measurements/2026-11-24.md (scripts.bench_dispatch): four CPU ranks"

ORCHMLLM_TABLES = (
    PaperTable(
        "orchmllm",
        "Table 2 and figure 8: models, MFU and throughput on 2,560 H100",
        ORCHMLLM,
        (
            PaperRow(
                "MFU of the 84B model",
                "41.6%",
                "not comparable",
                (PlanRun("papers/orchmllm_84b"),),
                why=f"{MADE_UP_LENGTHS}; Megatron-LM: up to 3.1x slower in the paper",
            ),
            *(
                PaperRow(
                    f"the {size.upper()} model",
                    None,
                    "not comparable",
                    (PlanRun(f"papers/orchmllm_{size}"),),
                    why=MADE_UP_LENGTHS,
                )
                for size in ("10b", "18b")
            ),
        ),
    ),
    PaperTable(
        "orchmllm",
        "Figures 9 to 13: ablations",
        ORCHMLLM,
        (
            PaperRow(
                "no dispatch, LLM phase alone, all phases",
                None,
                "measured",
                ours=lambda plans: (
                    "1.90, 1.80, 1.62 processor seconds of a step, 1.28x, 1.21x, 1.07x of the mean rank's"
                ),
                why=DISPATCH,
            ),
            PaperRow(
                "overhead of dispatches",
                None,
                "measured",
                ours=lambda plans: "0.3% of a step (0.6% by the clock of an idle machine)",
                why=DISPATCH,
            ),
            PaperRow(
                "all-to-all beside all-gather: received in a step, buffers of one exchange",
                None,
                "measured",
                ours=lambda plans: "1.38 MB and 1.25 MB, 7.67 MB and 3.60 MB",
                why=DISPATCH,
            ),
            PaperRow(
                "node-wise rearrangement: off its node, fullest rank, 2,560 ranks",
                None,
                "measured",
                ours=lambda plans: "x 0.61 to x 0.73",
                why="lengths alone; the same page",
            ),
        ),
    ),
)

ALL_TABLES = (*OPTIMUS_TABLES, *OMNIBAL_TABLES, *MMSCALE_TABLES, *ORCHMLLM_TABLES)


def all_runs(tables: Iterable[PaperTable]) -> list[PlanRun]:
    """Return the plans that tables need, each once."""
    return list(dict.fromkeys(run for table in tables for row in table.rows for run in row.runs))
