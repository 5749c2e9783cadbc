"""What is embedded: files of several formats, as blocks of rows, and the texts in a block."""
