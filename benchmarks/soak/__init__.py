"""The server under overload, faults and long runs, held against its service-level objectives."""
