"""Load tests: locust scenarios with thresholds that set the exit status. `python -m loadtests`, or `make load`."""
