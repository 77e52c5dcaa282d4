"""What papers have published, made again: one figure a file."""
