"""Find out which GPUs of this machine still work, after a failure that may have been theirs."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import torch

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_TEST_TIMEOUT_S = 60.0  # importing torch and creating a context takes seconds; a broken device may hang
# Memory, a kernel and a copy back: what a device that has fallen off the bus, or needs a reset, does not do.
# No assert: PYTHONOPTIMIZE would strip it.
DEVICE_TEST = "import sys, torch; sys.exit(torch.ones(1 << 20, device='cuda').sum().item() != 1 << 20)"


def given_devices(env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them; empty without GPUs."""
    if not torch.cuda.is_available():
        return ()
    names = env.get(VISIBLE_DEVICES)
    return tuple(map(str, range(torch.cuda.device_count()))) if names is None else tuple(names.split(","))


def find_usable_devices(names: Sequence[str], device_test: str = DEVICE_TEST) -> tuple[str, ...]:
    """Try out each GPU in a process of its own and return those that work, in the same order.

    A broken device can hang or end the process that uses it, and the launcher must keep no device in use.
    """
    tests = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", device_test],
            env=os.environ | {VISIBLE_DEVICES: name},
            stderr=subprocess.DEVNULL,  # a traceback for each broken device would hide the failure of the run
        )
        for name in names
    ]
    return tuple(name for name, test in zip(names, tests, strict=True) if _succeeds(test))


def _succeeds(test: "subprocess.Popen[bytes]") -> bool:
    try:
        return test.wait(DEVICE_TEST_TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        test.kill()  # not waited for: a process that hangs in a driver does not end before the driver answers
        return False
