"""Leaves that are made when a batch is read, from rows that are stored once: the next observation, stacked frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from conduit.core.whole import check_whole
from conduit.errors import SettingError

Pad = Literal["zero", "repeat"]
PADS: tuple[Pad, ...] = ("zero", "repeat")


@dataclass(frozen=True, slots=True)
class Next:
    """`source` as it was after the row: the successor's, or the final's where the episode ended with one. Where it
    terminated without a final, the row's own, for nothing came after it. Rows that were cut have no next.

    `source`: the top-level name of a stored leaf or subtree, or of a derived `Stack`."""

    source: str

    def __post_init__(self) -> None:
        _check_name("Next", self.source)


@dataclass(frozen=True, slots=True)
class Stack:
    """`source` of the last `depth` rows of the episode up to this one, oldest first: (depth, *shape). Before the episode's
    first row, that row again (`pad="repeat"`) or zeros.

    `source`: the top-level name of a stored leaf or subtree."""

    source: str
    depth: int
    pad: Pad = "repeat"

    def __post_init__(self) -> None:
        _check_name("Stack", self.source)
        check_whole("depth", self.depth, of="Stack")
        if self.pad not in PADS:
            raise SettingError(f"Stack(pad={self.pad!r}): expected one of {', '.join(map(repr, PADS))}")


Derived = Next | Stack


def _check_name(kind: str, source: object) -> None:
    if not isinstance(source, str) or not source:
        raise SettingError(f"{kind}(source={source!r}): expected the name of a leaf, such as 'obs'")
