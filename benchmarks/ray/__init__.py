"""Ray Data beside `embert embed`."""
