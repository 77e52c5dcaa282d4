"""What mypyc is told of a class, where the package is compiled; otherwise nothing happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**said):
        """Leave the class as it is."""
        return lambda kind: kind
