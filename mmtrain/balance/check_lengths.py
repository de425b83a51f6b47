"""Check lengths where they enter: a wrong one would cost minutes or all memory, or spoil the balance unnoticed."""

from typing import Any

import numpy as np
import numpy.typing as npt

MAX_LENGTH = 1 << 40  # tokens, patches or bytes of one sample; sums over eight million of them fit 64 bits


def check_lengths(name: str, lengths: npt.NDArray[Any]) -> None:
    """Raise ValueError, with the first bad row, unless all lengths are whole numbers from 0 to `MAX_LENGTH`.

    name: what they are, for the message.
    """
    if not lengths.size:
        return
    if lengths.dtype.kind in "iu":
        if int(lengths.min()) >= 0 and int(lengths.max()) <= MAX_LENGTH:
            return
        is_bad = (lengths < 0) | (lengths > MAX_LENGTH)
    elif lengths.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            is_bad = ~((lengths >= 0) & (lengths <= MAX_LENGTH) & (lengths == np.floor(lengths)))
    else:
        is_bad = np.ones(lengths.shape, dtype=bool)
    if not is_bad.any():
        raise ValueError(f"{name} are of type {lengths.dtype}; give them as int64")
    place = tuple(int(axis[0]) for axis in np.nonzero(is_bad))
    row = str(place[0]) if len(place) == 1 else str(place)
    raise ValueError(f"{name}: row {row} is {lengths[place]}; allowed: whole numbers from 0 to {MAX_LENGTH} (2^40)")
