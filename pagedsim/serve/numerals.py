"""Search in the text " 1 2 3 4 …", a prefix of which is every output of `backend=sim`.

The first occurrence of a stop string is computed from its digits; the cost depends on the number
of digits, not on the output length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ALLOWED = re.compile(r" ?[0-9]+(?: [0-9]+)* ?| ", re.ASCII)


def position(tokens: int) -> int:
    """Number of characters of the first `tokens` numbers.

    >>> [position(tokens) for tokens in (0, 9, 10, 100)]
    [0, 18, 21, 292]
    """
    total, digits, first = 0, 1, 1
    while first <= tokens:
        last = min(tokens, 10 * first - 1)
        total += (last - first + 1) * (digits + 1)
        first, digits = 10 * first, digits + 1
    return total


class Numerals:
    """The text of the sequence, kept as far as it was read: any part of it is a copy.

    >>> Numerals().text(9, 11)
    ' 9 10'
    """

    def __init__(self) -> None:
        self._text, self._numbers = bytearray(), 0

    def __len__(self) -> int:
        """Numbers whose text is kept."""
        return self._numbers

    def reach(self, number: int) -> None:
        """Keep the text as far as `number`."""
        while self._numbers < number:
            self._numbers += 1
            self._text += b" %d" % self._numbers

    def text(self, begin: int, end: int) -> str:
        """The text of the numbers from `begin` to before `end`."""
        self.reach(end - 1)
        return self._text[position(begin - 1) : position(end - 1)].decode()


def first_end(text: str, least: int, most: int) -> tuple[int, int] | None:
    """First occurrence of `text` that ends in one of the numbers from `least` to `most`.

    Returns the number that it ends in and the character behind it; None if there is none.

    >>> first_end("1 1", 1, 1000)  # in " 1 2 … 10 11 12": "1 1" is first in "11 12"
    (12, 26)
    >>> first_end("99", 150, 1000)
    (199, 688)
    """
    if _ALLOWED.fullmatch(text) is None:
        return None
    parts = text.split(" ")
    if max(map(len, parts)) > len(str(most)):
        return None
    if len(parts) == 1:
        found = min(_containing(text, least, len(str(most))), default=most + 1)
    elif len(parts) == 2:
        suffix, prefix = parts
        found = min(_between(suffix, prefix, least, len(str(most))), default=most + 1)
    else:
        found = _consecutive(parts)
    if not least <= found <= most:
        return None
    if len(parts) == 1:
        return found, position(found - 1) + 1 + str(found).index(text) + len(text)
    return found, position(found - 1) + 1 + len(parts[-1])


def _containing(digits: str, least: int, longest: int) -> Iterator[int]:
    """Of the numbers with `digits` in them, for each place the smallest that is at least `least`.

    `longest` is the number of digits that are of interest.
    """
    value, size = int(digits), 10 ** len(digits)
    for behind in range(longest - len(digits) + 1):
        scale = 10**behind
        high = least // (scale * size)
        for head in (high, high + 1):
            lowest = (head * size + value) * scale
            if (head or digits[0] != "0") and lowest + scale > least:
                yield max(lowest, least)
                break


def _between(suffix: str, prefix: str, least: int, longest: int) -> Iterator[int]:
    """Numbers from `least` on that begin with `prefix` and follow one that ends in `suffix`.

    For each number of digits behind the prefix the smallest.
    """
    if prefix[:1] == "0":
        return
    modulus = 10 ** len(suffix)
    # A suffix that begins with 0 is not the whole of a number.
    least = max(least, modulus + 1 if suffix[:1] == "0" else 1)
    wanted = int(suffix or 0) + 1
    for behind in range(longest - len(prefix) + 1):
        scale = 10**behind
        begin, end = (
            (int(prefix) * scale, (int(prefix) + 1) * scale) if prefix else (0, 10**longest)
        )
        begin = max(begin, least)
        found = begin + (wanted - begin) % modulus
        if found == 1 and suffix:  # the text begins with a space, not with a number 0
            found += modulus
        if found < end:
            yield found


def _consecutive(parts: list[str]) -> int:
    """The last of consecutive numbers, all but the first and last of which stand in full; or 0."""
    middle = parts[1:-1]
    begin = int(middle[0])
    for place, part in enumerate(middle):
        if part != str(begin + place):
            return 0
    last = begin + len(middle)
    before = str(begin - 1) if begin > 1 else ""
    return last if before.endswith(parts[0]) and str(last).startswith(parts[-1]) else 0
