"""The prefix that the texts of one request have in common, which a batch holds once (PackedBatch.prefixes).

Each batch computes its own prefix; nothing is kept. A text has the same bits whether its prefix is shared or not.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from embert.engine.batch import PackedBatch
from embert.engine.tasks import Sharing

Ints = npt.NDArray[np.int32]

# A shorter prefix, or one that saves a smaller part of the tokens, gains less than it costs.
LEAST_TOKENS, LEAST_SHARE = 16, 1 / 16
_FIRST_COLUMNS, _MOST_COLUMNS = 16, 1024  # compared in the first step, and in one step, of all texts


def common_prefix(ids: Ints, lengths: Ints, tasks: int, sharing: Sharing) -> int:
    """Number of first tokens that all texts have in common; 0: too few, or those of `tasks` are not shared.

    `ids` [T] are those of all texts, end to end. Each text keeps at least its last token, whose row is read. Takes time
    linear in the tokens that are in common, and for texts that differ at once, linear in their number.
    """
    if len(lengths) < 2 or tasks & ~sharing.tasks or lengths.min() < sharing.least_text:
        return 0
    longest = int(lengths.min()) - 1
    stops = np.cumsum(lengths, dtype=np.int64)
    starts = stops - lengths
    if sharing.padding_id is not None and (ids[stops - 1] == sharing.padding_id).any():
        return 0
    done, columns = 0, _FIRST_COLUMNS
    while done < longest:
        own = ids[starts[:, None] + np.arange(done, min(longest, done + columns))]
        same = (own == own[0]).all(0)
        done += int(same.argmin()) if not same.all() else len(same)
        if not same.all():
            break
        columns = min(2 * columns, _MOST_COLUMNS)
    done -= done % sharing.step
    savings = done * (len(lengths) - 1)
    least = max(LEAST_SHARE * len(ids), sharing.least_saved)
    return done if done >= LEAST_TOKENS and savings >= least else 0


def continue_first(batch: PackedBatch, tokens: int) -> PackedBatch:
    """Lets all texts continue the first one, whose first `tokens` tokens they share."""
    if not tokens:
        return batch
    prefixes = np.zeros((batch.sequences, 2), np.int32)
    prefixes[1:, 1] = tokens
    return batch.with_prefixes(prefixes)
