"""Write the messages that entries of layouts without a list of turns stand for."""

from collections.abc import Mapping
from typing import Any

from mmtrain.data.formats.bad_sample import BadSampleError, json_type_name
from mmtrain.data.formats.layout_table import MATCHES_KEY, PAIRS_KEY, ROLES, SENTENCES_KEY, EntryLayout

_PAIR_KEYS = (("user", "assistant"), ("human", "assistant"), ("human", "gpt"), ("human", "bot"))
_ROLE_KEYS = ("role", "from")
_MATCH_KEYS = ("image_name", "matched_text_index")


def asked_messages(entry: Mapping[str, Any], layout: EntryLayout) -> list[dict[str, Any]]:
    """Return the messages of a question and its answer, and of the pairs in `history` before them."""
    question_key, answer_key = layout.keys
    asked = [_text_of(entry, question_key)]
    if "input" in layout.more and entry.get("input") is not None:
        asked.append(_text_of(entry, "input"))
    history = entry.get("history")
    if history is None:
        history = []
    if not isinstance(history, list):
        raise BadSampleError(
            "malformed", f"`history` is {json_type_name(history)}, expected a list of [question, answer]"
        )
    messages: list[dict[str, Any]] = []
    for number, pair in enumerate(history, 1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            reason = f"`history`: entry {number} of {len(history)} is no [question, answer] of two texts"
            raise BadSampleError("malformed", reason)
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = "\n".join([text for text in asked if text])
    answer = _text_of(entry, answer_key)
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _text_of(entry: Mapping[str, Any], key: str) -> str:
    value = entry[key]
    if not isinstance(value, str):
        raise BadSampleError("malformed", f"`{key}` is {json_type_name(value)}, expected a text")
    return value


def prompted_messages(entry: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a prompt and its completion. Answers in the prompt are context, as TRL has it."""
    messages: list[Any] = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        value = entry[key]
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        elif isinstance(value, dict):  # a single turn
            value = [value]
        if not isinstance(value, list) or not value:
            what = "an empty list" if value == [] else json_type_name(value)
            raise BadSampleError("malformed", f"`{key}` is {what}, expected a text or a list of turns")
        messages += [_as_context(turn) for turn in value] if key == "prompt" else value
    return messages


def _as_context(turn: Any) -> Any:
    """Return a turn of which nothing is learned, if it is an assistant's."""
    speaker = next((turn[key] for key in _ROLE_KEYS if key in turn), None) if isinstance(turn, dict) else None
    is_answer = isinstance(speaker, str) and ROLES.get(speaker.strip().lower()) == "assistant"
    return {"train": False, **turn} if is_answer else turn


def pair_keys(pair: Any) -> tuple[str, str] | None:
    """Return under which keys an element of a list holds a question and its answer; None for a turn."""
    if not isinstance(pair, dict) or any(key in pair for key in _ROLE_KEYS):
        return None
    return next((keys for keys in _PAIR_KEYS if all(key in pair for key in keys)), None)


def is_document(entry: dict[str, Any]) -> bool:
    """Return whether the texts of an entry are those of a document, not questions and answers."""
    texts = entry.get(PAIRS_KEY)
    return isinstance(texts, list) and bool(texts) and all(text is None or isinstance(text, str) for text in texts)


def document_to_conversation(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a document, whose lists of texts and images have one piece at each place, as one answer with images."""
    texts, images = entry[PAIRS_KEY], entry.get("images")
    if not isinstance(images, list) or len(images) != len(texts):
        what = f"a list of {len(images)}" if isinstance(images, list) else json_type_name(images)
        raise BadSampleError("malformed", f"`{PAIRS_KEY}` is a list of {len(texts)}, and `images` is {what}")
    parts: list[dict[str, str]] = []
    for place, (text, image) in enumerate(zip(texts, images, strict=True), 1):
        if (text is None) == (image is None):
            found = "neither a text nor an image" if text is None else "both a text and an image"
            raise BadSampleError("malformed", f"place {place} of {len(texts)} of the document holds {found}")
        parts += [{"type": "text", "text": "\n"}] if parts else []
        parts.append({"type": "image"} if text is None else {"type": "text", "text": text})
    answer = {"role": "assistant", "content": parts}
    return {**entry, "messages": [answer], "images": [image for image in images if image is not None]}


def matches_to_document(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a document of MMC4, whose images name the sentences that they belong to, as one of two lists."""
    sentences, matches = entry[SENTENCES_KEY], entry[MATCHES_KEY]
    if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
        raise BadSampleError("malformed", f"`{SENTENCES_KEY}` is {json_type_name(sentences)}, expected a list of texts")
    if not isinstance(matches, list):
        raise BadSampleError("malformed", f"`{MATCHES_KEY}` is {json_type_name(matches)}, expected a list of objects")
    images_before: list[list[str]] = [[] for _ in sentences]
    for number, match in enumerate(matches, 1):
        name, place = (match.get(key) if isinstance(match, dict) else None for key in _MATCH_KEYS)
        if not isinstance(name, str) or type(place) is not int or not 0 <= place < len(sentences):
            reason = (
                f"`{MATCHES_KEY}`: image {number} of {len(matches)} has {_MATCH_KEYS[0]} {name!r} and "
                f"{_MATCH_KEYS[1]} {place!r}, expected a text and the place of one of {len(sentences)} texts, from 0"
            )
            raise BadSampleError("malformed", reason)
        images_before[place].append(name)
    texts: list[str | None] = []
    images: list[str | None] = []
    for sentence, names in zip(sentences, images_before, strict=True):
        texts += [None] * len(names)
        images += names
        if texts and texts[-1] is not None:
            texts[-1] += f" {sentence}"
            continue
        texts.append(sentence)
        images.append(None)
    rest = {key: value for key, value in entry.items() if key not in (SENTENCES_KEY, MATCHES_KEY)}
    return rest | {PAIRS_KEY: texts, "images": images}


def pairs_to_messages(pairs: Any, key: str) -> list[dict[str, Any]]:
    """Return the messages of a list of questions and answers, which an entry holds under `key`."""
    if not isinstance(pairs, list) or not pairs:
        what = "an empty list" if pairs == [] else json_type_name(pairs)
        raise BadSampleError("malformed", f"`{key}` is {what}, expected a list of objects")
    messages: list[dict[str, Any]] = []
    for number, pair in enumerate(pairs, 1):
        question_key, answer_key = pair_keys(pair) or _PAIR_KEYS[0]
        for name in (question_key, answer_key):
            if not isinstance(pair, dict) or not isinstance(pair.get(name), str):
                raise BadSampleError("malformed", f"`{key}`: pair {number} of {len(pairs)} has no text `{name}`")
        taken = (question_key, answer_key, "role", "content")
        rest = {name: value for name, value in pair.items() if name not in taken}
        messages += [{"role": "user", "content": pair[question_key]}]
        messages += [{**rest, "role": "assistant", "content": pair[answer_key]}]
    return messages
