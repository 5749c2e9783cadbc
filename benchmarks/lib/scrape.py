"""Scrapes of a server's /metrics, and the growth from one scrape to the next."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass

_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one scrape: (name, labels) → value."""

    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that have this name and at least these labels."""
        wanted = set(labels.items())
        return sum(value for (each, of), value in self.values.items() if each == name and wanted <= of)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of this name's samples by the value of one label."""
        sums: dict[str, float] = {}
        for (each, labels), value in self.values.items():
            if each == name:
                key = dict(labels).get(label, "")
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def __sub__(self, earlier: Samples) -> Samples:
        """Return the growth since `earlier`; it means something for counters and histograms only."""
        return Samples({key: value - earlier.values.get(key, 0.0) for key, value in self.values.items()})

    def mean(self, histogram: str) -> float:
        """Return the mean of a histogram's observations; NaN if there are none."""
        count = self.total(f"{histogram}_count")
        return self.total(f"{histogram}_sum") / count if count else float("nan")

    def quantile(self, histogram: str, share: float) -> float:
        """Return a quantile of a histogram, by linear interpolation within a bucket; NaN if it is empty."""
        buckets = sorted((float(bound), count) for bound, count in self.by(f"{histogram}_bucket", "le").items())
        if not buckets or not buckets[-1][1]:
            return float("nan")
        wanted = share * buckets[-1][1]
        low, below = 0.0, 0.0
        for bound, count in buckets:
            if count >= wanted:
                return low if bound == float("inf") else low + (bound - low) * (wanted - below) / max(count - below, 1)
            low, below = bound, count
        return low


def scrape(url: str, headers: dict[str, str] | None = None) -> Samples:
    """Scrape `url`, a server's /metrics. Raises OSError where it cannot be reached."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=10) as response:
        text = response.read().decode()
    values = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            values[match[1], frozenset(_LABEL.findall(match[2] or ""))] = float(match[3])
    return Samples(values)
