"""Every regular expression of the package takes linear time on every text, also where it fails."""

from __future__ import annotations

import re

import pytest

import torchrl_rloo
from support.attacks_patterns import patterns, slow_text
from support.cost import assert_linear
from torchrl_rloo.rewards.choices import MultipleChoice
from torchrl_rloo.runtime.http import Redactor


def found() -> dict[tuple, tuple[str, re.Pattern, set[str]]]:
    distinct: dict[tuple, tuple[str, re.Pattern, set[str]]] = {}
    for place, pattern, methods in patterns(torchrl_rloo, [MultipleChoice()]):
        place, pattern, known = distinct.get(key := (pattern.pattern, pattern.flags), (place, pattern, methods))
        distinct[key] = place, pattern, known | methods
    return distinct


def test_every_pattern_takes_linear_time() -> None:
    distinct = found()
    assert len(distinct) > 120
    slow = {place: text for place, pattern, methods in distinct.values() if (text := slow_text(pattern, methods))}
    assert slow == {}


@pytest.mark.parametrize(
    "source",
    [
        r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]',
        r"(\\*)('|$)",
        r"<a>.*?</a>",
        r"<<[^<>\n]*[^<>\s][^<>\n]*>>",
        r"(a+)+$",
        r"\s+$",
        r"(?s)/\*.*?\*/",
        r"(?i)answer\s*:?\s*(\w+)\s*;",
    ],
)
def test_a_pattern_that_does_not_is_found(source: str) -> None:
    assert slow_text(re.compile(source), {"search"}), source


@pytest.mark.parametrize(
    "source", [r'"(?:[^"\\]|\\.)*\\?(?:"|\Z)', r"(?<!\s)\s+$", r"\w+", r"<a>|</a>", r"(?<![\w.])[\w.]+@"]
)
def test_a_pattern_that_does_is_not(source: str) -> None:
    assert not slow_text(re.compile(source), {"search"})


@pytest.mark.parametrize("filler", ["\\", "s", "&#0", "%25", "s3", "czNj", "'+"])
def test_masks_of_known_secrets_take_linear_time(filler: str) -> None:
    redact = Redactor("https://me:s3cret-pw@h/?k=abcd1234", {"X": "s" * 60}, ["sk-" + "a1" * 10])
    assert_linear(lambda size: redact(filler * (size // len(filler))), 3_000)
