"""What `first_gpu.py --part right` compares: whether this machine computes what the tests hold CPUs to.

    python -m scripts.gpu.correctness rows.json [--dry-run]

Attention backends against the reference; a tiny model trained on one GPU against one process on the CPU, with layers
recomputed and frozen, colocated, in fp32 and for longer in bf16; with several GPUs the meshes of the master test that
fit on them. Ranks join as `mmtrain train` joins them. Needs the development dependencies, since model, batch and meshes
are those of the tests.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Protocol, get_args

import numpy as np
import torch

from mmtrain.models.attention import (
    AttentionBackend,
    AttentionOptions,
    SequenceLayout,
    attend,
    backend_problems,
    prepare_attention,
)
from mmtrain.models.megatron import restore_cuda
from mmtrain.program import ScheduleKind
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.resilience.launch import free_port, launch_local
from mmtrain.runtime.training.hooks.learning_rate import learning_rate
from mmtrain.runtime.world import Address, World, join, leave
from scripts.gpu.findings import Finding
from scripts.gpu.limited import Deadline
from tests.flow.cases import Mesh, Order, Reference, plan, recipe, step_data
from tests.flow.test_master import CASES, COLOCATED, COUNTS, ORDERS, PLAIN, kind_of
from tests.flow.test_nccl import ENTER_IN_DIFFERENT_ORDERS

Meshes = dict[str, Mesh]
Curve = list[tuple[float, ...]]  # (loss, gradient norm) of each step


class Run(Protocol):
    """Trains on the machine under test by a schedule of this kind; without meshes, in one process on the CPU."""

    def __call__(
        self, settings: Recipe, meshes: Meshes, kind: ScheduleKind = "1f1b", order: Order | None = None
    ) -> Curve: ...


NUM_BF16_STEPS = 40
ALONE: Meshes = {"vision": Mesh((), (0,)), "llm": Mesh((), (0,))}
RECOMPUTED: Meshes = {"vision": Mesh((), (0,), recompute=(0, 1, 2, 3)), "llm": Mesh((), (0,), recompute=(1, 2, 3, 4))}
FROZEN = {"train__freeze": ("vision.layers.[01].*", "llm.layers.[02].*", "*norm*")}
KERNELS_NEED = {"model__llm__head_dim": 8}  # a multiple of 8
FP32, BF16 = {"train__precision": "fp32"}, {"train__precision": "bf16"}
# Relative. Adam amplifies the rounding of tiny gradients from step to step, so norms in bf16 say little. Two runs on a
# GPU differ in the order in which atomic operations add up gradients. Over forty steps the loss falls from 5 to 0.007,
# and bf16 on a CPU differs by up to 1.8e-2.
TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2, "bf16, longer": 6e-2, "same": 1e-4}
# Relative to the largest value. On a CPU a right kernel in bf16 differs by up to 1.5e-2, since probabilities and
# gradients of scores are rounded to 8 bits. A GPU rounds at other places, so twice that must pass. A scale off by a
# tenth gives 0.12, a window off by one token 0.3.
ATTENTION_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
COMPILED_AT_FIRST_USE: tuple[AttentionBackend, ...] = ("flash_attn_4",)
# After which no mesh is started: on a machine with eight GPUs, all would take a quarter of an hour.
MESHES_LIMIT_S = 150
HEAD_WIDTHS = (64, 80, 128)  # of Qwen2's and Llama's heads, and of encoders


@dataclass(frozen=True)
class Row:
    """One comparison: by how much something differs, and how much it may."""

    check: str
    difference: float | str  # text says why the check was left out
    allowed: float = 0.0

    def finding(self) -> Finding:
        """Return the row as blocks report it. What is not a number is wrong."""
        if isinstance(self.difference, str):
            return Finding(self.check, self.difference, "left out")
        verdict = "ok" if self.difference <= self.allowed else "WRONG"
        return Finding(self.check, f"differs by {self.difference:.1e}, allowed {self.allowed:.0e}", verdict)


def main() -> None:
    """Write the rows to a file after each comparison. A wrong one does not end it: the others say what is to blame."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with one mesh of two ranks")
    options = parser.parse_args()
    device = torch.device("cpu" if options.dry_run else "cuda")
    if options.dry_run:
        torch.set_num_threads(1)  # on a CPU ranks are forked, which threads of OpenMP do not survive
    num_devices = 2 if options.dry_run else torch.cuda.device_count()
    findings: list[Finding] = []
    for row in rows(device, num_devices, train_here, max_meshes=1 if options.dry_run else None):
        finding = row.finding()
        findings.append(replace(finding, check=f"dry: {finding.check}") if options.dry_run else finding)
        print(findings[-1], flush=True)
        options.out.write_text(json.dumps([asdict(finding) for finding in findings]), encoding="utf-8")


