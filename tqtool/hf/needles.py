"""Facts hidden in a text at several depths, and the questions that ask for them at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PLACES = ("Lisbon", "Cairo", "Oslo", "Lima", "Seoul", "Prague", "Nairobi", "Quito", "Perth", "Dublin")
MOST_NEEDLES = len(PLACES)
CODES = (48152, 90734, 27561, 63918, 15840, 79423, 31697, 86205, 52379, 40618)  # no digit pattern to guess


@dataclass(frozen=True, slots=True)
class Haystack:
    """Token ids with needles in them, the questions last, and where the answers stand."""

    ids: list[int]
    depths: tuple[float, ...]
    answers: tuple[range, ...]  # positions of each answer's tokens


def haystack(tokenizer: Any, filler: list[int], count: int) -> Haystack:
    """Hide `count` facts (up to `MOST_NEEDLES`) in the filler, evenly, and ask for each at the end."""

    def tokens(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    depths = tuple((i + 0.5) / count for i in range(count))
    ids: list[int] = []
    start = 0
    for depth, place, code in zip(depths, PLACES, CODES, strict=False):
        stop = round(depth * len(filler))
        ids += filler[start:stop] + tokens(f"\nThe secret number of {place} is {code}.\n")
        start = stop
    ids += filler[start:]
    answers = []
    for place, code in zip(PLACES[:count], CODES, strict=False):
        asked = tokens(f"\nThe secret number of {place} is")
        told = tokens(f"\nThe secret number of {place} is {code}")
        same = next((i for i, (a, b) in enumerate(zip(asked, told, strict=False)) if a != b), len(asked))
        answers.append(range(len(ids) + same, len(ids) + len(told)))
        ids += told
    return Haystack(ids, depths, tuple(answers))
