import json
from pathlib import Path
from typing import Any

import pytest

from mmtrain.data import ChatTokenizer, build_index
from mmtrain.data.media.images import read_image_size
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.synthetic.demo import DEMO_VOCAB_SIZE, DemoSummary, generate_demo
from mmtrain.errors import DataError
from mmtrain.recipe import load_recipe


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoSummary]:
    out = tmp_path_factory.mktemp("demo") / "demo-data"
    return out, generate_demo(out, seed=3, train=400, heldout=150)


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def _question(row: dict[str, Any], out: Path) -> tuple[str, ...]:
    pictures = [(out / name).read_bytes().hex() for name in row.get("image", [])]
    return (row["conversations"][0]["value"], *pictures)


def test_the_same_seed_gives_the_same_bytes(demo: tuple[Path, DemoSummary], tmp_path: Path) -> None:
    out, summary = demo
    assert generate_demo(tmp_path / "again", seed=3, train=400, heldout=150) == summary
    files = sorted(p.relative_to(out) for p in out.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(tmp_path / "again") for p in (tmp_path / "again").rglob("*") if p.is_file())
    assert all((out / f).read_bytes() == (tmp_path / "again" / f).read_bytes() for f in files)
    generate_demo(tmp_path / "again", seed=4, train=400, heldout=150)
    assert (out / "train.json").read_bytes() != (tmp_path / "again" / "train.json").read_bytes()


def test_samples_have_the_documented_form(demo: tuple[Path, DemoSummary]) -> None:
    out, summary = demo
    rows = _rows(out / "train.json")
    assert len(rows) == summary.train == 400
    counts = {len(row.get("image", [])) for row in rows}
    assert counts == {0, 1, 2, 3, 4}
    assert {row["template"] for row in rows} == set(summary.templates)
    sizes = {read_image_size(FileMedia(str(out / name)), 10_000) for row in rows for name in row.get("image", [])}
    assert len(sizes) > 5, "resolutions vary"
    assert summary.images == len(list((out / "images").iterdir()))


def test_held_out_questions_do_not_occur_in_training(demo: tuple[Path, DemoSummary]) -> None:
    out, _ = demo
    train, heldout = _rows(out / "train.json"), _rows(out / "heldout.json")
    assert not {_question(r, out) for r in train} & {_question(r, out) for r in heldout}

    def operands(rows: list[dict[str, Any]]) -> set[frozenset[str]]:
        texts = [r["conversations"][0]["value"] for r in rows if "image" not in r]
        return {frozenset(w.strip("?,") for w in t.split() if w.strip("?,").isdigit()) for t in texts}

    assert operands(train)
    assert operands(heldout)
    assert not operands(train) & operands(heldout)


def test_no_template_has_one_dominant_answer(demo: tuple[Path, DemoSummary]) -> None:
    out, _ = demo
    rows = _rows(out / "train.json")
    for template in {row["template"] for row in rows}:
        answers = [row["conversations"][1]["value"] for row in rows if row["template"] == template]
        assert max(answers.count(a) for a in answers) / len(answers) < 0.72, template


def test_the_tokenizer_has_one_token_for_frequent_words_and_each_digit(demo: tuple[Path, DemoSummary]) -> None:
    out, summary = demo
    tokenizer = ChatTokenizer.load(out / "tokenizer.json")
    assert tokenizer.vocab_size == summary.vocab <= DEMO_VOCAB_SIZE
    assert len(tokenizer._encode_text(" the")) == 1
    assert len(tokenizer._encode_text("17")) == 2


def test_the_demo_recipe_reads_the_demo_data(demo: tuple[Path, DemoSummary]) -> None:
    out, _ = demo
    recipe_path = Path(__file__).parents[2] / "recipes" / "demo.yaml"
    overrides = [
        f"data.sources.0.path={out / 'train.json'}",
        f"data.validation.0.path={out / 'heldout.json'}",
        f"data.tokenizer={out / 'tokenizer.json'}",
    ]
    recipe = load_recipe(recipe_path, overrides).recipe
    for which, count in (("train", 400), ("validation", 150)):
        index = build_index(recipe, which)  # type: ignore[arg-type]
        assert (len(index.samples), index.quarantined) == (count, ())


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(DataError, match="not empty and not demo data"):
        generate_demo(tmp_path, seed=0, train=1, heldout=1)
    assert (tmp_path / "mine.txt").read_text() == "precious"
