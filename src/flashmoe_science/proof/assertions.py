"""Which words of a sentence assert a speed or a saving of memory, and the figure that they assert.

A figure is how many times as fast: "30 % less time" is 1.43, and what has no figure ("outperforms") is at least 1. So
it is of memory that is saved. Of a rate (TFLOP/s, GB/s) it is the rate; of what is slower, takes more memory, or saves
bytes, the figure as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["speedup", "slowdown", "memory", "more memory", "bytes", "TFLOP/s", "TB/s", "rate"]


@dataclass(frozen=True)
class Assertion:
    """What is asserted, and where in the sentence."""

    kind: Kind
    figure: float
    words: str
    start: int
    end: int


NUMBER_WORDS = {
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
    "dozen": 12.0,
    "thirteen": 13.0,
    "fourteen": 14.0,
    "fifteen": 15.0,
    "sixteen": 16.0,
    "seventeen": 17.0,
    "eighteen": 18.0,
    "nineteen": 19.0,
    "twenty": 20.0,
    "twenty-four": 24.0,
    "thirty": 30.0,
    "thirty-six": 36.0,
    "forty": 40.0,
    "fifty": 50.0,
    "sixty": 60.0,
    "seventy": 70.0,
    "eighty": 80.0,
    "ninety": 90.0,
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
_LONGEST_FIRST = sorted(NUMBER_WORDS, key=len, reverse=True)
_N = rf"(?<![\w.,])(?P<n>\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|\d+(?:\.\d+)?|{'|'.join(_LONGEST_FIRST)})"
_TIMES = r"(?:\s*[x×](?![\w×])|[\s-]*times\b|[\s-]*fold\b)"
_PERCENT = r"\s*(?:%|percent\b|per\s+cent\b)"
# What may stand between the number and what it is about, and before it.
_SMALL = _words("a, an, the, of, as, in, more, much, its, their, our, wall, kernel, graph, device, overall, total")
_WHOSE = r"(?:[\w-]+['’]s\s+)?"
_BETWEEN = rf"[\s-]+(?:{_SMALL}\s+)*{_WHOSE}(?:{_SMALL}\s+)*"
# "half of its own time" is a share, "half the time" a comparison.
_OF_ANOTHERS = rf"[\s-]+(?:{_words('the, of, as, much, wall, kernel, graph, device, overall, total')}\s+)*{_WHOSE}"
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
_RATE = r"rate\b(?!\s+of\s+(?:errors?|failures?))"
# "Ten per cent of the time" is how often, and of nobody's.
_OF_A_TIME = (
    r"\s+of\s+(?:the\s+)?(?:(?:wall|kernel|graph|run)[\s-]*(?:time|clock)\b|[\w-]+['’]s\s+(?:\w+\s+)?"
    rf"{_TIME}|(?:the\s+)?{_TIME}\s+(?:of|that)\b)"
)
_SLOW = r"(?:slow|slower|longer|long)\b"
_MEMORY = r"(?:(?:peak|gpu|device|activation)\s+)*(?:memory|vram)\b"
_LESS_MEMORY = (
    rf"(?:(?:less|lower|smaller|reduced|fewer)\s+{_MEMORY}"
    r"|(?:peak\s+)?memory\s+(?:saving|savings|saved|reduction)\b)"
)
# Verbs and nouns that a number follows.
_SPEEDS_UP = (
    r"\b(?:speed-?ups?|speed(?:s|ed)?\s+(?:\w+\s+)?up|faster|quicker|accelerat\w+|outperform\w*\s+[^.;,]{1,60}?)"
    rf"\s*[:=]?\s*{_ABOUT}"
)
_BEAT = r"\b(?:beat(?:s|en|ing)?|(?:outpac|outrun|outstrip|surpass|outclass|overtak|trounc|outdo)\w*)"
_BEATS = rf"{_BEAT}\s+[^.;]{{1,60}}?\bby\s+{_ABOUT}"
_MORE = r"\b(?:improv|increas|boost|rais|enhanc|lift)\w*\s+(?:[\w-]+\s+){0,3}?"
_SPEED = r"(?:performance|throughput|speed|bandwidth)\b"
_BY_A_FACTOR = rf"(?:[^.;]{{0,40}}?\s)?by\s+{_ABOUT}(?:a\s+)?factor\s+of\s+{_ABOUT}"
# "SDPA takes 1.7x as long": names of implementations have two capitals.
_RIVAL_TAKES = (
    r"(?-i:\b\w*[A-Z]\w*[A-Z][\w-]*)\s+(?:(?:call|kernel|then|still)\s+)?"
    r"(?:takes?|took|needs?|needed|is|was|runs|ran)\s+"
)
_CUTS = r"\b(?:reduc|cut|sav|lower|shrink|decreas)\w*\s+(?:[\w-]+\s+){0,3}?"
_FALLS = r"\s+(?:is\s+|was\s+|has\s+)?(?:drop|f[ae]ll|shr[aiu]nk|decreas|reduc|cut)\w*\s+"
_GROWS = r"\s+(?:is\s+|was\s+|has\s+)?(?:improv|increas|grow|grew|rose|ris|went\s+up|go(?:es)?\s+up)\w*\s+"
_WHAT = r"(?:(?:of|on|in|over|for)\s+(?:[\w-]+\s+){1,4}?)?"  # what is meant by it, before its figure
_LESS = r"(?:less|lower|shorter|smaller)\b"
_HALVES = r"\bhalv(?:es?|ed|ing)\s+(?:(?:the|its|their|our|wall|kernel|graph|run|device|overall|total)\s+)*"
_STILL = _words("much, far, significantly, consistently, considerably, still, also, even, always, slightly, a lot")


def _compile(*parts: str) -> re.Pattern[str]:
    return re.compile("".join(parts), re.IGNORECASE)


def _one_of(words: Iterable[str]) -> str:
    return rf"\b(?P<n>{'|'.join(words)})"


# Each with what its figure means: "times", "more" (30 % more is 1.3), "less" (30 % less is 1 / 0.7), "part", "plain".
_PATTERNS: tuple[tuple[re.Pattern[str], Kind, str], ...] = (
    (_compile(_RIVAL_TAKES, _ABOUT, _N, _TIMES, _BETWEEN, rf"(?:{_SLOW}|{_TIME})"), "speedup", "times"),
    (_compile(_RIVAL_TAKES, _ABOUT, _one_of(_MULTIPLES), _BETWEEN, rf"(?:{_SLOW}|{_TIME})"), "speedup", "times"),
    (_compile(_RIVAL_TAKES, _ABOUT, _N, _PERCENT, _BETWEEN, rf"(?:{_SLOW}|more\s+{_TIME})"), "speedup", "more"),
    (_compile(_N, _TIMES, _BETWEEN, rf"(?:{_SPEEDUP}|{_RATE})"), "speedup", "times"),
    (_compile(_N, _TIMES, _BETWEEN, _LESS_TIME), "speedup", "times"),
    (_compile(_N, _TIMES, _BETWEEN, _LESS_MEMORY), "memory", "times"),
    (_compile(_N, _TIMES, _BETWEEN, _MEMORY), "more memory", "plain"),
    (_compile(_N, _TIMES, _BETWEEN, rf"(?:{_SLOW}|{_TIME})"), "slowdown", "plain"),
    (_compile(_N, _PERCENT, _BETWEEN, rf"(?:{_SPEEDUP}|(?:higher|better|more)\s+{_RATE})"), "speedup", "more"),
    (_compile(_N, _PERCENT, _BETWEEN, _LESS_TIME), "speedup", "less"),
    (_compile(_N, _PERCENT, _OF_A_TIME), "speedup", "percent"),
    (_compile(_N, _PERCENT, _BETWEEN, _LESS_MEMORY), "memory", "less"),
    (_compile(_N, _PERCENT, r"\s+more\s+", _MEMORY), "more memory", "plain"),
    (_compile(_N, _PERCENT, _OF_ANOTHERS, _MEMORY), "memory", "percent"),
    (_compile(_N, _PERCENT, _BETWEEN, _SLOW), "slowdown", "plain"),
    (_compile(_one_of(_MULTIPLES), _BETWEEN, rf"(?:{_SPEEDUP}|{_RATE})"), "speedup", "times"),
    (_compile(_one_of(_MULTIPLES), _BETWEEN, _MEMORY), "more memory", "plain"),
    (_compile(_one_of(_MULTIPLES), _BETWEEN, rf"(?:{_SLOW}|{_TIME})"), "slowdown", "plain"),
    (_compile(_one_of(_FRACTIONS), _OF_ANOTHERS, _TIME), "speedup", "part"),
    (_compile(_one_of(_FRACTIONS), r"\s+", _LESS_TIME), "speedup", "less part"),
    (_compile(_one_of(_FRACTIONS), r"\s+", _LESS_MEMORY), "memory", "less part"),
    (_compile(_one_of(_FRACTIONS), _OF_ANOTHERS, _MEMORY), "memory", "part"),
    (_compile(_one_of(_FRACTIONS), r"\s+(?:as|the)\s+", _SPEEDUP), "slowdown", "plain"),
    (_compile(_SPEEDS_UP, _N, _TIMES), "speedup", "times"),
    (
        _compile(r"\bspeed-?ups?\s*[:=]?\s*", _ABOUT, _N, r"(?![\d.,]*\d)(?!", _PERCENT, "|", _TIMES, ")"),
        "speedup",
        "times",
    ),
    (_compile(_BEATS, _N, _TIMES), "speedup", "times"),
    (_compile(_BEATS, _N, _PERCENT), "speedup", "more"),
    (_compile(_BEAT, r"\s+(?:(?:the|even)\s+)?(?-i:\w*[A-Z]\w*[A-Z]\w*)"), "speedup", "one"),
    (_compile(_SPEEDS_UP, _N, _PERCENT), "speedup", "more"),
    (_compile(_MORE, _SPEED, r"\s+", _WHAT, _ABOUT, _N, _PERCENT), "speedup", "more"),
    (_compile(_MORE, _SPEED, r"\s+", _WHAT, _ABOUT, _N, _TIMES), "speedup", "times"),
    (_compile(r"\b", _SPEED, _GROWS, _ABOUT, _N, _PERCENT), "speedup", "more"),
    (_compile(r"\b", _SPEED, _GROWS, _ABOUT, _N, _TIMES), "speedup", "times"),
    (_compile(_MORE, _SPEED, _BY_A_FACTOR, _N), "speedup", "times"),
    (_compile(r"\b", _SPEED, _GROWS, _BY_A_FACTOR, _N), "speedup", "times"),
    (_compile(r"\b(?:faster|quicker)\b", _BY_A_FACTOR, _N), "speedup", "times"),
    (_compile(_BEAT, _BY_A_FACTOR, _N), "speedup", "times"),
    (_compile(r"\boutperform\w*", _BY_A_FACTOR, _N), "speedup", "times"),
    (_compile(r"\baccelerat\w*", _BY_A_FACTOR, _N), "speedup", "times"),
    (_compile(_CUTS, _TIME, _BY_A_FACTOR, _N), "speedup", "times"),
    (_compile(r"\b", _TIME, _FALLS, _BY_A_FACTOR, _N), "speedup", "times"),
    (_compile(_CUTS, _MEMORY, _BY_A_FACTOR, _N), "memory", "times"),
    (_compile(_MEMORY, _FALLS, _BY_A_FACTOR, _N), "memory", "times"),
    (_compile(r"\bslower", _BY_A_FACTOR, _N), "slowdown", "plain"),
    (_compile(_CUTS, _TIME, r"\s+", _WHAT, _ABOUT, _N, _PERCENT), "speedup", "less"),
    (_compile(r"\b", _TIME, _FALLS, _ABOUT, _N, _PERCENT), "speedup", "less"),
    (_compile(r"\b", _TIME, r"\s+(?:is|was)\s+", _ABOUT, _N, _PERCENT, r"\s+", _LESS), "speedup", "less"),
    (_compile(_HALVES, _TIME), "speedup", "two"),
    (_compile(_HALVES, _MEMORY), "memory", "two"),
    (_compile(_CUTS, _TIME, r"\s+in\s+half\b"), "speedup", "two"),
    (_compile(_CUTS, _MEMORY, r"\s+in\s+half\b"), "memory", "two"),
    (_compile(_CUTS, _TIME, r"\s+", _WHAT, _ABOUT, _N, _TIMES), "speedup", "times"),
    (_compile(_CUTS, _MEMORY, r"\s+(?:[\w-]+\s+){0,2}?", _ABOUT, _N, _TIMES), "memory", "times"),
    (_compile(_CUTS, _MEMORY, r"\s+(?:[\w-]+\s+){0,2}?", _ABOUT, _N, _PERCENT), "memory", "less"),
    (_compile(_MEMORY, r"(?:\s+(?:use|usage|needs?|consumption))?", _FALLS, _ABOUT, _N, _PERCENT), "memory", "less"),
    (_compile(_MEMORY, r"(?:\s+(?:use|usage|needs?|consumption))?", _FALLS, _ABOUT, _N, _TIMES), "memory", "times"),
    (_compile(_MEMORY, r"\s+(?:is|was)\s+", _ABOUT, _N, _PERCENT, r"\s+", _LESS), "memory", "less"),
    (_compile(r"\bsav\w*\s+", _ABOUT, _N, _PERCENT, _BETWEEN, _MEMORY), "memory", "less"),
    (_compile(r"\bsav\w*\s+", _ABOUT, _N, _PERCENT, _BETWEEN, _TIME), "speedup", "less"),
    (_compile(r"\bsav\w*\s+", _ABOUT, _N, r"\s*[GM]i?B", _BETWEEN, _MEMORY), "bytes", "plain"),
    (_compile(_N, r"\s*[KGM]i?B", _BETWEEN, _LESS_MEMORY), "bytes", "plain"),
    (
        _compile(r"\b(?:needs?|uses?|takes?|allocates?|requires?)\s+(?:\w+\s+)?", _LESS_MEMORY, r"\s+than\b"),
        "memory",
        "one",
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
    (
        _compile(r"\b(?:is|are|was|were|runs?|ran)\s+", rf"(?:{_STILL}\s+)*(?:slower)\s+than\b"),
        "slowdown",
        "one",
    ),
    (_compile(r"\b(?:is|are)\s+(?:by\s+far\s+)?the\s+fastest\b"), "speedup", "one"),
)

# A bare "1.7x" is a speedup where its sentence, or the header of its table, is about speed.
_BARE = _compile(_N, r"\s*[x×](?![\w×])(?!\s*\d)")
_ANY_MULTIPLE = _compile(_N, _TIMES)
_ANY_PERCENT = _compile(_N, _PERCENT, r"(?!\s*(?:confidence|intervals?)\b)")
_ABOUT_SPEED = _compile(
    r"\b(?:(?:fast|slow)(?:er|est)?|speeds?|speed-?ups?|throughput|latency|performance|outperform\w*|wall\s+time)\b"
)
_OTHER_MULTIPLE = _compile(
    r"\s+(?:(?:its|the|as|that|of|their|this|more|larger|smaller)\s+)*",
    _words("sizes?, errors?, many, much, larger?, smaller?, wider?, long, bytes, bits, rows, keys, heads, length")
    + r"\b",
)
# Or where it is said of what: "0.12x of SDPA". Names of implementations have two capitals.
_OF_A_RIVAL = re.compile(
    r"\s+(?:(?:of|over|against|versus|vs\.?|compared\s+(?:to|with)|that\s+of)\s+\w*[A-Z]\w*[A-Z]\w*"
    r"|(?!(?:[GC]PUs?|SMs?|RTX|GTX|DGX|HGX|KV|HBM|TMA|MMA|TMEM|SMEM|DRAM|SRAM|NVL|[KMGT]i?B|IO|ID|IDs)\b)"
    r"\w*[A-Z]\w*[A-Z][\w-]*(?=\s*(?:[.,;:!?)]|$|['’]s|on\b|in\b|at\b|and\b|for\b)))"
)
_VERSUS = re.compile(r"\b(?:vs\.?|versus)\s+\w", re.IGNORECASE)
# Or where it is said whose figure it is.
_SAID = _compile(r"\s*,?\s*(?:as\s+)?(?:expected|promised|announced|claimed|measured)\b")
# Nobody asserts what stands behind such a word in the same clause.
_SUPPOSED = _compile(r"\b(?:(?:if|unless|suppose|imagine)\b[^.,;:!?|]*|whether\b[^.;:!?|]*)$")
# "Not only 1.7x faster" denies nothing.
_DENIED = _compile(
    r"\b(?:no|not(?!\s+(?:only|just|merely|simply)\b)|never|nothing|nobody|none|cannot|neither|without)\s+(?:[\w'-]+\s+){0,4}$"
)


def find_assertions(prose: str, context: str = "", *, supposed: bool = False) -> list[Assertion]:
    """Return what ``prose`` asserts, in its order, each place once.

    Args:
        prose: a sentence.
        context: what else says whether a bare figure is a speedup: the header of a table.
        supposed: with what is only supposed or denied.
    """
    found = [_assertion(kind, means, m) for p, kind, means in _PATTERNS for m in p.finditer(prose)]
    around = f"{context} {prose}"
    about_speed = _ABOUT_SPEED.search(around) is not None or _VERSUS.search(around) is not None
    for match in _BARE.finditer(prose):
        meant = about_speed and not _OTHER_MULTIPLE.match(prose, match.end())
        if meant or _OF_A_RIVAL.match(prose, match.end()) or _SAID.match(prose, match.end()):
            found.append(_assertion("speedup", "times", match))
    if not supposed:
        found = [one for one in found if not _is_supposed(prose, one.start)]
    kept: list[Assertion] = []
    covered = 0
    for one in sorted(found, key=lambda one: (one.start, -one.end)):  # of those at one place the longest
        if one.start >= covered:
            kept.append(one)
            covered = one.end
    return kept


def uncovered_figures(prose: str, found: Sequence[Assertion]) -> list[Assertion]:
    """Return multiples and percentages that are part of none of the assertions ``found``, as speedups.

    A percentage says nothing that could be held against a factor: its figure is infinite. That of an interval is none.
    """
    figures = [_assertion("speedup", "times", match) for match in _ANY_MULTIPLE.finditer(prose)]
    percentages = (_assertion("speedup", "times", match) for match in _ANY_PERCENT.finditer(prose))
    figures += [replace(one, figure=float("inf")) for one in percentages]
    return [one for one in figures if not any(one.start < other.end and other.start < one.end for other in found)]


def _is_supposed(prose: str, start: int) -> bool:
    before = prose[:start]
    return bool(_SUPPOSED.search(before) or _DENIED.search(before)) or prose.rstrip().endswith("?")


def _assertion(kind: Kind, means: str, match: re.Match[str]) -> Assertion:
    figure = {"one": 1.0, "two": 2.0, "ten": 10.0}.get(means) or _figure(means, _value(match["n"]))
    return Assertion(kind, figure, " ".join(match[0].split()), match.start(), match.end())


def _value(words: str) -> float:
    named = {**NUMBER_WORDS, **_FRACTIONS, **_MULTIPLES}.get(" ".join(words.lower().split()))
    return float(words.replace(",", "")) if named is None else named


def _figure(means: str, value: float) -> float:
    if means == "more":
        return 1 + value / 100
    if means == "less":
        return 1 / (1 - value / 100) if value < 100 else float("inf")
    if means == "part":
        return 1 / value
    if means == "less part":
        return 1 / (1 - value)
    if means == "percent":
        return 100 / value if value else float("inf")
    return value * {"thousands": 1000.0, "thousandths": 0.001}.get(means, 1.0)
