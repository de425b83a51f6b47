"""A process continues when the reader of its output is gone."""

import subprocess
import sys

from tests.waiting import MAX_WAIT_S

PRINTS = """
import sys
from mmtrain.runtime.resilience.lost_output import ignore_lost_output
ignore_lost_output()
ignore_lost_output()
sys.stdin.read()
print("x" * 100_000, flush=True)
print("y", file=sys.stderr)
sys.exit(75)
"""


def test_a_process_goes_on_after_its_reader_is_gone() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PRINTS], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        for stream in (process.stdout, process.stderr, process.stdin):
            assert stream is not None
            stream.close()
        assert process.wait(MAX_WAIT_S) == 75
