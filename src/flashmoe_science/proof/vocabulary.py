"""The words by which a sentence names a metric, a scope, a GPU, a rival or other work: lists, and English."""

from __future__ import annotations

import re
from collections.abc import Mapping


def _compile(*alternatives: str, flags: re.RegexFlag = re.IGNORECASE) -> re.Pattern[str]:
    return re.compile(f"(?:{'|'.join(alternatives)})", flags)


def _set(*words: str) -> frozenset[str]:
    return frozenset(" ".join(words).split())


METRICS: Mapping[str, re.Pattern[str]] = {
    "kernel": _compile(
        r"\bkernels?['’]?s?[\s-]+(?:time|times|duration|latency)\b",
        r"\btimes?\s+of\s+(?:(?:the|its|their|our)\s+)?kernels?\b",
        r"\b(?:GPU|device)\s+time\b",
    ),
    "graph": _compile(
        r"\bCUDA[\s-]+graphs?\b", r"\bgraph[\s-]+(?:time|times|replays?|mode)\b", r"\breplay(?:s|ed|ing)?\b"
    ),
    "wall": _compile(
        r"\bwall\b(?:[\s-]*(?:clock|time|times))?",
        r"\beager\s+(?:calls?|mode|time|times|runs?)\b",
        r"\bhost\s+time\b",
        r"\bcalled\s+eagerly\b",
        r"\bfrom\s+Python\b",
    ),
}
# What no claim measures.
NO_METRIC = _compile(
    r"\bend[\s-]to[\s-]end\b",
    r"\benergy\b",
    r"\bper\s+(?:watt|dollar)\b",
    r"\bcheaper\b",
    r"\bcompil(?:e|ation)\s+time\b",
    r"\btime\s+to\s+first\s+token\b",
    r"\bstart-?up\b",
)

_SHAPES = (
    r"(?:shapes?|sizes?|lengths?|problems?|inputs?|workloads?|configurations?|models?|dtypes?|heads?|batch(?:es)?)"
)
EVERY_CASE = _compile(
    r"\b(?:each|every|all|any)(?:\s+(?:one\s+)?of\s+(?:the|its|these|those))?\s+(?:\w+\s+){0,2}?cases?\b",
    r"\b(?:each|every|any)\s+(?:one\s+)?of\s+(?:the|these|those)\s+(?:\w+\s+){0,2}?" + _SHAPES,
    r"\bin\s+(?:each|every\s+one|all)\b",
    r"\bevery\s+one\b",
    r"\bcase\s+by\s+case\b",
)
ANY_SHAPE = _compile(
    r"\b(?:each|every|all|any)\s+(?:\w+\s+){0,2}?" + _SHAPES + r"\b",
    r"\b(?:always|everywhere|in\s+general|across\s+the\s+board|without\s+exception|never\s+slower|in\s+all\s+cases)\b",
    r"\bwhatever\s+the\s+\w+",
    r"\b(?:no\s+matter)\b",
)
WHOLE_SUITE = _compile(
    r"\b(?:whole|entire|full|complete)\s+(?:\w+\s+)?suite\b",
    r"\b(?:each|every|all)\s+(?:\w+\s+){0,3}?of\s+(?:the\s+)?suite\b(?!\s+\w+\s+that\s+fit)",
)
MEAN = _compile(r"\bgeometric\s+means?\b", r"\bgeomean\b", r"\bon\s+average\b", r"\baverages?\b", r"\bmean\b")

# Names of GPUs, of those that are not in gpu/specs.py too: makers, families, and letters with a model's number. A
# letter with a power of two may be a size ("H64"), and is none.
_SUFFIX = r"(?:[\s-]+(?:NVL|PCIe|SXM\d?|Ti|SUPER|XTX?|Max|Ultra|Laptop|Mobile|\d+\s?GB)\b)*"
GPU_FAMILIES = re.compile(
    r"(?:\b(?:"
    r"(?:GeForce\s+|Quadro\s+)?(?:RTX|GTX)\s*(?:PRO\s+)?A?\d{3,4}\w?|"
    r"(?:Radeon\s+)?RX\s*\d{3,4}\w*|MI\s?\d{2,3}[A-Z]{0,2}|GH?B?\d{3}|"
    r"[ABHPV](?!(?:16|32|64|128|256|512|1024)\b)\d{2,4}[A-Z]{0,2}|[LT]4|L40S?|GB10|"
    r"Gaudi(?:\s*\d)?|TPU(?:\s*v?\d\w*)?s?|Titan(?:\s+\w+)?|Jetson(?:\s+\w+)?|Orin|Thor|DGX(?:\s+\w+)?|M\d\s+(?:Max|Pro|Ultra)"
    r")" + _SUFFIX + r")"
    r"|\b(?:AMD|Intel|Apple|Radeon|Instinct|Quadro|Blackwell|Hopper|Ampere|Turing|Volta|Pascal|Ada(?:\s+Lovelace)?)\b"
    r"(?!\s+(?:GPU\s+)?(?:of|in)\s+the\s+claim)"
    r"|\bsm_?\d{2,3}a?\b"
    r"|\b(?:every|any|all|each|most|other|many|several|both|modern|consumer|two|three|four|eight|\d+)\s+(?:\w+\s+)?"
    r"(?:GPUs?|cards?|accelerators?|nodes?)\b|\bmulti-?node\b"
    r"|\bCPUs?\b"
)

