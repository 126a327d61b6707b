"""What a sentence says, held against the keys of a claim: figure, metric, GPU, rival, subject, scope, cases and work.

A sentence that is silent about a key speaks of the claim's; only of a geometric mean it has to say that it is one. A
name that nothing here knows, and that is not the claim's, is never taken for the claim's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..gpu.specs import SPECS, name_words
from .assertions import NUMBER_WORDS, Assertion, find_assertions, uncovered_figures
from .claims import Claim
from .evidence import CaseRecord, Record, TimeKind
from .operator import load_operator
from .subject import BUILTIN_OPERATORS, builtin_names
from .suites import list_suites
from .vocabulary import (
    ANY_SHAPE,
    COMPARED,
    EVERY_CASE,
    FORMATS,
    GENERIC,
    GPU_FAMILIES,
    MEAN,
    METRICS,
    NO_METRIC,
    OF_MAKER,
    OTHER_WORK,
    PLAIN_KERNELS,
    STOPS,
    UNITS,
    WHOLE_SUITE,
)

_EXACT = 1e-9  # 2.1 is 2.1, however it was worked out

_KERNEL_OF = re.compile(
    r"\b(?:our|the|its|this|a|an)\s+([A-Za-z][\w-]*)\s+(?:kernels?|operators?|ops?|pass|layers?)\b"
    r"(?!['’]?s?\s+time\b)",
    re.IGNORECASE,
)
_IDENTIFIER = re.compile(r"(?<![\w.:/-])[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![\w(])")
_TOKEN = re.compile(r"[A-Za-z0-9_][\w'’+-]*(?:\.\w+)*")
_NAME = re.compile(r"\w*[A-Z]\w*[A-Z]\w*|\w*[A-Z]\w*\d\w*|\w+_\w+")
_OF_A_NAME = re.compile(
    r"\b(?:[Oo]f|[Oo]ver|[Aa]gainst|[Vv]ersus|vs\.?|compared\s+(?:to|with)|relative\s+to)\s+(?:the\s+)?"
    r"(?P<name>\w*[A-Z]\w*[A-Z][\w-]*)"
)
_NO_RIVAL = re.compile(r"CUDA|GPUs?|SMs?|TFLOP\w*|PyTorch|HBM\d?\w*|L2|KV|D|DV|TMA|BF16|FP\d+|TF32|NVIDIA")
_TAKES = re.compile(
    r"(?P<name>\w*[A-Z]\w*[A-Z][\w-]*)(?:['’]s\s+\w+)?\s+(?:takes|needs|took|needed|is|runs|ran|uses)\b"
)
_TIMES_A_NAME = re.compile(r"\d\s*[x×]\s+(?P<name>\w*[A-Z]\w*[A-Z][\w-]*)")
_COUNT = re.compile(
    rf"(?<![\w.,-])(?P<n>\d+|{'|'.join(sorted(NUMBER_WORDS, key=len, reverse=True))})"
    r"\s+(?:of\s+(?:the\s+)?\d+\s+)?(?:[a-z][\w-]*\s+){0,2}?(?:cases?|shapes?|problems?)\b",
    re.IGNORECASE,
)
_LETTERS = re.compile(r"\b(?P<unit>[BSHTD]|DV|HK|Sq|Sk|head\s+(?:size|dim(?:ension)?))\s*(?:=|of)?\s*(?P<n>\d[\d,]*)\b")
_SIZES = re.compile(
    r"\b(?P<n>\d[\d,]*)\s*(?P<k>[kK])?\s+(?P<unit>keys|queries|positions|tokens|heads|sequences|rows|columns)\b"
)
_THOUSANDS = re.compile(r"\b(?P<n>\d+)[kK]\b(?!\s*(?:tokens|samples)\s*(?:/|per))")


@dataclass(frozen=True)
class Shown:
    """A claim with what its words are known by."""

    claim: Claim
    rivals: Mapping[str, Sequence[str]]  # every one that is known here: its name -> what prose calls it
    subjects: Collection[str] = ()  # all that are known here
    operator: str = ""
    cases: Sequence[CaseRecord] = ()  # those of the record that the claim is about; none: no record

    @property
    def own_rivals(self) -> list[str]:
        """What prose calls the claim's rivals."""
        return [each for name in self.claim.baseline for each in (name, *self.rivals.get(name, ()))]


