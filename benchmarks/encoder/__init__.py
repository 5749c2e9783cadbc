"""The encoder without HTTP: its speed beside other encoders, its numerical error, and two builds of it compared."""
