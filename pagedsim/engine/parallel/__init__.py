"""Tensor parallelism: one model over several processes, each with its share of heads and MLP."""