def rows(device: torch.device, num_devices: int, run: Run, max_meshes: int | None = None) -> Iterator[Row]:
    """Yield every comparison that this machine allows; last those whose kernels must be compiled, which takes long."""
    names = get_args(AttentionBackend)
    yield from attention_rows(device, [name for name in names if name not in COMPILED_AT_FIRST_USE])
    yield from training_rows(device, run)
    yield from islice(mesh_rows(num_devices, run, Deadline(MESHES_LIMIT_S)), max_meshes)
    yield from attention_rows(device, COMPILED_AT_FIRST_USE)


def attention_rows(
    device: torch.device, backends: Sequence[AttentionBackend] = get_args(AttentionBackend)
) -> Iterator[Row]:
    """Compare backends with the fp32 reference: outputs and gradients, causal or not, fewer KV heads or not."""
    prepare_attention(device)
    for dtype, backend, width in product((torch.float32, torch.bfloat16), backends, HEAD_WIDTHS):
        name = f"attention {backend}, {dtype}, heads of {width}"
        if (problem := backend_problems(device, dtype, width)[backend]) is not None:
            yield Row(name, problem)
            continue
        yield Row(name, _worst_attention_difference(backend, device, dtype, width), ATTENTION_TOLERANCE[dtype])


def training_rows(device: torch.device, run: Run) -> Iterator[Row]:
    """Compare five steps on one device, and forty in bf16, with one process on the CPU in fp32."""
    settings = recipe(**KERNELS_NEED, **FP32)
    expected, actual = run(settings, {}), run(settings, ALONE)
    yield Row("train fp32, one device / CPU", difference(actual, expected), TOLERANCE["fp32"])
    yield Row("train fp32, recomputed / kept", difference(run(settings, RECOMPUTED), actual), TOLERANCE["same"])
    for offload in ("inputs", "all"):
        on_host = recipe(**KERNELS_NEED, **FP32, **{f"parallel__{unit}__offload": offload for unit in RECOMPUTED})
        name = f"train fp32, {offload} in host memory / kept"
        yield Row(name, difference(run(on_host, RECOMPUTED), actual), TOLERANCE["same"])
    frozen = recipe(**KERNELS_NEED, **FP32, **FROZEN)
    yield Row("train fp32, partly frozen / CPU", difference(run(frozen, ALONE), run(frozen, {})), TOLERANCE["fp32"])
    longer = {"train__steps": NUM_BF16_STEPS}
    in_bf16, in_fp32 = (
        [curve[:1] for curve in run(recipe(**KERNELS_NEED, **precision, **longer), meshes)]
        for precision, meshes in ((BF16, ALONE), (FP32, {}))
    )
    name = f"train bf16 for {NUM_BF16_STEPS} steps, one device / CPU fp32, losses"
    yield Row(name, difference(in_bf16, in_fp32), TOLERANCE["bf16, longer"])
    for backend in get_args(AttentionBackend):
        if backend_problems(device, torch.bfloat16, KERNELS_NEED["model__llm__head_dim"])[backend] is not None:
            continue  # said above
        half = recipe(**KERNELS_NEED, **BF16, train__attention=backend)
        actual = run(half, ALONE)
        losses = difference([curve[:1] for curve in actual], [curve[:1] for curve in expected])
        yield Row(f"train bf16 with {backend}, one device / CPU fp32, losses", losses, TOLERANCE["bf16"])
    yield from colocated_rows(run)


def colocated_rows(run: Run) -> Iterator[Row]:
    """Compare programs in which pieces of the encoder run between the LLM's, both on one device, with the CPU."""
    for name, order in ORDERS.items():
        changes, meshes = COLOCATED.get(name, ({}, {}))
        if num_ranks(meshes) == 1:
            settings = recipe(**{**KERNELS_NEED, **FP32, **changes})
            yield Row(
                f"colocated, {name}",
                difference(run(settings, meshes, "explicit", order), run(settings, {})),
                TOLERANCE["fp32"],
            )