# Behind these words stands what something is compared with.
COMPARED = _compile(
    r"(?<!more )(?<!less )(?<!fewer )(?<!other )(?<!rather )\bthan\b",
    r"(?:more|less|fewer)\s+than\b(?!\s+(?:\d|twice|thrice|half|double|an?\b|one\b|two\b|three\b|four\b|five\b|ten\b))",
    r"\b(?:compared\s+(?:to|with)|relative\s+to|versus|vs\.|against)",
    r"\bas\s+(?:fast|quick|long|quickly|well)\s+as\b",
    r"\b(?:beat|outperform|outpac|outrun|outstrip|surpass|outclass|overtak|trounc|crush)\w*\b",
    r"\btimes\s+(?:the\s+)?(?:rate|speed|throughput|performance)\s+of\b",
)
# Where such a name ends.
STOPS = _set(
    "in on at by for with when while if that which who is are was were does do did can has have as from to up where",
    "because so but than under across over through during after per only there takes needs runs even serves serve yet",
    "still already",
)
# Words of such a name that add nothing to it.
GENERIC = _set(
    "the a an its it their them those these of and or s fastest thriftiest best slowest rival rivals baseline",
    "baselines one ones same kernel kernels call calls time speed implementation ours us",
)
OF_MAKER = _set("pytorch torch nvidia cuda backend backends default plain own library function attention")

FORMATS = _compile(
    r"\b(?:nv|mx)?fp(?:4|6|8|16|32|64)(?:_e\dm\d)?\b",
    r"\b(?:bf16|tf32|int4|int8|uint8|e4m3|e5m2|float16|float32|float64|bfloat16|float8|float4)\b",
    r"\b(?:half|single|double)\s+precision\b",
)

# Dimension letters and what is counted -> what the keys of problems that hold it have in their names.
UNITS: Mapping[str, str] = {
    "B": "batch",
    "H": "heads",
    "HK": "heads_kv",
    "D": "head_dim",
    "DV": "head_dim_v",
    "S": "seqlen",
    "Sq": "seqlen_q",
    "Sk": "seqlen_k",
    "k": "seqlen",
    "keys": "seqlen_k",
    "queries": "seqlen_q",
    "positions": "seqlen",
    "sequences": "batch",
}

# What other kernels do. A claim is about such work only where its own names or problems say so.
OTHER_WORK = _compile(
    r"\bbackwards?(?:\s+pass)?\b",
    r"\bgradients?\b",
    r"\btrain(?:s|ed|ing)\b",
    r"\bfine-?tun\w+\b",
    r"\bMoE\b",
    r"\bmixtures?[\s-]+of[\s-]+experts?\b",
    r"\bexperts?\b",
    r"\bdecod(?:e|es|ing)\b",
    r"\bprefill\w*\b",
    r"\bpaged\b",
    r"\bKV[\s-]cache\w*\b",
    r"\bcache[sd]?\s+attention\b",
    r"\b(?:varlen|variable[\s-]+lengths?|ragged)\b",
    r"\bsliding[\s-]+window\b",
    r"\bspars(?:e|ity)\b",
    r"\bquanti[sz]\w+\b",
    r"\binference\b",
    r"\bserving\b",
    r"\btoken\s+generation\b",
    r"\bLLMs?\b",
    r"\btransformers?\b",
    r"\bGEMMs?\b",
    r"\bmatmuls?\b",
    r"\bconvolutions?\b",
    r"\b(?:RMS|Layer|Batch|Group)Norm\b",
    r"\bnormali[sz]ation\b",
    r"\bsoftmax\b",
    r"\bRoPE\b",
    r"\brotary\b",
    r"\bembeddings?\b",
    r"\boptimi[sz]er\b",
    r"\ball-?reduce\b",
    r"\bmulti-?GPU\b",
    r"\btensor[\s-]+parallel\w*\b",
    r"\bdistributed\b",
)
# "Our new kernel" is no kernel of something else.
PLAIN_KERNELS = _set(
    "new own fast faster fastest fused whole same single short portable custom tuned hand-written handwritten naive",
    "simple optimized optimised triton cuda gluon python gpu two three several other promised compiled first second",
    "real",
)
