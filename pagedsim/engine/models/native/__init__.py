"""Our own forward pass, over the weights of transformers' model.

`decoder.py` is the pass, `reach.py` says which models it takes. A layer (`layer.py`) is an
attention part and a feed-forward part; both read the residual stream (`stream.py`), add to it, and
multiply by their weights through `linear.py`.
"""

from pagedsim.engine.models.native.decoder import Native

__all__ = ["Native"]
