"""Shared by several benchmarks: texts, load over HTTP, servers under measurement, and the record of a run."""
