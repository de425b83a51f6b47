"""Wheels for every system on which the core is said to run."""

import pytest

from scripts.resolve_platforms import PLATFORMS, resolve

NO_SUCH_SYSTEM = ("mmtrain_1_0_none",)
OLDEST, NEWEST = "3.11", "3.13"


@pytest.fixture(scope="module")
def on_linux() -> list[str]:
    try:
        return resolve(PLATFORMS["Linux, x86-64"], OLDEST)
    except ValueError as error:
        pytest.skip(f"no package index answers, or it lacks packages: {error}")


@pytest.mark.long  # asks a package index
@pytest.mark.parametrize("python", [OLDEST, NEWEST])
@pytest.mark.parametrize("system", [name for name in PLATFORMS if not name.startswith("Linux")])
def test_the_core_is_wheels_alone(system: str, python: str, on_linux: list[str]) -> None:
    packages = {line.split()[0].lower() for line in resolve(PLATFORMS[system], python)}
    assert {"numpy", "pydantic", "tokenizers", "pillow"} <= packages
    assert packages.isdisjoint({"torch", "megatron-core"})
    assert len(packages) == len(on_linux)


@pytest.mark.long
@pytest.mark.usefixtures("on_linux")
def test_a_system_without_wheels_is_an_error() -> None:
    with pytest.raises(ValueError, match="No matching distribution"):
        resolve(NO_SUCH_SYSTEM, OLDEST)
