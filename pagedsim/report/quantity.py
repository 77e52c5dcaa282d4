"""Large numbers for reading: three digits and a prefix."""

from __future__ import annotations

_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi")


def decimal(value: float, unit: str) -> str:
    """In thousands, as rates and FLOP are counted.

    >>> decimal(13.5e9, "FLOP"), decimal(999.6e9, "B"), decimal(7, "B")
    ('13.5 GFLOP', '1.00 TB', '7.00 B')
    """
    return _scaled(value, 1000.0, _DECIMAL, unit)


def binary(value: float) -> str:
    """Bytes in units of 1,024, as memory is counted.

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
