"""Metrics, logs, and the garbage collector's pauses."""