def shown_by(
    claim: Claim,
    record: Record | None,
    rivals: Mapping[str, Sequence[str]] | None = None,
    subjects: Iterable[str] = (),
) -> Shown:
    """Return a claim with what ``record`` adds. Our own rivals and subjects are known without being given."""
    rivals = own_rival_names() if rivals is None else rivals
    names = {*subjects, claim.subject, *builtin_names()}
    if record is None:
        return Shown(claim, rivals, names)
    return Shown(claim, rivals, names, record.subject.operator, claim.cases_of(record))


def own_rival_names() -> dict[str, Sequence[str]]:
    """Return what prose calls every baseline of our own operators: its name -> names in words."""
    rivals = (load_operator(operator).rivals() for operator in BUILTIN_OPERATORS)
    return joined(
        {name: (name, *getattr(rival, "also_called", ())) for name, rival in found.items()} for found in rivals
    )


def joined(names: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, Sequence[str]]:
    """Return the names of all: two operators may call one rival differently."""
    found: dict[str, Sequence[str]] = {}
    for each in names:
        found |= {name: tuple(dict.fromkeys([*found.get(name, ()), *called])) for name, called in each.items()}
    return found


def overstatement(shown: Shown) -> str:
    """Return what a claim's own sentence says beyond its keys, with the words at fault; empty: nothing."""
    text = " ".join(shown.claim.sentence.split())
    found = find_assertions(text, "speedup", supposed=True)
    figures = [figure_fault(each, text, shown) for each in (*found, *uncovered_figures(text, found))]
    faults = dict.fromkeys([*filter(None, figures), *word_faults(text, shown)])
    return f"the sentence says more than the claim's keys: {'; '.join(faults)}" if faults else ""


def figure_fault(found: Assertion, text: str, shown: Shown) -> str:
    """Return why the claim does not show the figure of an assertion in ``text``; empty: it does."""
    claim, words = shown.claim, found.words
    if found.kind in ("TFLOP/s", "TB/s") and claim.metric != "memory":
        most = _rate(shown, claim.metric, found.kind, text)
        unit = f"{claim.subject} reaches {most:.4g} {found.kind} in its runs"
        return "" if found.figure <= most * (1 + _EXACT) else f"{unit}, not {words!r}"
    if found.kind == "slowdown" and claim.metric != "memory" and _at_most(text, found):
        return "" if found.figure * claim.factor >= 1 - _EXACT else _factor(claim, words)
    if found.kind != ("memory" if claim.metric == "memory" else "speedup"):
        return f"metric is {claim.metric}, at least {claim.factor:g} times, not {words!r}"
    if re.search(r"\bthe\s+fastest\b(?!\s+of\b)", words):
        return f"baseline is {', '.join(claim.baseline)}, not {words!r}"
    return _factor(claim, words) if found.figure > claim.factor * (1 + _EXACT) else ""


def _factor(claim: Claim, words: str) -> str:
    return f"factor is {claim.factor:g}, not {words!r}"


def _at_most(text: str, found: Assertion) -> bool:
    return re.search(r"\b(?:at\s+most|no\s+more\s+than)\s+$", text[: found.start]) is not None


def word_faults(text: str, shown: Shown) -> list[str]:
    """Return which words of ``text`` say more than the keys of a claim, each with the key."""
    checks = (_gpus, _rivals, _subjects, _metrics, _scope, _cases, _work)
    return list(dict.fromkeys(fault for check in checks for fault in check(text, shown)))