def mesh_rows(num_devices: int, run: Run, deadline: Deadline) -> Iterator[Row]:
    """Compare the master test's meshes of two or more ranks that fit with one process on the CPU.

    Those come first that would hang if ranks connected in the order of their programs.
    """
    cases = ENTER_IN_DIFFERENT_ORDERS | CASES | COUNTS | COLOCATED | PLAIN
    for name, (changes, meshes) in cases.items():
        if name in ORDERS or not 1 < num_ranks(meshes) <= num_devices:
            continue
        if not deadline.left_s:
            yield Row(f"mesh: {name}", "no time")
            continue
        settings = recipe(**{**KERNELS_NEED, **FP32, **changes})
        curve = run(settings, meshes, kind_of(name))
        yield Row(f"mesh: {name}", difference(curve, run(settings, {})), TOLERANCE["fp32"])


def num_ranks(meshes: Meshes) -> int:
    return len({rank for mesh in meshes.values() for rank in mesh.ranks})


def difference(actual: Curve, expected: Curve) -> float:
    """Return the largest relative difference between two curves; NaN if a value is none."""
    pairs = [(a, b) for f, w in zip(actual, expected, strict=True) for a, b in zip(f, w, strict=True)]
    return float(np.max([abs(a - b) / abs(b) for a, b in pairs]))


def train(settings: Recipe, meshes: Meshes, kind: ScheduleKind, order: Order | None, world: World) -> Curve:
    """Train on this rank of a world that exists."""
    job = build_rank_context(settings, plan(settings, kind, order, **meshes), world)
    curve: Curve = []
    for step in range(settings.train.steps):
        outcome = job.train(step_data(job, step), learning_rate(settings.train.optimizer, step, settings.train.steps))
        assert outcome.grad_norm is not None
        curve.append((world.all_reduce(outcome.loss), outcome.grad_norm))
    return curve


def train_plainly(settings: Recipe) -> Curve:
    """Train in one process on the CPU, sample by sample."""
    reference = Reference(settings)
    return [reference.step()[:2] for _ in range(settings.train.steps)]


def train_here(settings: Recipe, meshes: Meshes, kind: ScheduleKind = "1f1b", order: Order | None = None) -> Curve:
    """Train in this process, joined as a rank of `mmtrain train` is; meshes of several ranks in processes of theirs."""
    if not meshes:
        try:
            return train_plainly(settings)
        finally:
            leave()
            restore_cuda()  # for what uses the GPU next
    size = num_ranks(meshes)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "curve.json"
        rank = partial(_train_rank, settings, meshes, kind, order, out)
        if size == 1:
            rank(Address(0, 1, 0, "127.0.0.1", free_port(), "mmtrain"))
        else:
            launch_local(size, rank)
        curve: Curve = [tuple(step) for step in json.loads(out.read_text(encoding="utf-8"))]
        return curve


def _train_rank(
    settings: Recipe, meshes: Meshes, kind: ScheduleKind, order: Order | None, out: Path, address: Address
) -> None:
    world = join(address)
    try:
        curve = train(settings, meshes, kind, order, world)
        if world.is_first:
            out.write_text(json.dumps(curve), encoding="utf-8")
    finally:
        leave()


def _worst_attention_difference(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, width: int
) -> float:
    """Return the largest difference over masks and numbers of KV heads; fewer of them where each is compiled."""
    masks = ((True, 0), (True, 40), (False, 0))
    cases = [(mask, kv_heads) for mask in masks for kv_heads in (1, 4)]
    if backend in COMPILED_AT_FIRST_USE:
        cases = [((True, 0), 1), ((True, 40), 4), ((False, 0), 4)]
    differences = [
        _attention_difference(AttentionOptions(backend, *mask), device, dtype, (4, kv_heads, width))
        for mask, kv_heads in cases
    ]
    return float(np.max(differences))


def _attention_difference(
    options: AttentionOptions, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> float:
    """Return the largest difference of output and gradients, relative to the largest value of each.

    shape: heads, KV heads, width of a head.
    """
    layout = SequenceLayout((33, 1, 128, 70))
    heads, kv_heads, width = shape
    sizes = ((layout.num_tokens, n, width) for n in (heads, kv_heads, kv_heads, heads))
    generator = torch.Generator().manual_seed(0)
    q, k, v, up = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)

    def run(how: AttentionOptions, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(leaves[0], leaves[1], leaves[2], layout, how)
        return [out.detach(), *torch.autograd.grad(out, leaves, up.to(out.dtype))]

    expected = run(replace(options, backend="reference"), [x.float() for x in (q, k, v)])
    pairs = zip(run(options, (q, k, v)), expected, strict=True)
    return float(np.max([float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs]))


if __name__ == "__main__":
    main()
