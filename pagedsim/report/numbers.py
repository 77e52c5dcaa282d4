"""Number formatting: "–" for NaN, percentages, and large numbers with a unit prefix."""

from __future__ import annotations


def number(value: float, unit: str = "") -> str:
    """Three significant digits with a unit, and all digits before the point.

    >>> number(1234.5, "s"), number(-0.5), number(float("nan"), "×")
    ('1,234 s', '−0.5', '–')
    """
    if value != value:
        return "–"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text.replace('-', '−', 1)} {unit}".rstrip()


def span(low: float | None, high: float | None, unit: str = "") -> str:
    """A range whose end may be open, or its only number; "–" for none.

    >>> span(2, 3, "s"), span(None, 3), span(2, None), span(3, 3)
    ('2 to 3 s', 'up to 3', 'at least 2', '3')
    """
    if high is None:
        return "–" if low is None else f"at least {number(low, unit)}"
    if low is None:
        return f"up to {number(high, unit)}"
    return number(high, unit) if low == high else f"{number(low)} to {number(high, unit)}"


def percent(share: float, digits: int = 1) -> str:
    """Format a share, such as "12.5 %"."""
    return "–" if share != share else f"{100 * share:.{digits}f} %"


def signed(share: float, digits: int = 1, unit: str = " %") -> str:
    """Format a relative difference with its sign."""
    return "–" if share != share else f"{100 * share:+.{digits}f}{unit}".replace("-", "−")


_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi")


def decimal(value: float, unit: str) -> str:
    """Format with decimal prefixes, three digits.

    >>> decimal(13.5e9, "FLOP"), decimal(999.6e9, "B"), decimal(7, "B")
    ('13.5 GFLOP', '1.00 TB', '7.00 B')
    """
    return _scaled(value, 1000.0, _DECIMAL, unit)


def binary(value: float) -> str:
    """Format bytes with binary prefixes, three digits.

    >>> binary(131072), binary(2 * 2**30)
    ('128 KiB', '2.00 GiB')
    """
    return _scaled(value, 1024.0, _BINARY, "B")


def _scaled(value: float, base: float, prefixes: tuple[str, ...], unit: str) -> str:
    prefix = 0
    while abs(value) >= base * 0.9995 and prefix < len(prefixes) - 1:
        value, prefix = value / base, prefix + 1
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {prefixes[prefix]}{unit}"
