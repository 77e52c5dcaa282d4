"""Our own forward pass for some families: `decoder.py` is the pass and its layers, `linear.py`
the products."""

from pagedsim.engine.models.native.decoder import Native

__all__ = ["Native"]
