"""Predict what a rank for the images brings Qwen3.5-27B, beside what NVIDIA's tutorial measured.

    python -m scripts.encoder_ranks [--log]

The tutorial (tutorials/megatron_mimo/qwen35-vl-non-colocated-sft.md of NVIDIA-NeMo/Megatron-Bridge) compares two
layouts of the LLM on 16 ranks: with the encoder on the ranks of the first stage, and with it on a 17th rank. Both are
planned as they stand, on samples of one image and 2,048 tokens. "With attention" plans the same LLM with attention in
the place of its gated DeltaNets, whose rule is plain torch here: an LLM about as fast as with kernels of that rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mmtrain.planning.artifact.plan_change import plan_layout
from mmtrain.planning.planner import plan
from scripts.measurements import Report, arguments, start
from scripts.whatif_problems import whatif_problem

RECIPE = "qwen3_5_vl_27b"
MESH = "tp: 4, pp: 2, dp: 2, vpp: 1, sp: false, recompute: none, layers_per_chunk: [32, 32]"
STANDARD = ("cluster.ranks=16", "parallel.placement=unified", f"parallel.llm={{{MESH}}}", "parallel.vision={pp: 1}")
IMAGES_APART = (
    "parallel.placement=disaggregated", f"parallel.llm={{{MESH}}}", "parallel.vision={tp: 1, pp: 1, dp: 1}",
)  # fmt: skip
BATCHES = (32, 64)  # samples of a step, of which each replica's microbatch has one
REPLICAS = 2
WITH_ATTENTION = ("model.llm.delta_net=null", "model.llm.full_attention_blocks=[]")
LLMS = {"as it is": (), "with attention": WITH_ATTENTION}
# Of the tutorial's table at 2,048 tokens, by samples of a step: how much shorter steps were for CORD-v2, RDR, MedPix.
MEASURED_SHORTER = {32: (0.281, 0.276, 0.238), 64: (0.305, 0.350, 0.327)}
MEASURED_GAIN = {32: (0.310, 0.299, 0.236), 64: (0.355, 0.447, 0.398)}  # of active tokens/s/GPU


@dataclass(frozen=True)
class Pair:
    """The predicted steps of both layouts, in seconds."""

    standard_s: float
    apart_s: float

    @property
    def shorter(self) -> float:
        """By which share the step is shorter with a rank for the images."""
        return 1 - self.apart_s / self.standard_s

    @property
    def gain(self) -> float:
        """What a rank for the images adds to the tokens of a second and rank."""
        return self.standard_s * 16 / (self.apart_s * 17) - 1


def predict(batch: int, of_llm: Sequence[str]) -> Pair:
    """Plan both layouts."""
    common = (f"train.global_batch={batch}", *of_llm)
    plans = [plan(whatif_problem(RECIPE, (*common, *layout))) for layout in (STANDARD, IMAGES_APART)]
    return Pair(*(found.predicted.step_time_s for found in plans))


def main() -> None:
    report = start("A rank for the images of Qwen3.5-27B", arguments(__doc__).parse_args())
    pairs = {(llm, batch): predict(batch, changes) for llm, changes in LLMS.items() for batch in BATCHES}
    report.table("LLM", "samples", "16 ranks", "16 + 1", "shorter", "the tutorial's", "tokens/s/GPU", "the tutorial's")
    for (llm, batch), pair in pairs.items():
        steps = f"{pair.standard_s:.2f} s", f"{pair.apart_s:.2f} s"
        shorter, gain = f"{pair.shorter:+.1%}", f"{pair.gain:+.1%}"
        report.row(llm, batch, *steps, shorter, _span(MEASURED_SHORTER[batch]), gain, _span(MEASURED_GAIN[batch]))
    report.line()
    _of_a_microbatch(report, pairs)
    report.line()
    report.table("ranks", "fastest plan of any layout, 64 samples", "step", "tokens/s/GPU")
    for ranks in (16, 17, 32):
        found = plan(whatif_problem(RECIPE, (f"cluster.ranks={ranks}", "train.global_batch=64")))
        step_s = found.predicted.step_time_s
        report.row(ranks, plan_layout(found).summary, f"{step_s:.2f} s", f"{64 * 2048 / step_s / ranks:.0f}")


def _span(shares: Sequence[float]) -> str:
    return f"{min(shares):.1%} to {max(shares):.1%}"


def _of_a_microbatch(report: Report, pairs: dict[tuple[str, int], Pair]) -> None:
    """Write what a further microbatch of each replica costs, and how much of the LLM's time the encoder's is."""
    few, many = BATCHES
    report.table("a further microbatch", "16 ranks", "16 + 1", "encoder / LLM")
    for llm in LLMS:
        added = (many - few) // REPLICAS
        standard_s = (pairs[llm, many].standard_s - pairs[llm, few].standard_s) / added
        apart_s = (pairs[llm, many].apart_s - pairs[llm, few].apart_s) / added
        report.row(llm, f"{1e3 * standard_s:.0f} ms", f"{1e3 * apart_s:.0f} ms", f"{standard_s / apart_s - 1:.0%}")
    ratios = [shorter / (1 - shorter) for shorters in MEASURED_SHORTER.values() for shorter in shorters]
    report.row("the tutorial's steps, if all of the difference is the encoder's", "-", "-", _span(ratios))


if __name__ == "__main__":
    main()
