"""Communication of the processes of one server: messages, the control connection, counters in shared memory."""