def _gpus(text: str, shown: Shown) -> Iterator[str]:
    claim = shown.claim
    rest = text
    for name in sorted(claim.gpu, key=len, reverse=True):  # as the claim writes it, it is the claim's
        rest = re.sub(rf"(?<!\w){re.escape(name)}(?![\w-]|\s+(?:NVL|PCIe|Ti|SUPER)\b)", " ", rest, flags=re.IGNORECASE)
    rest = re.sub(r"(?<!\w)(?:NVIDIA|GeForce|Tesla)\s+(?=\s|$|[,.;)])", " ", rest)
    for found in GPU_FAMILIES.finditer(rest):
        said = " ".join(found[0].split())
        if not any(_same_gpu(name, said) for name in claim.gpu):
            yield f"gpu is {', '.join(claim.gpu)}, not {said!r}"
    words = frozenset(re.findall(r"\w+", rest.casefold()))
    known = [gpu for gpu in SPECS if name_words(gpu) <= words]
    longest = [gpu for gpu in known if not any(name_words(gpu) < name_words(other) for other in known)]
    for gpu in longest:
        if not any(_same_gpu(name, gpu) for name in claim.gpu):
            yield f"gpu is {', '.join(claim.gpu)}, not {gpu!r}"


_MAKERS = frozenset({"nvidia", "geforce", "tesla", "amd", "intel", "radeon", "instinct"})


def _same_gpu(claimed: str, said: str) -> bool:
    """Return whether what is said names no less than what is claimed, and no other model."""
    own, words = name_words(claimed) - _MAKERS, name_words(said) - _MAKERS
    kinds = {"nvl", "pcie", "ti", "super", "d"}
    return bool(words) and own <= words and own & kinds == words & kinds


def _rivals(text: str, shown: Shown) -> Iterator[str]:
    claim, own = shown.claim, shown.own_rivals
    against = f"baseline is {', '.join(claim.baseline)}"
    spoken = as_words(_without_metrics(text))
    if any(as_words(each) in spoken for each in own):  # beside "its cuDNN backend" stands what it is a backend of
        families = [name for name in shown.rivals if any(each.startswith(f"{name}-") for each in claim.baseline)]
        own = [*own, *(each for name in families for each in (name, *shown.rivals[name]))]
    said = [name for name, names in shown.rivals.items() if any(as_words(each) in spoken for each in names)]
    # "SDPA with its cuDNN backend" is about the latter.
    said = [name for name in said if not any(other.startswith(f"{name}-") for other in said)]
    for name in said:
        if name not in claim.baseline:
            yield f"{against}, not {name!r}"
    bare = re.sub(r"\([^()]*\)", " ", text)  # what stands in brackets says more of a name, and is no name
    for found in COMPARED.finditer(bare):
        # "SDPA is slower than ours" compares with the subject.
        if unknown := _unknown(_compared_with(bare[found.end() :]), [*own, claim.subject]):
            yield f"{against}, not {unknown!r}"
    for pattern in (_OF_A_NAME, _TAKES, _TIMES_A_NAME):
        for found in pattern.finditer(bare):
            name = found["name"].removesuffix("'s").removesuffix("’s")
            known = as_words(name) in as_words(" , ".join([*own, claim.subject, *claim.gpu, claim.suite]))
            listed = any(as_words(name) in as_words(each) for names in shown.rivals.values() for each in names)
            if not (known or listed or _NO_RIVAL.fullmatch(name) or GPU_FAMILIES.fullmatch(name)):
                yield f"{against}, not {name!r}"


def _without_metrics(text: str) -> str:
    """Return ``text`` without the words for times: "an eager call" is wall time, and no rival called eager."""
    for pattern in METRICS.values():
        text = pattern.sub(" ", text)
    return text


def _compared_with(text: str) -> str:
    """Return the names at the beginning of ``text``: what something is compared with."""
    taken, end = [], 0
    for token in _TOKEN.finditer(text):
        between = text[end : token.start()]
        word = token[0]
        named = bool(_NAME.fullmatch(word)) or word in ("the", "a", "an")
        if re.search(r"[;:.!?|—]", between) or ("," in between and not (named or word in ("and", "or"))):
            break
        if word.casefold() in STOPS:
            break
        taken.append(word)
        end = token.end()
    while taken and taken[-1] in ("and", "or", "the", "a", "an"):
        taken.pop()
    text = " ".join(taken)
    # "than A and needs less" goes on with another clause, "than A and B" with another name.
    parts = re.split(r"\s+(and|or)\s+", text)
    kept = parts[0]
    for joint, part in zip(parts[1::2], parts[2::2], strict=True):
        first = next((word for word in part.split() if word not in ("the", "a", "an")), "")
        if not re.search(r"[A-Z\d_]", first):
            break
        kept = f"{kept} {joint} {part}"
    return kept


