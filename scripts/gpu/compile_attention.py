"""Compile FlashAttention-4's kernels for Hopper GPUs without one, into its own cache, as mmtrain calls them.

    python -m scripts.gpu.compile_attention FOLDER

A kernel takes seconds for each width of heads, mask and group of query heads, time that a machine with a GPU can spend
better. `first_gpu.py --pack FOLDER` takes them along. The cache is keyed by versions too: those here must be
those there, which `pack.py` names.
"""

import argparse
import importlib.metadata
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mmtrain.models.attention import AttentionOptions, SequenceLayout, attend
from scripts.gpu.cases import MODELS
from scripts.gpu.limited import kernel_cache
from scripts.gpu.requirements import use_folders_of_target_installs
from scripts.gpu.training_run import LLM, VISION

NEEDED = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")
HOPPER = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
LENGTHS = (1100, 1200, 1000, 1300)  # no key of the cache
Case = tuple[int, int, int, bool, int]  # heads, KV heads, width of a head, causal, window


def main() -> int:
    """Compile all cases; return 1 if one fails, 2 if packages are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="kernels go to FOLDER/compiled-kernels; those there are kept")
    options = parser.parse_args()
    use_folders_of_target_installs()
    if problem := missing_for_compiling():
        print(f"compile_attention: {problem}", file=sys.stderr)
        return 2
    os.environ.update(HOPPER | kernel_cache(options.folder))
    warnings.simplefilter("ignore")
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: "H100"
    num_failed = 0
    for case in cases():
        start_s = time.monotonic()
        try:
            compile_case(*case)
            how = f"{time.monotonic() - start_s:.1f} s"
        except Exception as error:  # of the compiler, for one case
            num_failed += 1
            how = f"FAILED: {type(error).__name__}: {error}"
        print("heads {}, KV heads {}, width {}, causal {}, window {}: {}".format(*case, how), flush=True)
    return 1 if num_failed else 0


def missing_for_compiling() -> str | None:
    """Return what must be installed first; None if kernels can be compiled here."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA; install its build for CUDA, which needs no GPU"
    installed = {found.metadata["Name"].lower() for found in importlib.metadata.distributions()}
    if missing := [name for name in NEEDED if name not in installed]:
        return f"not installed here: {', '.join(missing)}. Install the versions that scripts/gpu/pack.py names"
    return None


def cases() -> list[Case]:
    """Return what first_gpu.py's cases, run, comparisons and tests call."""
    found: list[Case] = []
    for vision, llm in [*((model.vision, model.llm) for model in MODELS.values()), (VISION, LLM)]:
        found.append((llm["heads"], llm["kv_heads"], llm["hidden"] // llm["heads"], True, 0))
        found.append((vision["heads"], vision["heads"], vision["hidden"] // vision["heads"], False, 0))
    for width in (64, 80, 128):  # HEAD_WIDTHS of correctness.py, and its masks
        found += [(4, 1, width, True, 0), (4, 4, width, True, 40), (4, 4, width, False, 0)]
    found += [(4, 2, 8, True, 0), (2, 2, 8, False, 0)]  # of the model that correctness.py trains
    for width in (64, 80, 100, 128, 256):  # tests/models/test_cuda.py
        found += [(4, 2, width, True, 0), (4, 2, width, False, 0), (4, 2, width, True, 7)]
    return list(dict.fromkeys(found))


def compile_case(heads: int, kv_heads: int, width: int, causal: bool, window: int) -> None:
    """Call forward and backward on tensors without data, which compiles both."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        layout = SequenceLayout(LENGTHS)
        sizes = [(layout.num_tokens, num, width) for num in (heads, kv_heads, kv_heads)]
        q, k, v = (torch.empty(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in sizes)
        layout._cu_seqlens[q.device] = torch.empty(len(LENGTHS) + 1, device="cuda", dtype=torch.int32)
        out = attend(q, k, v, layout, AttentionOptions("flash_attn_4", causal, window))
        # Autograd's engine asks for a stream of the device. The node of the kernel can be called without it.
        node = out.grad_fn
        while node is not None and "FlashAttn" not in type(node).__name__:
            node = node.next_functions[0][0]
        assert node is not None, "attention has no kernel with a gradient"
        node.apply(torch.empty(*out.shape[:2], -(-width // 8) * 8, device="cuda", dtype=out.dtype), None)


if __name__ == "__main__":
    sys.exit(main())
