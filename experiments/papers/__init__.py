"""Reproductions of published figures, one file each."""
