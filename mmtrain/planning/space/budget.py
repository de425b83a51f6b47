"""Every tuned constant of the search: how much the planner tries, and the factors that its estimates rest on.

Where a source is named, it is a decision (docs/decisions), a measurement (docs/measurements) or a commit. "Chosen
by hand" means that nothing was measured when the value was set; `python -m scripts.bench_plan` shows the effect.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingBudget:
    """Which global batches stand for the run (`space/sample_batches.py`)."""

    num_batches: int = 3  # chosen by hand: a light, a middle and a heavy step
    # Samples beyond which fewer batches are taken, one at least: steps of so many samples hardly differ (a tenth of
    # their spread with 500), and each batch is laid out anew for every split. No what-if recipe has 11,000 a step but
    # those of OrchMLLM's paper with 64,000 to 81,000.
    max_samples: int = 16_384
    sample_surplus_ratio: float = 1.25  # samples beyond those that fill the groups on average; packing leaves gaps
    min_samples_to_group: int = 4096  # with fewer to choose from, sampled batches are less even than training's
    # Share by which a later microbatch may exceed the largest sampled one: "Memory is planned for what may come".
    unsampled_load_ratio: float = 1.1


@dataclass(frozen=True)
class LoadBudget:
    """When microbatches are priced between nodes, not one by one ("Large sets of loads are priced at nodes")."""

    max_exact_loads: int = 256  # different microbatches of a unit that are priced one by one
    num_token_nodes: int = 24  # numbers of tokens that stand for all; errors stay below 0.1% on the presets


@dataclass(frozen=True)
class MeshBudget:
    """Which meshes are enumerated (`search/mesh_enumeration.py`)."""

    llm_vpp: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12)  # model chunks per pipeline rank; chosen by hand
    encoder_vpp: tuple[int, ...] = (1, 2)  # the same for an encoder on ranks of its own; chosen by hand
    colocated_vpp: tuple[int, ...] = (1, 2, 4)  # the same for the LLM of `colocated`; chosen by hand
    merged_microbatches: tuple[int, ...] = (1, 2, 4)  # LLM microbatches that one of an encoder may serve; by hand
    # Sequences are shared between ranks (context parallelism) where the recipe asks for it, or where a microbatch may
    # have so many tokens; no what-if recipe below that gained. Each rank then gets at least so many of them: below,
    # kernels of a 7B model are too short for the messages beside them. Both chosen by hand.
    min_tokens_to_share: int = 32_768
    min_tokens_per_cp_rank: int = 8_192
    max_ranks_to_enumerate_all: int = 8  # "On more than eight ranks": tests/planning/exhaustive.py compares up to there
    num_first_assignments: int = 20  # of units on ranks of their own, for suggestions and explanations; by hand
    # Of these, those with one mesh of the LLM, so that not all are lost where it does not fit (commit 121e677).
    max_assignments_per_llm_mesh: int = 4
    max_near_assignments: int = 24  # the same near the fastest assignment; chosen by hand
    # Share of a step that an encoder's pipeline must take to fill before chunks are tried; below, chunks changed no
    # plan of the what-if recipes (commit 96f3cbb).
    min_fill_share_for_chunks: float = 0.01
    # Of the memory, for the lower bounds by which ranks are allocated again where no layout of `disaggregated` fits:
    # ranks hold up to twice what the bound counts ("Where memory is tight, ranks are allocated again").
    roomier_shares: tuple[float, ...] = (0.7, 0.5)
    num_rank_counts: int = 8  # with parallel.max_gpus: numbers of ranks that are tried, in steps of ...
    rank_count_divisor: int = 16  # ... this part of the largest; both chosen by hand


@dataclass(frozen=True)
class BoundBudget:
    """Slack of the arithmetic lower bounds (`evaluate/lower_bounds.py`); chosen by hand."""

    interleaved_fill_share: float = 0.9  # of an interleaved pipeline's fill time that uneven chunks may leave


@dataclass(frozen=True)
class PartitionBudget:
    """How many layer partitions are estimated and simulated (`search/best_first_search.py`, OmniBal's jitter)."""

    # If all mesh assignments together have at most this many partitions, each is estimated, and the result is that of
    # exhaustive search: 200 of 200 random instances (docs/benchmarks.md, Planning).
    max_partitions_to_try_all: int = 2_000
    # The values below apply to larger searches. 19 of 20 random instances come within 1% of exhaustive search, all 20
    # where every placement is allowed (`python -m scripts.bench_plan --only larger`).
    max_jitters_per_assignment: int = 160
    max_jitter_rounds: int = 8  # one round left 2% to a mixed-integer program at 46 + 80 layers (commit 1c218b3)
    max_boundary_shift: int = 3  # layers by which a stage boundary moves away from the anchor
    max_scored_jitters: int = 20_000  # partitions near the anchor that are scored; the most even ones are estimated
    jitter_seed: int = 0
    # Mesh assignments of units on ranks of their own that are looked at, besides those near the fastest. Searches end
    # sooner where no estimate of another one is near the best step.
    max_assignments: int = 120
    # Of the estimate of a mesh assignment, corrected by the least ratio seen: others may lie so much below.
    mesh_estimate_discount: float = 0.97
    near_estimate_discount: float = 0.93  # the same for those near the fastest assignment, which are few
    max_estimate_ratio: float = 1.05  # an assignment is left if its best estimate exceeds the fastest step by more
    # The best partition near an anchor was at most 4.8% faster than it, in 51 assignments of a 197B model ("The search
    # glances at a sizing before it looks closely").
    anchor_estimate_discount: float = 0.95
    # A placement whose best layout is so many times as slow as the fastest is searched until no other layout can be
    # faster by the second ratio: half of eva_llama_26b's planning was spent on the last percents of one that lost.
    far_loser_ratio: float = 1.1
    far_loser_slack: float = 1.05
    num_runner_ups: int = 2  # further partitions of the fastest assignment that are simulated; chosen by hand
    # Assignments that are simulated at least, however few are shown: estimates are off by some percent, and with five
    # InternVL-26B was given a step of 4.76 s for 4.67.
    min_simulated: int = 6
    # A layout that takes so many times as long as the fastest on the first sampled batch is not simulated on the
    # others: ratios of steps and of first batches differ by less than 1% (recipes/whatif).
    max_first_batch_ratio: float = 1.02
    # Forwards and backwards of a layout beyond which it is not simulated just to be ranked: of internvl_26b's first six
    # layouts, three with 6,144 to 24,576 of them took a quarter of the planner's time.
    max_passes_of_ranked: int = 4_000
    many_passes_ratio: float = 1.0  # it is simulated where its bound lies below this ratio of the fastest step
    max_simulated: int | None = None  # layouts of one search for the fastest; None: until no other can be faster
    num_estimated_replica_groups: int = 2  # those of a batch with most work stand for all; chosen by hand


@dataclass(frozen=True)
class EvaluationBudget:
    """Memory fitting and simulation of one candidate."""

    # Rounds of recomputing more layers: the working memory of a recomputed layer may take what it saves. By hand.
    max_fit_rounds: int = 4
    max_recompute_combinations: int = 50_000  # beyond, the best ratio of seconds to bytes decides; chosen by hand
    # Forwards and backwards of a step up to which every replica group is simulated ("Where replica groups are very
    # many, the heaviest stands for all").
    max_passes_of_all_groups: int = 2_000
    # What large batches would fill gigabytes with is kept up to these sizes; most recipes stay below them. By hand.
    # ("What the search keeps of large batches has a size")
    max_kept_batch_bytes: int = 32_000_000  # samples and items of the sampled batches, as splits arrange them
    max_kept_load_bytes: int = 80_000_000  # loads of every microbatch of a unit
    max_kept_time_bytes: int = 96_000_000  # seconds of layers for every microbatch
    max_kept_step_bytes: int = 64_000_000  # loads and routes of whole batches, or of one replica group, ...
    min_kept_steps: int = 6  # ... and so many of them however large: those of two layouts
    max_kept_order_actions: int = 1_000_000  # of the orders of compute that estimates share; some 100 bytes each
    max_kept_program_actions: int = 200_000  # of programs simulated before, whose actions take some 500 bytes each


@dataclass(frozen=True)
class ColocatedBudget:
    """How many layouts of `colocated` are scheduled (`colocated/`); all chosen by hand."""

    # Mesh assignments whose layers are divided, so that their bounds know what must be recomputed.
    max_laid_out: int = 64
    bound_class_ratio: float = 1.25  # bounds of these that differ by less do not decide which of them is tried first
    # So many of these are scheduled, and more until they have so many forwards and backwards together (of one replica).
    # Where all of them are far behind another placement, either is enough.
    min_tried_assignments: int = 8
    max_scheduled_passes: int = 2_000
    max_merged_layouts: int = 12  # of those, tried with fewer microbatches of the encoders, ...
    max_merged_in_vain: int = 4  # ... until so many simulated ones in a row lose, ...
    # ... or until they have so many passes: eleven of OmniBal's 6B and 110B, with up to 11,000 each, took a quarter of
    # its planning and lost, while all of omnibal_qwen_116b together have 6,000.
    max_merged_passes: int = 6_000
    # Forwards and backwards of a layout beyond which others come first: 8,192 took half the search of eva_llama_26b,
    # while the fastest layout of optimus_197b has 2,448.
    max_passes_to_come_first: int = 4_000
    recompute_shares: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a stage's layers
    fills_tp_bubbles: bool = True  # with pieces of layers, wherever the LLM's collectives leave the rank time
    # The coarse order is simulated unless another is faster than this share of its bound, which sampled batches and
    # reductions that overlap make inexact.
    coarse_bound_share: float = 0.95
    # Layouts so many times as slow as the fastest colocated one get rougher figures, without the coarse order. Where
    # the LLM waits for collectives, which pieces of layers may fill, that ratio is as much larger as it could shrink.
    # The same ratio to another placement's plan says that `colocated` is far behind it.
    far_ratio: float = 1.1
    # Encoder pieces with no communication between them are joined to kernels of at most this share of the LLM's longest
    # communication gap, so that a kernel fits into the gap.
    max_kernel_share_of_gap: float = 0.5


@dataclass(frozen=True)
class BaselineBudget:
    """How long a plan by a rule of thumb is sought (`advise/baselines.py`, commit ffd06dd)."""

    meshes_per_round: int = 4  # of which the fastest is taken
    max_rounds: int = 12  # until one of them fits


@dataclass(frozen=True)
class RerunBudget:
    """How often a plan that is run recomputes more or fewer layers (`measured_choice.py`); chosen by hand."""

    max_take_backs: int = 3  # runs with less recomputation than the memory model asks for
    shares_after_misfit: tuple[float, ...] = (0.9, 0.8, 0.7)  # of the memory, counted, after a run had too little


@dataclass(frozen=True)
class ExplanationBudget:
    """How many losers are explained, and how long a fitting change is sought where nothing fits; all by hand."""

    max_misfits_to_try: int = 12  # mesh assignments that cannot fit by their bound, tried where nothing else fits
    max_unsearched: int = 200  # mesh assignments that were never looked at, explained by their bound
    num_closest: int = 3  # candidates named in the error where none fits
    max_rank_doublings: int = 6  # larger clusters that are suggested at most
    max_meshes_per_suggestion: int = 20  # tried for each suggestion, the most split first
    max_meshes_scanned: int = 500  # among which those are sought


@dataclass(frozen=True)
class SearchBudget:
    """All budgets of one planning run."""

    sampling: SamplingBudget = field(default_factory=SamplingBudget)
    loads: LoadBudget = field(default_factory=LoadBudget)
    meshes: MeshBudget = field(default_factory=MeshBudget)
    bounds: BoundBudget = field(default_factory=BoundBudget)
    partitions: PartitionBudget = field(default_factory=PartitionBudget)
    evaluation: EvaluationBudget = field(default_factory=EvaluationBudget)
    colocated: ColocatedBudget = field(default_factory=ColocatedBudget)
    baselines: BaselineBudget = field(default_factory=BaselineBudget)
    reruns: RerunBudget = field(default_factory=RerunBudget)
    explanations: ExplanationBudget = field(default_factory=ExplanationBudget)


DEFAULT_BUDGET = SearchBudget()
# For a plan that is compared and not shown: about the anchor partition of each mesh, and few layouts. Without a limit
# to those that are simulated, 44 of mmscale_70b in recipes/whatif/papers took 250 seconds to find nothing faster.
QUICK_BUDGET = SearchBudget(
    partitions=PartitionBudget(
        max_jitters_per_assignment=8,
        max_jitter_rounds=1,
        num_runner_ups=0,
        min_simulated=1,
        max_simulated=16,
        many_passes_ratio=0.95,
    ),
    colocated=ColocatedBudget(
        max_laid_out=8,
        min_tried_assignments=1,
        max_scheduled_passes=0,
        max_merged_layouts=0,
        fills_tp_bubbles=False,
    ),
)
