"""What classes need where the package is compiled; where it is not, nothing happens here."""

from __future__ import annotations

from _abc import _abc_init  # type: ignore[import-not-found]
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**said):
        """Leave the class as it is."""
        return lambda kind: kind


def apart(root: type) -> None:
    """Let an abstract class and those derived from it each know what is an instance of it.

    Those that are compiled share that knowledge with all others, so that `isinstance` errs from
    the second time on; and nothing says of them that `root` is abstract.
    """
    if "_abc_impl" in vars(root):  # made by Python
        return
    _own(root)
    root.__abstractmethods__ = frozenset({"what it leaves open"})  # type: ignore[attr-defined]


def _own(kind: type) -> None:
    _abc_init(kind)
    derived: type
    for derived in kind.__subclasses__():
        if "_abc_impl" not in vars(derived):
            _own(derived)
