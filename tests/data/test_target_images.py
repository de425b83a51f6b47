"""Images in answers: read as targets of the generator, counted, encoded as queries, and decoded to patches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmtrain.balance import assign
from mmtrain.data import BatchBuilder, ChatTokenizer, PayloadNeed, build_index
from mmtrain.data.formats.conversation import build_sample
from mmtrain.data.formats.sample import Turn, find_unusable, written_text
from mmtrain.data.index.data_check import check_sources, check_sources_for_recipe
from mmtrain.data.index.sample_table import content_json, sample_from_record, sample_record
from mmtrain.data.index.stats import compute_stats_for_recipe
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.synthetic.tiny_tokenizer import train_byte_level_bpe
from mmtrain.data.text.chat_tokenizer import DRAW_TOKENS, SPECIAL_TOKENS
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX
from mmtrain.errors import DataError, RecipeError
from mmtrain.recipe import require_runnable
from mmtrain.recipe.settings.schema import Recipe
from tests.data.archives import png, tar
from tests.data.rows import Row, row

MakeRecipe = Callable[..., Recipe]
NUM_QUERIES = 3
GENERATOR = {
    "kind": "dit", "widths": (8,), "heads": (2,), "layers": 1, "channels": 3, "patch": 4, "context_width": 8,
    "context_tokens": NUM_QUERIES, "image_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def drawing_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tokenizer with the tokens around images in answers."""
    path = tmp_path_factory.mktemp("drawing") / "tokenizer.json"
    texts = iter(["draw a red square, then a blue one. Here it is: done"])
    train_byte_level_bpe(texts, (*SPECIAL_TOKENS, *DRAW_TOKENS), 300).save(str(path))
    return path


@pytest.fixture
def drawing(tmp_path: Path, recipe: MakeRecipe, drawing_tokenizer: Path) -> MakeRecipe:
    """Write images; make a recipe that reads rows with a generator."""
    for name, colour, size in (("red.png", "red", (8, 8)), ("blue.png", "blue", (16, 8)), ("see.png", "white", (8, 8))):
        (tmp_path / name).write_bytes(png(colour, *size))

    def make(rows: list[Row], generator: dict[str, Any] | None = GENERATOR, **data: Any) -> Recipe:
        plain = recipe(rows, **{"tokenizer": drawing_tokenizer, "seq_len": 256} | data).model_dump()
        plain["model"]["generator"] = generator
        return Recipe.model_validate(plain)

    return make


def sample(*turns: tuple[str, str], images: tuple[str, ...] = ()) -> Any:
    entry = {"messages": [{"role": role, "content": text} for role, text in turns], "images": list(images)}
    return build_sample(entry, "f.json", 0, lambda _, path: FileMedia(path))


def test_marks_in_answers_divide_the_images() -> None:
    made = sample(
        ("user", "<image>draw it in red"), ("assistant", "<image> and <image>"), ("user", "<image>?"),
        images=("a", "b", "c", "d"),
    )  # fmt: skip
    assert [str(m) for m in made.images] == ["a", "d"]
    assert [str(m) for m in made.target_images] == ["b", "c"]
    text_alone = sample(("user", "<image>what is the mark?"), ("assistant", "<image>"), images=("a",))
    assert [str(m) for m in text_alone.images] == ["a"]
    assert text_alone.target_images == ()


def test_marks_in_answers_are_counted_where_images_are_too_many() -> None:
    made = sample(("user", "<image>in red"), ("assistant", "<image>"), images=("a", "b", "c"))
    unusable = find_unusable(made, ("image",))
    assert unusable is not None
    assert unusable.reason == (
        "3 images, but 1 <image> marks in its user turns, and 1 in its answers: images are drawn where every mark of "
        "all turns has one"
    )


def test_a_record_keeps_them(tmp_path: Path) -> None:
    made = sample(("user", "draw"), ("assistant", "<image>"), images=("a",))
    assert sample_from_record(sample_record(made, content_json(made))) == made


