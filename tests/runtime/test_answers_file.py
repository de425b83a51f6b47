"""`mmtrain evaluate --out`: a line of JSON for each answer, written as the answers come."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mmtrain.errors import RunError
from mmtrain.runtime.evaluation import qa_eval
from mmtrain.runtime.evaluation.answers_file import AnswerLine, AnswersFile
from mmtrain.runtime.evaluation.generate import GreedyGenerator
from tests.full_disk import full_disk
from tests.pixels import undecodable_png
from tests.runtime.models import evaluated, run_folder
from tests.runtime.taught import COLOURS, Taught, asking, row

LINE = AnswerLine("a", "<image>What colour?", ("red.png",), "red", "rot", {"exact": 0.0}, 2)


def lines_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_every_answer_is_a_line(taught: Taught, tmp_path: Path) -> None:
    (taught.folder / "cut.png").write_bytes(undecodable_png((taught.folder / "red.png").read_bytes()))
    rows = [*taught.rows, asking("colour", row("<image>What colour?", "rot", "red.png", name="wrong"))]
    rows.append(asking("colour", row("<image>What colour?", "red", "cut.png", name="broken")))
    folder = run_folder(tmp_path / "run", taught.recipe(taught.rows, rows, max_bad_rate=0.5), taught.model)
    out = tmp_path / "answers.jsonl"
    out.write_text("of an earlier evaluation")
    result = evaluated(folder, out=out)
    lines = lines_of(out)
    assert len(lines) == result.total.questions == 5
    assert sum(line["score"]["exact"] for line in lines) == result.total.exact == 4
    tokenizer = Tokenizer.from_file(str(taught.settings.data.tokenizer))
    by_answer = {line["expected"]: line for line in lines}
    for colour in COLOURS:
        line = by_answer[colour]
        assert (line["question"], line["answer"]) == ("<image>What colour?", colour)
        assert line["media"] == [str(taught.folder / f"{colour}.png")]
        assert line["tokens"] == len(tokenizer.encode(colour).ids)
    assert by_answer["3"]["media"] == []
    wrong = by_answer["rot"]
    assert (wrong["id"], wrong["answer"], wrong["score"]) == ("wrong", "red", {"exact": 0.0})


def test_answers_are_written_before_the_evaluation_ends(
    taught: Taught, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qa_eval, "MAX_GENERATION_MICROBATCH_TOKENS", 1)
    folder = run_folder(tmp_path / "run", taught.settings, taught.model)
    out = tmp_path / "answers.jsonl"
    generate = GreedyGenerator.generate
    counts = []

    def stopped_in_the_third_round(*arguments: Any) -> dict[int, list[int]]:
        counts.append(len(lines_of(out)) if out.stat().st_size else 0)
        if len(counts) == 3:
            raise KeyboardInterrupt
        return generate(*arguments)

    monkeypatch.setattr(GreedyGenerator, "generate", stopped_in_the_third_round)
    with pytest.raises(KeyboardInterrupt):
        evaluated(folder, out=out)
    assert counts[0] == 0
    assert 0 < counts[1] < counts[2] < 4
    assert len(lines_of(out)) == counts[2]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    file = AnswersFile(path)
    length = len(LINE.to_json()) + 1
    with full_disk(2 * length + length // 2), pytest.raises(RunError, match=r"answers\.jsonl"):
        file.write([LINE] * 3)
    file.close()
    assert path.read_text() == f"{LINE.to_json()}\n" * 2


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"{tmp_path}: Is a directory"):
        AnswersFile(tmp_path)
