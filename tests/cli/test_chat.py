"""What a line of a conversation means, and what of an answer reaches the terminal."""

from pathlib import Path

import pytest

from mmtrain.cli.chat import question_parts
from mmtrain.errors import DataError
from mmtrain.runtime.evaluation.dialogue import Medium


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("cat.png", "my dog.JPG", "song.wav", "film.mp4"):
        Path(name).touch()


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("What is 1 + 2?", ["What is 1 + 2?"]),
        ("cat.png What colour?", [Medium("image", Path("cat.png")), "What colour?"]),
        ("What is on cat.png?", ["What is on ", Medium("image", Path("cat.png")), "?"]),
        ("Describe: 'my dog.JPG'", ["Describe:", Medium("image", Path("my dog.JPG"))]),
        (
            'Is "my dog.JPG" in film.mp4, or heard in song.wav?',
            [
                "Is ", Medium("image", Path("my dog.JPG")), " in ", Medium("video", Path("film.mp4")), ", or heard in ",
                Medium("audio", Path("song.wav")), "?",
            ],
        ),
        ("cat.png", [Medium("image", Path("cat.png"))]),
        ("It's 3.5, isn't it? <image>", ["It's 3.5, isn't it? <image>"]),
    ],
)  # fmt: skip
def test_paths_in_a_line_are_media_in_their_places(line: str, parts: list[str | Medium]) -> None:
    assert question_parts(line) == parts


def test_a_path_starts_at_home_and_one_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    assert question_parts("~/cat.png") == [Medium("image", tmp_path / "cat.png")]
    with pytest.raises(DataError, match=r"cow\.png: there is no such file; a word that ends with `\.png` is the path"):
        question_parts("What is on cow.png?")
