"""The models of an HTTP process: which one a request is for, its limits and prompts, and the tokens of texts."""
