"""The models of one API process: what each can do and how it reads texts, and which of them a request is for."""
