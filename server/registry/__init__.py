"""Models of an HTTP process: the choice of one for a request, its limits and prompts, and the tokens of texts."""
