"""What all tests share: property tests that draw the same examples on every machine, however slow it is."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "same-everywhere", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same-everywhere")
