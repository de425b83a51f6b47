"""Place the media of an entry in its turns, and tell their marks from texts that spell a mark.

A medium that is a part of a message stands where the part is. One of the entry's lists stands at a mark in a text
(`<image>`, as in LLaVA's data), or at a part without a path. Which of both is meant shows in the numbers: where the
parts alone place all media, and in an entry without any, a text that spells a mark is text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mmtrain.data.formats.sample import LITERAL_START, MEDIA_ROLES, Role, Turn
from mmtrain.data.media.media_bytes import Media
from mmtrain.recipe.settings.modalities import MediaKind

_NEVER_MARKED: frozenset[Role] = frozenset(("system",))
_ALL_ROLES: frozenset[Role] = frozenset((*MEDIA_ROLES, "system", "assistant"))


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A medium among the parts of a message."""

    kind: MediaKind
    medium: Media | None  # None: the next of the entry's list


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """A turn as its entry holds it."""

    role: Role
    pieces: tuple[str | MediaPart, ...]
    fields: str
    is_learned: bool


def place_media(
    turns: Sequence[ReadTurn], listed: Mapping[MediaKind, Sequence[Media]], has_marks: bool
) -> tuple[tuple[Turn, ...], dict[MediaKind, list[Media]]]:
    """Return the turns with a mark for each medium, and the media of each kind in the order of the marks.

    listed: the media beside the turns. has_marks: whether texts of this layout have marks; where they do not, and do
    not spell as many as there are media, what they spell is text.
    """
    media: dict[MediaKind, list[Media]] = {}
    literal_roles: dict[str, frozenset[Role]] = {}
    for kind, of_kind in listed.items():
        literal_roles[f"<{kind}>"] = _literal_roles(turns, kind, len(of_kind), has_marks)
        media[kind] = _in_order(turns, kind, of_kind, literal_roles[f"<{kind}>"])
    placed = [
        Turn(
            turn.role,
            "".join([_written(piece, turn.role, literal_roles) for piece in turn.pieces]),
            turn.fields,
            turn.is_learned,
        )
        for turn in turns
    ]
    return tuple(placed), media


def _literal_roles(turns: Sequence[ReadTurn], kind: MediaKind, num_listed: int, has_marks: bool) -> frozenset[Role]:
    """Return the roles in whose texts a mark of this kind is text."""
    num_shown = 0
    num_drawn = 0
    num_placed = 0  # parts that stand for one of the list
    for turn in turns:
        for piece in turn.pieces:
            if isinstance(piece, MediaPart):
                num_placed += piece.kind == kind and piece.medium is None
            elif turn.role in MEDIA_ROLES:
                num_shown += piece.count(f"<{kind}>")
            elif turn.role == "assistant":
                num_drawn += piece.count(f"<{kind}>")
    if kind == "image" and num_shown + num_drawn + num_placed == num_listed:
        return _NEVER_MARKED
    if num_shown + num_placed == num_listed:
        return _NEVER_MARKED | {"assistant"}
    if num_placed == num_listed or not has_marks:
        return _ALL_ROLES
    return _NEVER_MARKED if kind == "image" else _NEVER_MARKED | {"assistant"}  # miscounted: the quarantine says so


def _in_order(
    turns: Sequence[ReadTurn], kind: MediaKind, listed: Sequence[Media], literal_roles: frozenset[Role]
) -> list[Media]:
    """Return the media of a kind in the order of their marks; those of the list that have no mark come last."""
    remaining = iter(listed)
    ordered: list[Media] = []
    for turn in turns:
        for piece in turn.pieces:
            if isinstance(piece, MediaPart):
                if piece.kind == kind:
                    ordered += _take(remaining, 1) if piece.medium is None else [piece.medium]
            elif turn.role not in literal_roles:
                ordered += _take(remaining, piece.count(f"<{kind}>"))
    return [*ordered, *remaining]


def _take(media: Iterator[Media], count: int) -> list[Media]:
    return [medium for _, medium in zip(range(count), media, strict=False)]


def _written(piece: str | MediaPart, role: Role, literal_roles: Mapping[str, frozenset[Role]]) -> str:
    """Return a piece as text, in which marks that are text are escaped."""
    if isinstance(piece, MediaPart):
        return f"<{piece.kind}>"
    if "<" not in piece:
        return piece
    for mark, roles in literal_roles.items():
        if role in roles:
            piece = piece.replace(mark, LITERAL_START + mark[1:])
    return piece
