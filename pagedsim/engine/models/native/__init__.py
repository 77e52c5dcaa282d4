"""Our own forward pass for some families: `decoder.py` is the pass, the others are its layers."""

from pagedsim.engine.models.native.decoder import Native

__all__ = ["Native"]
