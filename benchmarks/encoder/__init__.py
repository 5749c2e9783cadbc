"""The encoder without HTTP: its speed next to other encoders, its numerical error, and two builds of it compared."""
