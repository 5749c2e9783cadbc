"""The API process's side of the engines: what may enter the queue, which engine gets it, and the socket to each."""
