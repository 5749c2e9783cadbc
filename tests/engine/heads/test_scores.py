"""Logits to scores, compared with torch, and at the ends of float32."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from embert.engine.heads.scores import LabelScore, Ranked, best_labels, ranked, scores
from tests.engine.conftest import Floats

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
LOGITS = arrays.arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(1, 6)), elements=finite)


@given(LOGITS)
def test_scores_equal_torch_and_keep_the_order(logits: Floats) -> None:
    given = torch.from_numpy(logits).double()
    expected = {"sigmoid": given.sigmoid(), "softmax": given.softmax(-1), "identity": given}
    for activation, wanted in expected.items():
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            got = scores(logits, activation)
        assert got.dtype == np.float32
        assert got.shape == logits.shape
        np.testing.assert_allclose(got, wanted.float().numpy(), rtol=1e-6)
        by_logit = np.argsort(logits, axis=1)
        assert (np.diff(np.take_along_axis(got, by_logit, 1)) >= 0).all()


def test_best_come_first_and_equals_in_their_order() -> None:
    logits = np.array([1, 40, 30, 40, -200], np.float32)
    assert [each.index for each in ranked(logits, "sigmoid")] == [1, 3, 2, 0, 4]  # also where scores are both 1
    assert ranked(logits, "identity", 2) == [Ranked(1, 40.0), Ranked(3, 40.0)]
    assert ranked(logits[:0], "sigmoid") == []
    assert best_labels(np.array([[1, 2, 2], [3, 0, -1]], np.float32), "identity", "abc") == [
        [LabelScore("b", 2.0), LabelScore("c", 2.0), LabelScore("a", 1.0)],
        [LabelScore("a", 3.0), LabelScore("b", 0.0), LabelScore("c", -1.0)],
    ]
