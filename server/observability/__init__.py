"""Metrics, logs, and the settings that keep garbage collection short."""
