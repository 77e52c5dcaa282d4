"""Models: transformers' decoders, made to attend through the paged kernels, and our own forward
pass for some of them."""

from pagedsim.engine.models.load import load_model
from pagedsim.engine.models.loaded import LoadedModel

__all__ = ["LoadedModel", "load_model"]
