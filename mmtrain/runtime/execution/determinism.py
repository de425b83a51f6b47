"""Make a run compute the same bits each time (`train.deterministic`)."""

import os

import torch

# cuBLAS shares its workspace among streams unless this is set, and sums in another order from run to run. It reads the
# variable when it starts, and takes this value or `:16:8`.
CUBLAS_WORKSPACE_VARIABLE, CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def set_determinism(deterministic: bool) -> None:
    """Choose between torch's fastest operations and those that repeat their bits; call this before the first GEMM.

    Kernels of attention ask torch for this choice. An operation that has no deterministic form raises RuntimeError and
    names itself.
    """
    if deterministic:
        os.environ.setdefault(CUBLAS_WORKSPACE_VARIABLE, CUBLAS_WORKSPACE)
        # Every buffer is written before it is read.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)