def test_queries_stand_between_marks_and_are_no_labels(drawing_tokenizer: Path) -> None:
    tokenizer = ChatTokenizer.load(drawing_tokenizer)
    made = sample(("user", "draw"), ("assistant", "red <image> blue<image>"), images=("a", "b"))
    features = {"generator": [2, 1]}
    encoded = tokenizer.encode(made, features)
    names = {tokenizer._tokenizer.token_to_id(token): token for token in (*SPECIAL_TOKENS, *DRAW_TOKENS)}
    show = lambda ids: "".join(names.get(int(i)) or tokenizer.decode([i]) for i in ids)  # noqa: E731
    first, second = "<|gen|><|query|><|query|><|/gen|>", "<|gen|><|query|><|/gen|>"
    assert show(encoded.ids) == f"<|user|>draw<|end|><|assistant|>red {first} blue{second}<|end|>"
    is_label = encoded.labels != IGNORE_INDEX
    assert show(encoded.labels[is_label]) == "red <|gen|> blue<|gen|><|end|>"
    positions = np.flatnonzero(is_label)
    assert (encoded.labels[positions] == encoded.ids[positions + 1]).all()
    assert tokenizer.length_counter(1000)(made, features) == (len(encoded.ids), int(is_label.sum()))


def test_the_index_counts_patches_and_queries(drawing: MakeRecipe) -> None:
    rows = [
        row("<image>draw it", "Here: <image> <image>", "see.png", "red.png", "blue.png"),
        row("draw", "no"),
        row("draw", "<image>", "red.png"),
    ]
    made = drawing(rows)
    index = build_index(made)
    items = index.lengths.items["generator"]
    assert items.first.tolist() == [0, 2, 2, 3]
    assert set(items.tokens.tolist()) == {4}
    assert set(items.features.tolist()) == {NUM_QUERIES}
    tokenizer = ChatTokenizer.load(made.data.tokenizer_path)
    for number, entry in enumerate(index.samples):
        encoded = tokenizer.encode(entry, index.media_features(number))
        assert len(encoded.ids) == index.lengths.tokens[number]
        assert int((encoded.labels != IGNORE_INDEX).sum()) == index.lengths.targets[number]
    stats, _ = compute_stats_for_recipe(made, made.data.sources)
    assert stats.values[:, stats.names.index("generator tokens")].tolist() == [8, 0, 4]


def test_a_step_holds_patches_and_the_positions_of_queries(drawing: MakeRecipe) -> None:
    rows = [row("<image>draw", "<image>", "see.png", "blue.png"), row("x", "y"), row("draw", "it: <image>", "red.png")]
    made = drawing(rows)
    index = build_index(made)
    dp = {"vision": 1, "llm": 1, "generator": 1}
    meta = assign(0, 0, [np.array([2, 1, 0])], index.lengths, dp, dp)
    needs = (
        PayloadNeed("llm", 0, labels=True),
        PayloadNeed("vision", 0, media=True),
        PayloadNeed("generator", 0, media=True),
    )
    step = BatchBuilder(index, made, needs, dp).build(meta)
    text, targets = step.text[0, 0], step.encoders["generator"][0, 0]
    assert text.query_positions is not None
    assert targets.cells is not None
    assert len(text.query_positions) == 2 * NUM_QUERIES
    assert targets.rows == targets.cols == (2, 2)
    assert targets.cells.shape == (8, 3 * 4 * 4)
    red, blue = targets.cells[:4].reshape(4, 3, 16), targets.cells[4:].reshape(4, 3, 16)
    assert (red == np.array([255, 0, 0])[:, None]).all()
    assert (blue == np.array([0, 0, 255])[:, None]).all()


