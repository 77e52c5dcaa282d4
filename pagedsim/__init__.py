"""pagedsim: one scheduler for LLM serving, driven by a simulator and by a GPU engine.

Importing this package imports nothing else; take what you need from its subpackages.
"""

__version__ = "0.1.0"
