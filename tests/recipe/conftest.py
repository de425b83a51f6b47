from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

BASE = """
name: tiny
model:
  vision: {layers: 2, hidden: 32, heads: 4, ffn: 64, patch: 14, max_side: 32}
  llm: {layers: 2, hidden: 64, heads: 4, kv_heads: 2, ffn: 128, vocab: 512}
data:
  sources:
    - path: train.json
  tokenizer: tok.json
  seq_len: 2048
train:
  steps: 10
  global_batch: 4
  optimizer:
    lr: 1e-3
"""

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a recipe file below a temporary folder."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).lstrip(), encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def base(write: Write) -> Path:
    """Write a small valid recipe."""
    return write("base.yaml", BASE)
