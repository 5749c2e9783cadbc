"""Ray Data next to `embert embed`."""
