"""Whole numbers among settings."""

from __future__ import annotations

from numbers import Integral

from conduit.errors import SettingError

MOST = (1 << 63) - 1
"""Of bytes and of rows: what NumPy and file systems count to. Times of so many are finite."""


def check_whole(name: str, got: object, least: int = 1, most: int | None = None, *, of: str = "") -> None:
    """SettingError unless `got` is a whole number of at least `least`, and at most `most`. `of`: whose setting `name` is."""
    if (
        isinstance(got, Integral)
        and not isinstance(got, bool)
        and int(got) >= least
        and (most is None or int(got) <= most)
    ):
        return
    given = f"{of}({name}={got!r})" if of else f"{name}={got!r}"
    also = "" if most is None else f", and at most {most}"
    raise SettingError(f"{given}: expected a whole number of at least {least}{also}")