def _unknown(text: str, names: Sequence[str]) -> str:
    """Return those words that are neither names nor say nothing."""
    spoken = as_words(text)
    known = False
    for name in sorted(names, key=len, reverse=True):
        if as_words(name) in spoken:
            spoken, known = spoken.replace(as_words(name), " "), True
    plain = GENERIC | OF_MAKER if known else GENERIC
    left = [word for word in spoken.split() if word not in plain]
    return text if left else ""


def _subjects(text: str, shown: Shown) -> Iterator[str]:
    claim = shown.claim
    own = {claim.subject, claim.suite, shown.operator, *shown.own_rivals}
    for name in sorted({*shown.subjects} - own):
        if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
            yield f"subject is {claim.subject}, not {name!r}"
    known = {*own, *shown.subjects, *(key for case in shown.cases for key in case.problem)}
    known |= {part for name in known for part in re.findall(r"[\w]+", name)}
    for found in _IDENTIFIER.finditer(text):
        if found[0] not in known:
            yield f"subject is {claim.subject}, not {found[0]!r}"


def _metrics(text: str, shown: Shown) -> Iterator[str]:
    metric = shown.claim.metric
    for kind, pattern in METRICS.items():
        if kind != metric and (found := pattern.search(text)):
            yield f"metric is {metric}, not {found[0]!r}"
    if found := NO_METRIC.search(text):
        yield f"metric is {metric}, not {found[0]!r}"


def _scope(text: str, shown: Shown) -> Iterator[str]:
    claim = shown.claim
    every, anywhere, whole = (pattern.search(text) for pattern in (EVERY_CASE, ANY_SHAPE, WHOLE_SUITE))
    if claim.scope == "geometric mean":
        if every or anywhere:
            yield f"scope is geometric mean, not {(every or anywhere or [''])[0]!r}"
        elif not MEAN.search(text):
            yield "scope is geometric mean, and it does not say so"
    elif anywhere and not (re.search(r"\bsuite\b", text) or _COUNT.search(text)):
        yield f"scope is each case of suite {claim.suite}, not {anywhere[0]!r}"
    if claim.cases and whole:
        yield f"cases is {', '.join(claim.cases)}, not {whole[0]!r}"
    for name in {*list_suites()} - {claim.suite}:
        if found := re.search(rf"\bsuites?\s+`?{re.escape(name)}\b(?!-)", text):
            yield f"suite is {claim.suite}, not {found[0]!r}"


def _cases(text: str, shown: Shown) -> Iterator[str]:
    """Yield counts, sizes and number formats that the claim's cases do not have."""
    if not shown.cases:
        return
    claim = shown.claim
    number = len(shown.cases)
    for found in _COUNT.finditer(text):
        count = _number(found["n"])
        if count > number or (count != number and claim.scope == "geometric mean"):
            yield f"the claim is about {number} of the cases, not {found[0]!r}"
    values = {str(value).casefold() for case in shown.cases for value in _flat(case.problem)}
    for found in FORMATS.finditer(text):
        if _format(found[0]) not in values:
            yield f"no case that is claimed has {found[0]!r}"
    for unit, said, numbers in _sizes(text):
        if not any(numbers & _sizes_of(case, unit) for case in shown.cases):
            yield f"no case that is claimed has {said!r}"
    for key in {key for case in shown.cases for key, value in case.problem.items() if value is False}:
        never = all(case.problem.get(key) is False for case in shown.cases)
        if never and re.search(rf"(?<!non-)(?<!not )(?<!no )\b{re.escape(key)}\b", text, re.IGNORECASE):
            yield f"no case that is claimed has {key!r}"


