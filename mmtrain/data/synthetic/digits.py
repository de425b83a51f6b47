"""Spoken digits as training data: from a folder of recordings to LLaVA-format files that ask what is said.

The recordings are named DIGIT_SPEAKER_INDEX.wav (Free Spoken Digit Dataset). Every speaker is heard in both splits,
no recording in more than one. Besides each recording alone there are samples of several, to be written down in order.
"""

import json
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmtrain.data.formats.sample import AUDIO_MARK
from mmtrain.data.synthetic.demo import train_tokenizer
from mmtrain.data.text.chat_tokenizer import AUDIO_TOKEN
from mmtrain.errors import DataError

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS_QUESTION = "What is said?"
HELDOUT_EVERY = 6  # recordings of a digit by a speaker
DIGITS_SUMMARY_FILE = "digits.json"
_NAME = re.compile(r"([0-9])_(\w+)_([0-9]+)\.wav")


@dataclass(frozen=True)
class DigitsSummary:
    """What `prepare_digits` wrote."""

    seed: int
    recordings: int
    speakers: int
    train: int
    heldout: int
    vocab: int


@dataclass(frozen=True, order=True)
class Recording:
    """One spoken digit."""

    digit: int
    speaker: str
    index: int
    path: Path

    @property
    def is_heldout(self) -> bool:
        """Whether training never hears it."""
        return self.index % HELDOUT_EVERY == 0


def prepare_digits(source: Path, out: Path, seed: int, sequences: int) -> DigitsSummary:
    """Write `train.json`, `heldout.json`, `audio/` and `tokenizer.json` under `out`; same arguments, same bytes.

    Each split asks about each of its recordings alone, and `train.json` about `sequences` draws of two to four as well;
    `heldout.json` about a sixth as many. Replaces what an earlier call wrote; raises `DataError` rather than touch a
    folder with anything else in it, and where `source` holds no recordings.
    """
    recordings = sorted(_recordings(source))
    splits = {"train": [r for r in recordings if not r.is_heldout], "heldout": [r for r in recordings if r.is_heldout]}
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
    rows = {name: _rows(name, heard, counts[name], rng) for name, heard in splits.items()}
    for name, found in rows.items():
        (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    tokenizer = train_tokenizer(
        turn["value"].replace(AUDIO_MARK, "") for r in rows["train"] for turn in r["conversations"]
    )
    tokenizer.add_special_tokens([AUDIO_TOKEN])
    tokenizer.save(str(out / "tokenizer.json"))
    summary = DigitsSummary(
        seed=seed,
        recordings=len(recordings),
        speakers=len({r.speaker for r in recordings}),
        train=len(rows["train"]),
        heldout=len(rows["heldout"]),
        vocab=tokenizer.get_vocab_size(),
    )
    (out / DIGITS_SUMMARY_FILE).write_text(json.dumps(asdict(summary), indent=1) + "\n", encoding="utf-8")
    return summary


def _recordings(source: Path) -> Iterator[Recording]:
    for path in source.rglob("*.wav"):
        if name := _NAME.fullmatch(path.name):
            yield Recording(int(name[1]), name[2], int(name[3]), path)


def _rows(split: str, heard: Sequence[Recording], sequences: int, rng: random.Random) -> list[dict[str, Any]]:
    """Ask about each recording alone, then about draws of several, by one speaker each."""
    rows = [_row("digit", f"{split}-{r.path.stem}", [r]) for r in heard]
    for i in range(sequences):
        speaker = rng.choice(heard).speaker
        own = [r for r in heard if r.speaker == speaker]
        drawn = rng.sample(own, min(rng.randint(2, 4), len(own)))
        rows.append(_row("sequence", f"{split}-sequence-{i:05d}", drawn))
    return rows


def _row(template: str, name: str, said: Sequence[Recording]) -> dict[str, Any]:
    return {
        "id": name,
        "template": template,
        "audio": [f"audio/{r.path.name}" for r in said],
        "conversations": [
            {"from": "human", "value": AUDIO_MARK * len(said) + DIGITS_QUESTION},
            {"from": "gpt", "value": " ".join(DIGIT_WORDS[r.digit] for r in said)},
        ],
    }
