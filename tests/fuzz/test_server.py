"""A short run against a real server: what `python -m tests.fuzz` does for longer and more strictly."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.fuzz.__main__ import main
from tests.server.models import build_classifier

# Of a model of scores and vectors, of one that labels freely, and of one that classifies tokens.
LABELS = (("relevance",), ("entailment", "neutral", "contradiction"), ("O", "B-PER", "I-PER"))


@pytest.mark.parametrize("seed", [0, secrets.randbelow(1 << 32)], ids=["fixed", "random"])
def test_nothing_is_found(tmp_path: Path, seed: int) -> None:
    labels = LABELS[seed % len(LABELS)]
    tokens = "O" in labels
    serve = f"{build_classifier(tmp_path, *labels, tokens=tokens)}{'' if tokens else ' --pooling mean'}"
    # Nothing here is about speed: a response is late when it would never come.
    limits = ("--slack", "55", "--memory", "200", "--findings", "5")
    assert main(["--requests", "300", "--seed", str(seed), "--serve-options", serve, *limits]) == 0