def _work(text: str, shown: Shown) -> Iterator[str]:
    claim = shown.claim
    names = [claim.subject, claim.suite, shown.operator, *shown.own_rivals]
    for case in shown.cases[:1]:
        names += [*case.problem, *(str(value) for value in case.problem.values())]
    own = as_words(" ".join(names))
    for found in OTHER_WORK.finditer(text):
        if not _stems(found[0]) <= _stems(own):
            yield f"subject is {claim.subject}, not {found[0]!r}"
    for found in _KERNEL_OF.finditer(text):
        word = found[1].casefold()
        if word not in PLAIN_KERNELS and as_words(word) not in own:
            yield f"subject is {claim.subject}, not {found[0]!r}"


def _rate(shown: Shown, metric: TimeKind, unit: str, text: str) -> float:
    """Return the highest rate of the subject in those cases that ``text`` is about; in each of them, the lowest."""
    by_unit: dict[str, set[int]] = {}
    for group, _, sizes in _sizes(text):
        by_unit.setdefault(group, set()).update(sizes)
    formats = {_format(found[0]) for found in FORMATS.finditer(text)}
    rates = []
    for case in shown.cases:
        if not all(numbers & _sizes_of(case, group) for group, numbers in by_unit.items()):
            continue
        if formats and not formats & {str(value).casefold() for value in _flat(case.problem)}:
            continue
        rate = next((arm.rates.get(metric) for arm in case.arms if arm.role == "subject"), None)
        rates.append(0.0 if rate is None else rate.tflops if unit == "TFLOP/s" else rate.tbytes_per_second)
    every = EVERY_CASE.search(text) or ANY_SHAPE.search(text) or re.search(r"\bat\s+least\b", text)
    return (min if every else max)(rates, default=0.0)


def _sizes(text: str) -> Iterator[tuple[str, str, set[int]]]:
    """Yield the sizes of problems in ``text``: the unit, the words, and the numbers that they may stand for."""
    text = GPU_FAMILIES.sub(" ", text)  # H200 is no size
    for found in _LETTERS.finditer(text):
        yield found["unit"], found[0], {_number(found["n"])}
    for found in _SIZES.finditer(text):
        if not found["k"]:
            yield found["unit"], found[0], {_number(found["n"])}
    for found in _THOUSANDS.finditer(text):
        yield "k", found[0], {int(found["n"]) * 1024, int(found["n"]) * 1000}
    for found in re.finditer(r"\b(?P<n>\d+)\s+[kK]\s+(?:keys|queries|positions|tokens)\b", text):
        yield "k", found[0], {int(found["n"]) * 1024, int(found["n"]) * 1000}


def _sizes_of(case: CaseRecord, unit: str) -> set[object]:
    """Return the numbers of a problem that are of this unit; all of them where none is known to be."""
    word = UNITS.get(unit, unit)
    named = {key: value for key, value in case.problem.items() if word in key}
    return set(_flat(named or case.problem))


def _flat(problem: Mapping[str, object]) -> Iterator[object]:
    for value in problem.values():
        if isinstance(value, (list, tuple)):
            yield from value
        elif not isinstance(value, bool):
            yield value


def _format(words: str) -> str:
    """Return a number format as problems write it: fp16, bf16."""
    named = {"half precision": "fp16", "single precision": "fp32", "double precision": "fp64"}
    word = " ".join(words.casefold().split())
    return named.get(word, word.replace("float", "fp").replace("bfp16", "bf16"))


def _number(words: str) -> int:
    named = NUMBER_WORDS.get(words.casefold())
    return int(words.replace(",", "")) if named is None else int(named)


def _stems(text: str) -> set[str]:
    """Return the words of a text without their endings: decode and decoding are one."""
    return {re.sub(r"(?:ing|es|ed|s|e|d)$", "", word) for word in as_words(text).split()}


def as_words(text: str) -> str:
    """Return the words of a text between blanks, so that one is found as a whole."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.casefold()))} "
