"""Compare forms of the loss over a large vocabulary: time and memory of projection, loss and gradients.

    python scripts/bench_loss.py [--tokens 2048] [--hidden 1024] [--vocab 50000] [--targets 0.25]

All get the same hidden states and weights. Megatron-core's loss takes all tokens, and those without a target are
multiplied by zero; ours takes only tokens with a target, all at once (`whole`) or by chunks (`chunks`). The line ends
with the form that a run takes. Runs on one rank, on CUDA in bf16 where there is a device.
"""

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch import Tensor

from mmtrain.models.kernels import vocab_loss
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.loss_chunks import LossSizes

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """Inputs of both losses."""

    hidden: Tensor  # (T, hidden)
    weight: Tensor  # (vocab, hidden)
    labels: Tensor  # (T,), -100 for none
    groups: ParallelGroups

    def megatron(self) -> Tensor:
        """Compute the loss of all tokens."""
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = self.groups.tp  # Megatron-core's loss reads this global
        losses: Tensor = vocab_parallel_cross_entropy(self.hidden @ self.weight.T, self.labels.clamp(min=0))
        return (losses * (self.labels != -100)).sum()

    def whole(self) -> Tensor:
        """Compute the loss of tokens with a target, with all their logits."""
        return vocab_loss.losses_at_once(*self._rows_with_targets(), len(self.weight), self.groups.tp).sum()

    def chunks(self) -> Tensor:
        """Compute it by chunks."""
        return vocab_loss.losses_by_chunks(*self._rows_with_targets(), len(self.weight), self.groups.tp).sum()

    def chosen(self) -> str:
        """Return the name of the form that a run takes."""
        tokens = int((self.labels != -100).sum())
        num_ids, width = self.weight.shape
        sizes = LossSizes(tokens, num_ids, width, self.hidden.element_size(), trains_matrix=True)
        return "chunks" if sizes.uses_chunks else "whole"

    def _rows_with_targets(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.nonzero(self.labels != -100).squeeze(1)
        return self.hidden.index_select(0, rows), self.weight, self.labels.index_select(0, rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--targets", type=float, nargs="*", default=[1.0, 0.25])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, one core"
    torch.set_num_threads(1)
    now = time.perf_counter if device.type == "cuda" else time.process_time  # other work must not count
    if options.peak_of:
        case = make_case(options, options.targets[0], device)
        print(added_peak_mib(getattr(case, options.peak_of), device))
        return
    print(f"{name}, torch {torch.__version__}; {options.tokens} tokens x {options.hidden}, {options.vocab} ids")
    for share in options.targets:
        case = make_case(options, share, device)
        forms = (case.megatron, case.whole, case.chunks)
        peaks: dict[str, float] = {}
        for form in forms:
            case.hidden.grad = case.weight.grad = None
            on_cpu = device.type == "cpu"
            peaks[form.__name__] = peak_mib(options, share, form.__name__) if on_cpu else added_peak_mib(form, device)
        seconds: dict[str, list[float]] = {form.__name__: [] for form in forms}
        losses: dict[str, float] = {}
        for _ in range(options.rounds):
            for form in forms:
                case.hidden.grad = case.weight.grad = None
                start = now()
                losses[form.__name__] = run(form)
                seconds[form.__name__].append(now() - start)
        allowed = 1e-3 if device.type == "cpu" else 1e-2  # in bf16
        assert max(losses.values()) / min(losses.values()) - 1 < allowed, losses
        medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
        described = [f"{name} {medians[name] * 1e3:.0f} ms, {peaks[name]:.0f} MiB" for name in seconds]
        ratio = statistics.median(b / a for a, b in zip(seconds["whole"][1:], seconds["chunks"][1:], strict=True))
        print(
            f"{share:.0%} with a target: {'; '.join(described)}. Chunks: {ratio:.3f} x the time of the whole (median "
            f"of pairs), {peaks['chunks'] / peaks['whole']:.2f} x its memory. A run takes: {case.chosen()}"
        )
    dist.destroy_process_group()


def make_case(options: argparse.Namespace, share: float, device: torch.device) -> Case:
    """Draw hidden states, weights and labels."""
    tokens, hidden, vocab = options.tokens, options.hidden, options.vocab
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    labels = torch.randint(0, vocab, (tokens,), generator=generator, device=device)
    labels[torch.rand(tokens, generator=generator, device=device) >= share] = -100
    drawn = (torch.randn(n, hidden, generator=generator, device=device) for n in (tokens, vocab))
    states, weight = (x.mul_(hidden**-0.5).to(dtype).requires_grad_() for x in drawn)
    return Case(states, weight, labels, ParallelGroups.single())


def run(compute: Callable[[], Tensor]) -> float:
    """Compute a loss and its gradients; return the loss."""
    loss = compute()
    loss.backward()
    return loss.item()


def peak_mib(options: argparse.Namespace, share: float, name: str) -> float:
    """Return the most memory that one pass adds, gradients of the inputs included, in a process of its own."""
    sizes = ["--tokens", options.tokens, "--hidden", options.hidden, "--vocab", options.vocab]
    command = [sys.executable, "-W", "ignore", __file__, *map(str, sizes), "--targets", str(share), "--peak-of", name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def added_peak_mib(compute: Callable[[], Tensor], device: torch.device) -> float:
    """Return the most memory that one pass adds to what this process has held."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(compute)
        return (torch.cuda.max_memory_allocated() - before) / MIB
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is held now
    held_kib = _status_kib("VmRSS")
    run(compute)
    return (_status_kib("VmHWM") - held_kib) / 1024


def _status_kib(name: str) -> int:
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:")]
    return int(line.split()[1])


if __name__ == "__main__":
    main()
