"""Pages say that mmtrain ran on a GPU only beside a record of that run, and say that it did not without one."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "gpu_runs"
CLAIMS = {  # page -> the sentence that goes with the first record
    "README.md": "The CUDA path has not been run yet",
    "docs/gpu.md": "Nothing on this page has been run on a GPU yet",
    "docs/benchmarks.md": "No GPU has run anything here",
}
FACTS = ("gpu", "torch", "cuda", "python", "commit")


def problems_of(record: Path) -> list[str]:
    """Return what is wrong with a record, a `results-PART.json` of `first_gpu.py` named DATE-CARD.json."""
    content = json.loads(record.read_text(encoding="utf-8"))
    problems = [f"no {fact}" for fact in FACTS if not content.get("machine", {}).get(fact)]
    if content.get("dry", True):
        problems.append("a dry run")
    if not any(row.get("verdict") == "ok" for row in content.get("rows", [])):
        problems.append("no row that is ok")
    card = content.get("machine", {}).get("gpu", "").replace("NVIDIA ", "").split(" ")[0].lower()
    if not record.stem.endswith(f"-{card}") or not record.stem[:10].replace("-", "").isdigit():
        problems.append(f"its name is not DATE-{card}.json")
    return problems


@pytest.mark.parametrize("page", CLAIMS)
def test_a_page_says_whether_a_gpu_has_run_it(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").replace("**", "").split())
    assert (CLAIMS[page] in text) == (not list(RECORDS.glob("*.json")))


def test_every_record_is_of_a_run_on_a_gpu() -> None:
    assert {record.name: problems for record in RECORDS.glob("*.json") if (problems := problems_of(record))} == {}


def test_a_dry_run_is_no_record(tmp_path: Path) -> None:
    machine = {"gpu": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0", "python": "3.12.1", "commit": "0" * 40}
    content = {"dry": False, "machine": machine, "rows": [{"check": "a", "found": "b", "verdict": "ok"}]}
    record = tmp_path / "2027-01-02-h200.json"
    record.write_text(json.dumps(content))
    assert problems_of(record) == []
    record.write_text(json.dumps({**content, "dry": True, "rows": [], "machine": {**machine, "cuda": ""}}))
    assert problems_of(record) == ["no cuda", "a dry run", "no row that is ok"]
    other_name = tmp_path / "today-h100.json"
    other_name.write_text(json.dumps(content))
    assert problems_of(other_name) == ["its name is not DATE-h200.json"]
