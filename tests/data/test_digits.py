import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from mmtrain.data import ChatTokenizer
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import Sample, find_unusable
from mmtrain.data.synthetic.digits import DIGIT_WORDS, prepare_digits
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    folder = tmp_path / "recordings" / "deeper"
    folder.mkdir(parents=True)
    for digit in range(10):
        for speaker in ("anna", "otto"):
            for index in range(8):
                wave = np.sin(np.arange(800) * (digit + 1) / 10)
                soundfile.write(folder / f"{digit}_{speaker}_{index}.wav", wave, 8000)
    soundfile.write(folder / "noise.wav", np.zeros(800), 8000)
    return folder.parent


def _files(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def test_every_recording_is_in_one_split(recordings: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = prepare_digits(recordings, out, seed=1, sequences=30)
    splits = {
        name: list(read_samples(SourceSettings(path=out / f"{name}.json"), LimitSettings()))
        for name in ("train", "heldout")
    }
    clips_by_split: dict[str, set[str]] = {}
    for name, samples in splits.items():
        for sample in samples:
            assert isinstance(sample, Sample)
            assert find_unusable(sample, ("audio",)) is None
            assert all(Path(str(clip)).is_file() for clip in sample.clips)
            assert sample.answer.split() == [DIGIT_WORDS[int(clip.name[0])] for clip in sample.clips]
            assert len({clip.name.split("_")[1] for clip in sample.clips}) == 1  # one speaker
        clips_by_split[name] = {clip.name for s in samples if isinstance(s, Sample) for clip in s.clips}
        alone = [s for s in samples if isinstance(s, Sample) and s.template == "digit"]
        assert len(alone) == len(clips_by_split[name])
    assert not clips_by_split["train"] & clips_by_split["heldout"]
    assert {name[-5] for name in clips_by_split["heldout"]} == {"0", "6"}
    assert (summary.recordings, summary.speakers) == (160, 2)
    assert (summary.train, summary.heldout) == (120 + 30, 40 + 5)
    assert ChatTokenizer.load(out / "tokenizer.json").item_ids.keys() == {"vision", "audio"}


def test_the_same_arguments_give_the_same_bytes(recordings: Path, tmp_path: Path) -> None:
    prepare_digits(recordings, tmp_path / "a", seed=1, sequences=9)
    before = _files(tmp_path / "a")
    prepare_digits(recordings, tmp_path / "a", seed=1, sequences=9)
    prepare_digits(recordings, tmp_path / "b", seed=2, sequences=9)
    assert _files(tmp_path / "a") == before
    assert _files(tmp_path / "b")["train.json"] != before["train.json"]


def test_folders_with_other_files_are_not_touched(recordings: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"found 0 recordings .* called DIGIT_SPEAKER_INDEX\.wav"):
        prepare_digits(tmp_path / "nothing", tmp_path / "out", seed=0, sequences=0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="not empty and not spoken digits"):
        prepare_digits(recordings, tmp_path / "mine", seed=0, sequences=0)
    assert json.dumps((tmp_path / "mine" / "thesis.txt").read_text()) == '"years of work"'
