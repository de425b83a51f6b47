"""A process ends with its exit code although a library's hook at its end hangs."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading
from mmtrain.process_end import end_now_if_expected, expect_hang
atexit.register(threading.Event().wait)
expect_hang()
print("done")
try:
    sys.exit({code})
except SystemExit as end:
    end_now_if_expected(end.code)
    raise
"""


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("75", 75), ("None", 0), ("'a message'", 1)])
def test_hooks_that_hang_are_passed_over(code: str, expected: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(code=code)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (expected, "done\n")
