"""The tasks in each dialect: what a request looks like, how its answer is computed, and how it is written."""
