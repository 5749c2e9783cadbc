"""How the processes of one server talk: framing, messages, the control connection, counters in shared memory."""
