"""Trace files: one reader a format; `read_table` reads any of them."""

from pagedsim.workload.traces.read import FORMATS, Slice, Table, read_lengths, read_table
from pagedsim.workload.traces.rows import Options, Tokenizer

__all__ = ["FORMATS", "Options", "Slice", "Table", "Tokenizer", "read_lengths", "read_table"]
