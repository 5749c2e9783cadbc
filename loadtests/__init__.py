"""Load tests: locust scenarios with thresholds that set the exit code. `python -m loadtests`, or `make load`."""
