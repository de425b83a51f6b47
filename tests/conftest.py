"""What all tests share: equal examples of property tests on every machine, and signals that arrive."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "same-everywhere", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same-everywhere")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs deaf to Ctrl-C, which a run of ours respects and tests of it cannot.
    signal.signal(signal.SIGINT, signal.default_int_handler)
