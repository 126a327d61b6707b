"""Which words of a sentence assert a speed or a saving of memory, and the figure that they assert.

A figure is how many times as fast: "30 % less time" is 1.43, and what has no figure ("outperforms") is at least 1.
Of a rate (TFLOP/s, GB/s) it is the rate; of what is slower, or takes more or less memory, the figure as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["speedup", "slowdown", "memory", "TFLOP/s", "TB/s", "rate"]


@dataclass(frozen=True)
class Assertion:
    """What is asserted, and where in the sentence."""

    kind: Kind
    figure: float
    words: str
    start: int


_NUMBER_WORDS = {
    "two": 2.0,
    "three": 3.0,
    "four": 4.0,
    "five": 5.0,
    "six": 6.0,
    "seven": 7.0,
    "eight": 8.0,
    "nine": 9.0,
    "ten": 10.0,
    "eleven": 11.0,
    "twelve": 12.0,
    "hundred": 100.0,
    "thousand": 1000.0,
}
_FRACTIONS = {
    "half": 0.5,
    "a third": 1 / 3,
    "one third": 1 / 3,
    "two thirds": 2 / 3,
    "a quarter": 0.25,
    "three quarters": 0.75,
    "a fifth": 0.2,
    "a tenth": 0.1,
    "one tenth": 0.1,
}
_MULTIPLES = {"twice": 2.0, "thrice": 3.0, "double": 2.0, "doubles": 2.0, "triple": 3.0, "triples": 3.0}


_BLANKS = r"\s+"


def _words(text: str) -> str:
    """Return a pattern for any of these words; a blank stands for any blanks."""
    return f"(?:{'|'.join(word.replace(' ', _BLANKS) for word in text.split(', '))})"


# A number, and its unit.
_N = rf"(?<![\w.,])(?P<n>\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|\d+(?:\.\d+)?|{'|'.join(_NUMBER_WORDS)})"
_TIMES = r"(?:\s*[x×](?![\w×])|[\s-]*times\b|[\s-]*fold\b)"
_PERCENT = r"\s*(?:%|percent\b|per\s+cent\b)"
# What may stand between the number and what it is about, and before it.
_SMALL = _words("a, an, the, of, as, in, more, much, its, their, our, wall, kernel, graph, device, overall, total")
_BETWEEN = rf"[\s-]+(?:{_SMALL}\s+)*"
# "half of its own time" is a share, "half the time" a comparison.
_OF_ANOTHERS = rf"[\s-]+(?:{_words('the, of, as, much, wall, kernel, graph, device, overall, total')}\s+)*"
_ABOUT = (
    r"(?:(?:[~≈]|"
    + _words("up to, about, around, roughly, at least, at most, over, more than, nearly, almost, by, of, is, was, a")
    + r")\s*)*"
)
# What it is about.
_FAST = (
    _words("fast, faster, quick, quicker, speed, speedups?, speed-ups?, throughput, performance, performant")
    + r"\b|better\b(?!\s+(?:accuracy|quality|error|precision))"
)
_MORE_FAST = _words("higher, better, greater, increased, improved") + r"\s+(?:throughput|performance|speed|bandwidth)\b"
_SPEEDUP = rf"(?:{_MORE_FAST}|{_FAST})"
_TIME = r"(?:time|latency|run-?time|duration)\b"
_LESS_TIME = _words("less, lower, shorter, reduced, smaller") + rf"\s+(?:(?:wall|kernel|graph|run)\s+)?{_TIME}"
_SLOW = r"(?:slow|slower|longer)\b"
_MEMORY = r"(?:memory|vram)\b"
_LESS_MEMORY = (
    rf"(?:(?:less|lower|smaller|reduced|fewer)\s+(?:(?:peak|gpu|device|activation)\s+)*{_MEMORY}"
    r"|(?:peak\s+)?memory\s+(?:saving|savings|saved|reduction)\b)"
)
# Verbs and nouns that a number follows.
_SPEEDS_UP = (
    r"\b(?:speed-?ups?|speed(?:s|ed)?\s+(?:\w+\s+)?up|faster|quicker|accelerat\w+|outperform\w*\s+[^.;,]{1,60}?)"
    rf"\s*[:=]?\s*{_ABOUT}"
)
_BEATS = rf"\b(?:beats?|beaten|beating)\s+[^.;]{{1,60}}?\bby\s+{_ABOUT}"
_CUTS = r"\b(?:reduc|cut|sav|lower|shrink|decreas)\w*\s+(?:[\w-]+\s+){0,3}?"
_FALLS = r"\s+(?:is\s+|was\s+|has\s+)?(?:drop|f[ae]ll|shr[aiu]nk|decreas|reduc|cut)\w*\s+"
_LESS = r"(?:less|lower|shorter|smaller)\b"
_HALVES = r"\bhalv(?:es?|ed|ing)\s+(?:(?:the|its|their|our|wall|kernel|graph|run|device|overall|total)\s+)*"
_STILL = _words("much, far, significantly, consistently, considerably, still, also, even, always, slightly, a lot")


def _compile(*parts: str) -> re.Pattern[str]:
    return re.compile("".join(parts), re.IGNORECASE)


def _one_of(words: Iterable[str]) -> str:
    return rf"\b(?P<n>{'|'.join(words)})"


# Each with what its figure means: "times", "more" (30 % more is 1.3), "less" (30 % less is 1 / 0.7), "part", "plain".
_PATTERNS: tuple[tuple[re.Pattern[str], Kind, str], ...] = (
    (_compile(_N, _TIMES, _BETWEEN, _SPEEDUP), "speedup", "times"),
    (_compile(_N, _TIMES, _BETWEEN, _LESS_TIME), "speedup", "times"),
    (_compile(_N, _TIMES, _BETWEEN, rf"(?:{_LESS_MEMORY}|{_MEMORY})"), "memory", "plain"),
    (_compile(_N, _TIMES, _BETWEEN, rf"(?:{_SLOW}|{_TIME})"), "slowdown", "plain"),
    (_compile(_N, _PERCENT, _BETWEEN, _SPEEDUP), "speedup", "more"),
    (_compile(_N, _PERCENT, _BETWEEN, _LESS_TIME), "speedup", "less"),
    (_compile(_N, _PERCENT, _BETWEEN, _LESS_MEMORY), "memory", "plain"),
    (_compile(_N, _PERCENT, _BETWEEN, _SLOW), "slowdown", "plain"),
    (_compile(_one_of(_MULTIPLES), _BETWEEN, _SPEEDUP), "speedup", "times"),
    (_compile(_one_of(_MULTIPLES), _BETWEEN, _MEMORY), "memory", "plain"),
    (_compile(_one_of(_MULTIPLES), _BETWEEN, rf"(?:{_SLOW}|{_TIME})"), "slowdown", "plain"),
    (_compile(_one_of(_FRACTIONS), _OF_ANOTHERS, _TIME), "speedup", "part"),
    (_compile(_one_of(_FRACTIONS), _BETWEEN, _MEMORY), "memory", "plain"),
    (_compile(_one_of(_FRACTIONS), r"\s+(?:as|the)\s+", _SPEEDUP), "slowdown", "plain"),
    (_compile(_SPEEDS_UP, _N, _TIMES), "speedup", "times"),
    (
        _compile(r"\bspeed-?ups?\s*[:=]?\s*", _ABOUT, _N, r"(?![\d.,]*\d)(?!", _PERCENT, "|", _TIMES, ")"),
        "speedup",
        "times",
    ),
    (_compile(_BEATS, _N, _TIMES), "speedup", "times"),
    (_compile(_BEATS, _N, _PERCENT), "speedup", "more"),
    (_compile(r"\b(?:beats?|beaten|beating)\s+\w*[A-Z]\w*[A-Z]\w*"), "speedup", "one"),
    (_compile(_SPEEDS_UP, _N, _PERCENT), "speedup", "more"),
    (_compile(_CUTS, _TIME, r"\s+", _ABOUT, _N, _PERCENT), "speedup", "less"),
    (_compile(r"\b", _TIME, _FALLS, _ABOUT, _N, _PERCENT), "speedup", "less"),
    (_compile(r"\b", _TIME, r"\s+(?:is|was)\s+", _ABOUT, _N, _PERCENT, r"\s+", _LESS), "speedup", "less"),
    (_compile(_HALVES, _TIME), "speedup", "two"),
    (_compile(_HALVES, r"(?:peak\s+)?", _MEMORY), "memory", "two"),
    (_compile(_CUTS, _TIME, r"\s+in\s+half\b"), "speedup", "two"),
    (_compile(_CUTS, _TIME, r"\s+", _ABOUT, _N, _TIMES), "speedup", "times"),
    (_compile(_CUTS, _MEMORY, r"\s+(?:[\w-]+\s+){0,2}?", _ABOUT, _N, rf"(?:{_PERCENT}|{_TIMES})"), "memory", "plain"),
    (
        _compile(r"\bsav\w*\s+", _ABOUT, _N, rf"(?:{_PERCENT}|\s*[GM]i?B)", _BETWEEN, _MEMORY),
        "memory",
        "plain",
    ),
    (_compile(_N, r"\s*T(?:era)?FLOPS?(?:/s|\s+per\s+second)?\b"), "TFLOP/s", "plain"),
    (_compile(_N, r"\s*PFLOPS?(?:/s)?\b"), "TFLOP/s", "thousands"),
    (_compile(_N, r"\s*GFLOPS?(?:/s)?\b"), "TFLOP/s", "thousandths"),
    (_compile(_N, r"\s*TB/s\b"), "TB/s", "plain"),
    (_compile(_N, r"\s*GB/s\b"), "TB/s", "thousandths"),
    (_compile(_N, r"\s*[kKM]?\s*(?:tokens|samples|iterations|tok)(?:/s\b|\s+(?:per|a)\s+second\b)"), "rate", "plain"),
    (_compile(r"\borders?\s+of\s+magnitude\s+(?:faster|quicker|better)"), "speedup", "ten"),
    (_compile(r"\boutperform(?:s|ed|ing)?\b"), "speedup", "one"),
    (
        _compile(r"\b(?:is|are|was|were|runs?|ran)\s+", rf"(?:{_STILL}\s+)*(?:faster)\s+than\b"),
        "speedup",
        "one",
    ),
    (_compile(r"\b(?:is|are)\s+(?:by\s+far\s+)?the\s+fastest\b"), "speedup", "one"),
)

# A bare "1.7x" is a speedup where its sentence, or the header of its table, is about speed.
_BARE = _compile(_N, r"\s*[x×](?![\w×])(?!\s*\d)")
_ABOUT_SPEED = _compile(
    r"\b(?:(?:fast|slow)(?:er|est)?|speeds?|speed-?ups?|throughput|latency|performance|outperform\w*|wall\s+time)\b"
)
_OTHER_MULTIPLE = _compile(
    r"\s+(?:(?:its|the|as|that|of|their|this|more|larger|smaller)\s+)*",
    _words("sizes?, errors?, many, much, larger?, smaller?, wider?, long, bytes, bits, rows, keys, heads, length")
    + r"\b",
)
# Or where it is said of what: "0.12x of SDPA". Names of implementations have two capitals.
_OF_A_RIVAL = re.compile(r"\s+(?:of|over|against|versus|vs\.?|compared\s+(?:to|with))\s+\w*[A-Z]\w*[A-Z]\w*")
# Or where it is said whose figure it is.
_SAID = _compile(r"\s*,?\s*(?:as\s+)?(?:expected|promised|announced|claimed|measured)\b")
# Nobody asserts what stands behind such a word in the same clause.
_SUPPOSED = _compile(r"\b(?:(?:if|unless|suppose|imagine)\b[^.,;:!?|]*|whether\b[^.;:!?|]*)$")
# "Not only 1.7x faster" denies nothing.
_DENIED = _compile(
    r"\b(?:no|not(?!\s+(?:only|just|merely|simply)\b)|never|nothing|nobody|none|cannot|neither|without)\s+(?:[\w'-]+\s+){0,4}$"
)


def find_assertions(prose: str, context: str = "") -> list[Assertion]:
    """Return what ``prose`` asserts, in its order, each place once.

    Args:
        prose: a sentence.
        context: what else says whether a bare figure is a speedup: the header of a table.
    """
    found = [(m.end(), _assertion(kind, means, m)) for p, kind, means in _PATTERNS for m in p.finditer(prose)]
    about_speed = _ABOUT_SPEED.search(f"{context} {prose}") is not None
    for match in _BARE.finditer(prose):
        meant = about_speed and not _OTHER_MULTIPLE.match(prose, match.end())
        if meant or _OF_A_RIVAL.match(prose, match.end()) or _SAID.match(prose, match.end()):
            found.append((match.end(), _assertion("speedup", "times", match)))
    found = [(end, one) for end, one in found if not _is_supposed(prose, one.start)]
    kept: list[Assertion] = []
    covered = 0
    for end, one in sorted(found, key=lambda item: (item[1].start, -item[0])):  # of those at one place the longest
        if one.start >= covered:
            kept.append(one)
            covered = end
    return kept


def _is_supposed(prose: str, start: int) -> bool:
    before = prose[:start]
    return bool(_SUPPOSED.search(before) or _DENIED.search(before)) or prose.rstrip().endswith("?")


def _assertion(kind: Kind, means: str, match: re.Match[str]) -> Assertion:
    figure = {"one": 1.0, "two": 2.0, "ten": 10.0}.get(means) or _figure(means, _value(match["n"]))
    return Assertion(kind, figure, " ".join(match[0].split()), match.start())


def _value(words: str) -> float:
    named = {**_NUMBER_WORDS, **_FRACTIONS, **_MULTIPLES}.get(" ".join(words.lower().split()))
    return float(words.replace(",", "")) if named is None else named


def _figure(means: str, value: float) -> float:
    if means == "more":
        return 1 + value / 100
    if means == "less":
        return 1 / (1 - value / 100) if value < 100 else float("inf")
    if means == "part":
        return 1 / value
    return value * {"thousands": 1000.0, "thousandths": 0.001}.get(means, 1.0)