def test_images_keep_about_their_aspect_ratio_in_buckets(drawing: MakeRecipe, tmp_path: Path) -> None:
    for name, sides in (("wide.png", (8, 16)), ("high.png", (16, 8)), ("square.png", (24, 24))):
        pixels = np.full((*sides, 3), 255, dtype=np.uint8)
        pixels[: sides[0] // 2, : sides[1] // 2] = (255, 0, 0)  # the upper left quarter is red
        Image.fromarray(pixels).save(tmp_path / name)
    rows = [row("draw", "<image> <image>", "wide.png", "square.png"), row("draw", "<image>", "high.png")]
    made = drawing(rows, GENERATOR | {"image_size": 12, "bucket_step": 4})
    index = build_index(made)
    items = index.lengths.items["generator"]
    assert [*zip(items.rows.tolist(), items.cols.tolist(), strict=True)] == [(2, 4), (3, 3), (4, 2)]
    assert items.tokens.tolist() == [8, 9, 8]
    dp = {"vision": 1, "llm": 1, "generator": 1}
    meta = assign(0, 0, [np.array([0, 1])], index.lengths, dp, dp)
    payload = BatchBuilder(index, made, (PayloadNeed("generator", 0, media=True),), dp).build(meta)
    drawn = payload.encoders["generator"][0, 0]
    assert (drawn.rows, drawn.cols) == ((2, 3, 4), (4, 3, 2))
    assert drawn.cells is not None
    for (num_rows, num_cols), cells in zip(((2, 4), (4, 2)), (drawn.cells[:8], drawn.cells[17:]), strict=True):
        red = (cells.reshape(num_rows, num_cols, 3, 16) == np.array([255, 0, 0])[:, None]).all(axis=(2, 3))
        assert red[: num_rows // 2, : num_cols // 2].all()
        assert red.sum() == num_rows * num_cols // 4
    squares = build_index(drawing(rows, GENERATOR | {"image_size": 12})).lengths.items["generator"]
    assert set(squares.tokens.tolist()) == {9}


def test_pairs_of_image_and_caption_teach_both_ways(drawing: MakeRecipe, tmp_path: Path) -> None:
    members = {
        "1.jpg": png("red", 8, 8),
        "1.txt": b"a red square\n",
        "2.png": png("blue", 8, 8),
        "2.txt": b"a blue one",
    }
    shard = tar(tmp_path / "pairs.tar", members)
    made = drawing([], sources=[{"path": shard}, {"path": shard, "captions": "draw", "weight": 2}])
    index = build_index(made)
    assert index.quarantined == ()
    turns = [[(turn.role, turn.text) for turn in entry.turns] for entry in index.samples]
    assert turns == [
        [("user", "<image>"), ("assistant", "a red square")],
        [("user", "<image>"), ("assistant", "a blue one")],
        [("user", "a red square"), ("assistant", "<image>")],
        [("user", "a blue one"), ("assistant", "<image>")],
    ]
    assert [(len(entry.images), len(entry.target_images)) for entry in index.samples] == [
        (1, 0),
        (1, 0),
        (0, 1),
        (0, 1),
    ]
    assert index.lengths.items["vision"].first.tolist() == [0, 1, 2, 2, 2]
    assert index.lengths.items["generator"].first.tolist() == [0, 0, 0, 1, 2]


def test_a_source_of_captions_to_draw_quarantines_what_is_no_pair(drawing: MakeRecipe, tmp_path: Path) -> None:
    rows = [
        row("<image>What is shown?", "a red square", "red.png"),
        row("hello", "a caption without an image"),
        row("<image>in blue", "<image>", "red.png", "blue.png"),
        row("<image>", " ", "red.png"),
        row("<image>", "has an <image> mark", "red.png"),
        {
            "conversations": [
                {"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "red"},
                {"from": "human", "value": "sure?"}, {"from": "gpt", "value": "yes"},
            ],
            "image": "red.png",
        },
    ]  # fmt: skip
    made = drawing(rows, sources=[{"path": tmp_path / "train.json", "captions": "draw"}])
    index = build_index(made)
    kept, spelling = index.samples
    assert written_text(spelling.turns[0].text) == "has an <image> mark", "a mark without an image is text"
    assert [(turn.role, turn.text) for turn in kept.turns] == [("user", "a red square"), ("assistant", "<image>")]
    assert [q.kind for q in index.quarantined] == ["no_caption"] * 4
    assert "one answer in words" in index.quarantined[0].reason


def test_bad_targets_are_named(drawing: MakeRecipe, tmp_path: Path) -> None:
    whole = png("red", 64, 64)
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no image")
    names = ["red.png", "cut.png", "text.png", "none.png"]
    made = drawing([row("draw", "<image>", name) for name in names])
    index = build_index(made)
    assert [q.kind for q in index.quarantined] == ["truncated", "not_an_image", "missing_image"]
    without = drawing([row("draw", "<image>", "red.png"), row("x", "y")], generator=None)
    assert [q.kind for q in build_index(without).quarantined] == ["no_generator"]


def test_data_check_decodes_them(drawing: MakeRecipe, tmp_path: Path) -> None:
    broken = bytearray(png("red", 8, 8))
    broken[45:48] = b"\xff\xff\xff"  # pixels; header and end stay
    (tmp_path / "broken.png").write_bytes(bytes(broken))
    made = drawing([row("draw", "<image>", "red.png"), row("draw", "<image>", "broken.png")])
    report = check_sources_for_recipe(made, made.data.sources)
    assert (report.media, report.kinds) == ({"target image": 1}, {"undecodable": 1})
    assert check_sources(made.data.sources).media == {"image": 1}


def test_settings_that_cannot_draw_samples_are_named(drawing: MakeRecipe, tokenizer_path: Path) -> None:
    with pytest.raises(ValueError, match="image_size is 10, but the patch divides it by 4"):
        drawing([], GENERATOR | {"image_size": 10})
    with pytest.raises(DataError, match=r"no place for images that the model draws.*<\|query\|>"):
        build_index(drawing([row("a", "b")], tokenizer=tokenizer_path))
    require_runnable(drawing([row("a", "b")]), "train")
    unet = {"kind": "unet", "widths": (32, 32), "heads": (2, 2), "patch": 1, "norm_groups": 8}
    require_runnable(drawing([row("a", "b")], GENERATOR | unet), "train")
    with pytest.raises(ValueError, match="image_size is 9, but the U-Net divides it by 2: take a multiple"):
        drawing([], GENERATOR | unet | {"image_size": 9})


def test_a_recipe_needs_the_size_and_the_colours(tmp_path: Path, drawing: MakeRecipe) -> None:
    from mmtrain.recipe import load_recipe

    plain = json.loads(drawing([row("a", "b")]).model_dump_json())
    plain["model"]["generator"] |= {"image_size": None, "channels": 4}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(plain))
    with pytest.raises(RecipeError, match=r"(?s)generator\.image_size: missing.*generator\.channels: found 4"):
        load_recipe(path)


def test_captions_without_a_target_are_counted_where_the_generator_alone_trains(
    drawing: MakeRecipe, tmp_path: Path
) -> None:
    """Samples teach nothing that reach what is frozen alone; a projector of an encoder counts as trained."""
    rows = [row("draw", "<image>", "red.png"), row("say red", "red"), row("<image>what?", "red", "red.png")]
    made = drawing(rows)
    frozen = made.model_dump()
    for unit in ("vision", "llm"):
        frozen["model"][unit]["freeze"] = True
    [warning] = build_index(Recipe.model_validate(frozen)).warnings
    assert warning.startswith("1 of 3 samples teach nothing: their answers hold no image to draw, and all else")
    assert "number 1," in warning
    frozen["model"]["vision"]["projector"]["freeze"] = True
    [warning] = build_index(Recipe.model_validate(frozen)).warnings
    assert warning.startswith("2 of 3 samples")
    assert build_index(made).warnings == ()
    frozen["data"] = drawing(rows[1:]).model_dump()["data"]
    with pytest.raises(DataError, match=r"2 of 2 samples teach nothing: .*; add images to draw to the answers"):
        build_index(Recipe.model_validate(frozen))


def test_a_document_is_one_answer_that_draws_its_images(drawing: MakeRecipe, tmp_path: Path) -> None:
    """Read texts and images that take turns, and name documents whose two lists do not fit together."""
    document = {"texts": ["A red one:", None, "and a blue one:", None, "done"]}
    document["images"] = [None, "red.png", None, "blue.png", None]
    both, shorter = dict(document, texts=["A", "b", "c", None, "d"]), dict(document, images=["red.png"])
    index = build_index(drawing([document]))
    [found] = index.samples
    assert found.turns == (Turn("assistant", "A red one:\n<image>\nand a blue one:\n<image>\ndone"),)
    assert [Path(media.path).name for media in found.target_images] == ["red.png", "blue.png"]
    assert index.lengths.items["generator"].first.tolist() == [0, 2]
    assert index.lengths.targets[0] > len("done") // 2
    [refused] = build_index(drawing([document, row("x", "y")], generator=None)).quarantined
    assert (refused.kind, "documents: show of its source" in refused.reason) == ("no_generator", True)
    report = check_sources_for_recipe(made := drawing([document, both, shorter]), made.data.sources)
    assert [(bad.kind, bad.reason) for bad in report.bad] == [
        ("malformed", "place 2 of 5 of the document holds both a text and an image"),
        ("malformed", "`texts` is a list of 5, and `images` is a list of 1"),
    ]


@pytest.mark.parametrize("generator", [GENERATOR, None], ids=["with a generator", "without"])
def test_images_of_a_document_may_be_shown_instead(
    drawing: MakeRecipe, tmp_path: Path, generator: dict[str, Any] | None
) -> None:
    first = {"texts": ["A red one:", None, None, "both\nare red", None, "blue"]}
    first["images"] = [None, "red.png", "red.png", None, "blue.png", None]
    second = {"texts": [None, "blue", None], "images": ["blue.png", None, "see.png"]}  # nothing follows its last image
    alone = {"texts": [None], "images": ["red.png"]}
    rows = [first, second, alone, row("<image>which?", "blue", "blue.png")]
    made = drawing(rows, generator, sources=[{"path": tmp_path / "train.json", "documents": "show"}])
    index = build_index(made)
    turns = [[(turn.role, turn.text) for turn in entry.turns] for entry in index.samples]
    assert turns == [
        [
            ("user", ""), ("assistant", "A red one:"), ("user", "<image><image>"), ("assistant", "both\nare red"),
            ("user", "<image>"), ("assistant", "blue"),
        ],
        [("user", "<image>"), ("assistant", "blue")],
        [("user", "<image>which?"), ("assistant", "blue")],
    ]  # fmt: skip
    shown = [[Path(str(medium)).name for medium in entry.images] for entry in index.samples]
    assert shown == [["red.png", "red.png", "blue.png"], ["blue.png"], ["blue.png"]]
    assert all(not entry.target_images for entry in index.samples)
    assert index.lengths.items["vision"].first.tolist() == [0, 3, 4, 5]
    assert [bad.kind for bad in index.quarantined] == ["no_answer"]
    tokenizer = ChatTokenizer.load(made.data.tokenizer_path)
    encoded = tokenizer.encode(index.samples[0], index.media_features(0))
    targets = tokenizer.decode(encoded.labels[encoded.labels != IGNORE_INDEX].tolist())
    assert targets == "A red one:both\nare redblue"


def test_images_of_a_document_of_mmc4_stand_in_front_of_their_sentences(drawing: MakeRecipe, tmp_path: Path) -> None:
    def match(name: object, place: object) -> dict[str, object]:
        return {"image_name": name, "matched_text_index": place, "matched_sim": 0.3}

    document = {"text_list": ["One.", "Two.", "Three.", "Four."], "url": "x"}
    document["image_info"] = [match("blue.png", 2), match("red.png", 0), match("see.png", 2)]
    faults = [[match("red.png", 4)], [match("red.png", True)], [match(None, 0)], ["red.png"], {}]
    rows = [document, *(document | {"image_info": fault} for fault in faults), document | {"text_list": ["a", None]}]
    lines = tmp_path / "mmc4.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    made = drawing([], sources=[{"path": lines}, {"path": lines, "documents": "show"}])
    index = build_index(made)
    drawn, shown = index.samples
    assert [(turn.role, turn.text) for turn in drawn.turns] == [
        ("assistant", "<image>\nOne. Two.\n<image>\n<image>\nThree. Four.")
    ]
    assert [Path(str(medium)).name for medium in drawn.target_images] == ["red.png", "blue.png", "see.png"]
    assert [(turn.role, turn.text) for turn in shown.turns] == [
        ("user", "<image>"), ("assistant", "One. Two."), ("user", "<image><image>"), ("assistant", "Three. Four."),
    ]  # fmt: skip
    assert shown.images == drawn.target_images
    bad = check_sources_for_recipe(made, made.data.sources[:1]).bad
    assert [entry.kind for entry in bad] == ["malformed"] * 6
    assert "image 1 of 1 has image_name 'red.png' and matched_text_index 4, expected" in bad[0].reason
    assert "from 0" in bad[0].reason
