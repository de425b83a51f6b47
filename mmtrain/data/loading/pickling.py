"""Pickle what another process of ours needs, and name the part that cannot be pickled."""

import pickle
from collections.abc import Iterator

from mmtrain.errors import RunError


def pickle_for_process(value: object, receiver: str) -> bytes:
    """Pickle a value that is sent to `receiver`. Raises `RunError` that names the part which cannot be pickled."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # which one depends on the type of the part
        path, part = find_unpicklable(value)
        raise RunError(
            f"{type(value).__name__}{path} cannot be sent to {receiver}: {type(part).__name__} {part!r:.200}: "
            f"{type(error).__name__}: {error}. This is an error of mmtrain; please report it"
        ) from error


def find_unpicklable(value: object) -> tuple[str, object]:
    """Return the innermost part of `value` that cannot be pickled, and the way from `value` to it.

    >>> find_unpicklable({"readers": [len, lambda: 0]})[0]
    "['readers'][1]"
    """
    path = ""
    part = value
    visited = [value]
    while True:
        for step, inner in _parts(part):
            if not any(inner is known for known in visited) and not _can_be_pickled(inner):
                path += step
                part = inner
                visited.append(inner)
                break
        else:
            return path, part


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return False
    return True


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield what pickling a value pickles next, each with how an expression would reach it."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", entry) for key, entry in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", entry) for number, entry in enumerate(value))
    else:
        try:
            reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except Exception:  # it is itself what cannot be pickled
            return
        if isinstance(reduced, str):  # pickled by its name
            return
        _, arguments, *rest = reduced
        yield from ((f"(argument {number})", argument) for number, argument in enumerate(arguments))
        state = rest[0] if rest else None
        # Of a class with slots the state is a tuple (attributes, slots), of some builtin classes any other tuple.
        for number, part in enumerate(state if isinstance(state, tuple) else (state,)):
            if isinstance(part, dict):
                yield from ((f".{name}", attribute) for name, attribute in part.items())
            else:
                yield f"(state {number})", part
