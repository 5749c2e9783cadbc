"""The commands of `embert`, one file each."""
