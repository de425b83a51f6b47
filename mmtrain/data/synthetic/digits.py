"""Turn a folder of recorded digits into training data: LLaVA-format files with the question what is said.

The recordings are named DIGIT_SPEAKER_INDEX.wav (Free Spoken Digit Dataset). Every speaker is in both splits, every
recording in one. Besides samples of one recording there are samples of several, to be transcribed in order.
"""

import random
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmtrain.data.formats.sample import AUDIO_MARK
from mmtrain.data.synthetic.demo import train_tokenizer, write_json
from mmtrain.errors import DataError
from mmtrain.recipe.settings.modalities import AUDIO

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS_QUESTION = "What is said?"
HELDOUT_EVERY = 6  # of the recordings of a digit by a speaker, one in so many is held out
DIGITS_SUMMARY_FILE = "digits.json"
_FILE_NAME = re.compile(r"([0-9])_(\w+)_([0-9]+)\.wav")


@dataclass(frozen=True)
class DigitsSummary:
    """What `prepare_digits` wrote: counts, and the seed."""

    seed: int
    recordings: int
    speakers: int
    train: int
    heldout: int
    vocab: int


@dataclass(frozen=True, order=True)
class Recording:
    """A recording of one spoken digit."""

    digit: int
    speaker: str
    index: int
    path: Path

    @property
    def is_heldout(self) -> bool:
        """Whether it is held out from training."""
        return self.index % HELDOUT_EVERY == 0


def prepare_digits(source: Path, out: Path, seed: int, sequences: int) -> DigitsSummary:
    """Write `train.json`, `heldout.json`, `audio/` and `tokenizer.json` under `out`; same arguments, same bytes.

    Each split has one sample for each of its recordings. `train.json` also has `sequences` samples of two to four
    recordings by one speaker, and `heldout.json` a sixth as many. The output of an earlier call is replaced. Raises
    `DataError` for a folder with anything else in it, which stays untouched, and if `source` holds no recordings.
    """
    recordings = sorted(_find_recordings(source))
    splits = {
        "train": [r for r in recordings if not r.is_heldout],
        "heldout": [r for r in recordings if r.is_heldout],
    }
    if not all(splits.values()):
        raise DataError(
            f"{source}: found {len(splits['train'])} recordings to train on and {len(splits['heldout'])} to hold out; "
            f"expected files called DIGIT_SPEAKER_INDEX.wav, an INDEX that {HELDOUT_EVERY} divides is held out"
        )
    if out.exists() and any(out.iterdir()) and not (out / DIGITS_SUMMARY_FILE).exists():
        raise DataError(f"{out}: not empty and not spoken digits; name another folder or empty it")
    shutil.rmtree(out, ignore_errors=True)
    (out / "audio").mkdir(parents=True)
    for recording in recordings:
        shutil.copyfile(recording.path, out / "audio" / recording.path.name)
    rng = random.Random(seed)
    counts = {"train": sequences, "heldout": sequences // HELDOUT_EVERY}
    rows = {split: _rows(split, of_split, counts[split], rng) for split, of_split in splits.items()}
    for split, split_rows in rows.items():
        write_json(out / f"{split}.json", split_rows)
    tokenizer = train_tokenizer(
        turn["value"].replace(AUDIO_MARK, "") for r in rows["train"] for turn in r["conversations"]
    )
    tokenizer.add_special_tokens([AUDIO.placeholder])
    tokenizer.save(str(out / "tokenizer.json"))
    summary = DigitsSummary(
        seed=seed,
        recordings=len(recordings),
        speakers=len({r.speaker for r in recordings}),
        train=len(rows["train"]),
        heldout=len(rows["heldout"]),
        vocab=tokenizer.get_vocab_size(),
    )
    write_json(out / DIGITS_SUMMARY_FILE, asdict(summary))
    return summary


def _find_recordings(source: Path) -> Iterator[Recording]:
    for path in source.rglob("*.wav"):
        match = _FILE_NAME.fullmatch(path.name)
        if match:
            yield Recording(int(match[1]), match[2], int(match[3]), path)


def _rows(split: str, recordings: Sequence[Recording], sequences: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return one row for each recording, and then rows of several recordings by one speaker."""
    rows = [_row("digit", f"{split}-{r.path.stem}", [r]) for r in recordings]
    for i in range(sequences):
        speaker = rng.choice(recordings).speaker
        by_speaker = [r for r in recordings if r.speaker == speaker]
        sequence = rng.sample(by_speaker, min(rng.randint(2, 4), len(by_speaker)))
        rows.append(_row("sequence", f"{split}-sequence-{i:05d}", sequence))
    return rows


def _row(template: str, name: str, recordings: Sequence[Recording]) -> dict[str, Any]:
    return {
        "id": name,
        "template": template,
        "audio": [f"audio/{r.path.name}" for r in recordings],
        "conversations": [
            {"from": "human", "value": AUDIO_MARK * len(recordings) + DIGITS_QUESTION},
            {"from": "gpt", "value": " ".join(DIGIT_WORDS[r.digit] for r in recordings)},
        ],
    }
