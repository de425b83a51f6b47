"""`mmtrain chat`."""

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import CheckpointChoice, chosen_checkpoint
from mmtrain.errors import DataError

if TYPE_CHECKING:
    from mmtrain.recipe.settings.modalities import MediaKind
    from mmtrain.runtime.evaluation.dialogue import Dialogue, QuestionPart

PROMPT = ">>> "
NEW, EXIT = "/new", "/exit"
INTERRUPTED_EXIT_CODE = 130  # as shells have it for Ctrl-C
_KIND_BY_SUFFIX: "Mapping[str, MediaKind]" = {
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".heif"), "image"),
    **dict.fromkeys((".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a"), "audio"),
    **dict.fromkeys((".mp4", ".mov", ".mkv", ".webm", ".avi"), "video"),
}
# A word, or several in quotes; punctuation behind a bare one is not part of a path.
_WORD = re.compile(r"""(?<!\S)(?:"([^"]+)"|'([^']+)'|(\S+?))(?=[?!,.;:)]*(?:\s|$))""")


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Folder of a run, folder of a model in Hugging Face's layout, or ORG/NAME of the hub."
        ),
    ],
    checkpoint: CheckpointChoice = "newest",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Most tokens of an answer. Default: as generation_config.json of the model says, or 512.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system text in front of the conversation.")
    ] = None,
) -> None:
    """Talk to a trained model.

    Each line is a question, and paths in it (`What is on cat.png?`, with quotes around spaces) are its pictures, clips
    and videos, in their places. The likeliest token follows, again and again, as in `mmtrain evaluate`, and answers are
    shown as they come. The line `/new` forgets the conversation; `/exit`, Ctrl-C or the end of the input leave.
    """
    from mmtrain.api.chat_model import open_dialogue

    dialogue = open_dialogue(model, chosen_checkpoint(checkpoint), max_new_tokens, system)
    try:
        for line in _lines():
            if line == NEW:
                dialogue.start_anew()
            elif line == EXIT:
                return
            elif line:
                _answer(dialogue, line)
    except KeyboardInterrupt:
        typer.echo()  # the shell's prompt starts a line of its own
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


def _lines() -> Iterator[str]:
    """Yield what the user types, or what a pipe holds, line by line; a terminal shows a prompt."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):  # with it, `input` has a history and edits lines
        importlib.import_module("readline")
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            typer.echo()
            return
        yield line.strip()


def _answer(dialogue: "Dialogue", line: str) -> None:
    """Print the answer to a line while it comes; say on stderr why one that cannot be used gets none."""
    shown = ""

    def show(text: str) -> None:
        nonlocal shown
        if text.startswith(shown):
            typer.echo(text[len(shown) :], nl=False)
        else:  # thoughts have ended, and the answer starts
            typer.echo(f"\n{text}", nl=False)
        shown = text

    try:
        show(dialogue.ask(question_parts(line), show))
    except DataError as error:
        typer.echo(f"mmtrain: this question is not answered: {error}", err=True)
        return
    typer.echo()


def question_parts(line: str) -> "list[QuestionPart]":
    """Split a line into texts, and the media whose paths stand in it. Raises DataError for a path that leads nowhere.

    Space is left out in front of the first text and behind the last one, where media may stand, as in lists of parts.
    """
    from mmtrain.runtime.evaluation.dialogue import Medium

    parts: list[QuestionPart] = []
    text_start = 0
    for word in _WORD.finditer(line):
        path = Path(next(filter(None, word.groups()))).expanduser()
        kind = _KIND_BY_SUFFIX.get(path.suffix.lower())
        if kind is None:
            continue
        if not path.is_file():
            raise DataError(
                f"{path}: there is no such file; a word that ends with `{path.suffix}` is the path of a medium"
            )
        parts += [line[text_start : word.start()], Medium(kind, path)]
        text_start = word.end()
    parts.append(line[text_start:])
    return _without_outer_space(parts)


def _without_outer_space(parts: "list[QuestionPart]") -> "list[QuestionPart]":
    """Leave out blank texts, and space in front of the first text and behind the last one."""
    kept = [part for part in parts if not isinstance(part, str) or part.strip()]
    texts = [i for i, part in enumerate(kept) if isinstance(part, str)]
    if texts:
        kept[texts[0]] = str(kept[texts[0]]).lstrip()
        kept[texts[-1]] = str(kept[texts[-1]]).rstrip()
    return kept
