"""Token ids that a client sends: checked and packed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from embert.engine.errors import InputError
from embert.engine.tokenization.encoded import Direction, Encoded
from embert.engine.tokenization.input_errors import bad_id, too_long
from embert.engine.tokenization.turns import Turns

__all__ = ["TURN_IDS", "check_ids", "pack_ids"]

TURN_IDS = 16_384  # ids of a turn


def pack_ids(
    sequences: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    limit: int,
    truncate: bool,
    direction: Direction,
    param: str,
) -> Turns[Encoded]:
    """Pack ids unchanged, in turns. Sequences of over `limit` ids are cut, or refused while `truncate` is false.

    Raises InputError for an empty sequence, one that is too long, or an id that the model does not have.
    """
    ids, lengths, truncated = array("i"), array("i"), 0
    turn = TURN_IDS
    for index, given in enumerate(sequences):
        sequence = given
        if not len(sequence):
            raise InputError(f"`{param}`: sequence {index} has no token ids", param=param)
        if len(sequence) > limit:
            if not truncate:
                raise too_long(index, len(sequence), limit, param)
            truncated += 1
            sequence = sequence[:limit] if direction == "right" else sequence[-limit:]
        check_ids(index, sequence, vocab_size, param)
        ids.extend(sequence)
        lengths.append(len(sequence))
        if len(ids) >= turn:
            turn = len(ids) + TURN_IDS
            yield len(ids)
    return Encoded(np.array(ids, np.int32), np.array(lengths, np.int32), truncated)


def check_ids(index: int, sequence: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InputError for an id that the model does not have, or that is no int: an array takes True for 1."""
    if sequence and (not {int} >= {*map(type, sequence)} or min(sequence) < 0 or max(sequence) >= vocab_size):
        wrong = next(i for i in sequence if type(i) is not int or not 0 <= i < vocab_size)
        raise bad_id(index, wrong, vocab_size, param)
