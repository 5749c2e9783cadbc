"""A request's input: its headers and body, read within bounds, checked, and tokenized."""
