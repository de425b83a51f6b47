"""What all tests share: property tests with the same examples on every machine, signals that arrive, torch as it was.

Property tests run on few examples in `make test`, and again on many in `make test-long`.
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

START_S = time.monotonic()

# torch reads this when it is imported. Tests run side by side, and their models are too small for several threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

EXAMPLES = {"quick": 20, "thorough": 100}  # of each property; `--hypothesis-profile` chooses

for profile, examples in EXAMPLES.items():
    settings.register_profile(
        profile,
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("quick")

# A shell makes its background jobs ignore Ctrl-C, and `nohup` makes a command ignore a closed terminal. Our runs
# respect both, so tests of them would wait in vain.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what `.ci/run` uses on slow machines."""
    parser.addoption("--minutes", type=float, help="skip the tests that have not begun after so many minutes")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among the tests and what they import: scanning takes a third of the time of reading them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that comes too late."""
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - START_S >= 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes of this run were over")


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Undo what building a stage on the host replaced in torch, so that the next test can use a GPU."""
    yield
    if (compat := sys.modules.get("mmtrain.models.megatron.compat")) is not None:
        compat.restore_cuda()
