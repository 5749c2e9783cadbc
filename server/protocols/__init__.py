"""The tasks in each API's protocol: what a request looks like, how its answer is computed, and how it is written."""
