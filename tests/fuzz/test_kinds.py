"""Files of every kind with anything in them are read, or refused with a message: no traceback, no process that ends."""

from pathlib import Path

import pytest

from tests.fuzz.kinds import KINDS

NUM_ROUNDS = {"plans": 100, "tables": 200, "checkpoints": 50, "templates": 12}  # others: 30
MORE_ROUNDS = {"plans": 3000, "tables": 10_000, "checkpoints": 2000, "templates": 100}  # others: 600


@pytest.fixture(autouse=True)
def short_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let templates that would never end be ended soon."""
    monkeypatch.setattr("mmtrain.limited_reads.MAX_PROCESSOR_S", 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind: str, tmp_path: Path) -> None:
    check = KINDS[kind](tmp_path)
    for seed in range(NUM_ROUNDS.get(kind, 30)):
        check(seed)


@pytest.mark.slow  # three minutes together
@pytest.mark.parametrize("kind", KINDS)
def test_many_of_a_kind(kind: str, tmp_path: Path) -> None:
    check = KINDS[kind](tmp_path)
    for seed in range(1000, 1000 + MORE_ROUNDS.get(kind, 600)):
        check(seed)
