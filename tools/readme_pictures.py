"""Write the two pictures of README.md into ``docs/pictures/``, from ``claims/`` and ``evidence/``.

``speedups-*.svg`` has a bar for each claim in ``BARS``; ``verdict-*.svg`` is what the terminal shows of the run behind
``SHOWN``. Each comes for light and for dark pages. A test compares them with what this program would write now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from flashmoe_science.proof.judge.judge import Verdict, VerdictStatus
from flashmoe_science.proof.judge.run_verdicts import conclude
from flashmoe_science.proof.records.evidence import Record
from flashmoe_science.proof.report.readme import Judged, judge_repository
from flashmoe_science.proof.report.terminal import case_table, gate_lines, verdict_lines

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"

BARS = (  # the label of a bar, and the claim about the geometric mean that it shows
    ("Attention, forward", "hopper-mean-h200"),
    ("Attention, backward", "hopper-backward-fastest-mean-h200"),
    ("Packed sequences", "varlen-mean-h200"),
    ("Decode, contiguous cache", "hopper-decode-fastest-mean-h200"),
    ("MoE, prefill", "moe-prefill-libraries-mean-h200"),
    ("MoE, decode", "moe-decode-fastest-mean-h200"),
    ("MoE, backward, no biases", "moe-train-mean-h200"),
)
SHOWN = "hopper-host-kernel-h200"  # its run is short enough for a picture
NAMES = {
    "sdpa-cudnn": "cuDNN",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "flashinfer": "FlashInfer",
    "liger": "Liger",
    "scattermoe": "ScatterMoE",
}

WIDTH, ROW, TOP, BOTTOM = 880, 46, 76, 40
LEFT, RIGHT = 356, 800  # of the axis
STEP = 0.5  # between two numbers on the axis
FONTS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
COLUMNS = 112  # of the terminal


@dataclass(frozen=True)
class Colours:
    """What differs between the picture for light pages and that for dark ones."""

    name: str
    text: str
    muted: str
    grid: str
    bar: str
    page: str  # behind the terminal
    terminal: str  # black, red, green, yellow, blue, magenta, cyan, white


LIGHT = Colours(
    "light", "#1f2328", "#59636e", "#d1d9e0", "#0969da", "#f6f8fa",
    "#24292f #cf222e #116329 #7d4e00 #0969da #8250df #1b7c83 #59636e",
)  # fmt: skip
DARK = Colours(
    "dark", "#f0f6fc", "#9198a1", "#3d444d", "#1f6feb", "#151b23",
    "#484f58 #ff7b72 #3fb950 #d29922 #58a6ff #bc8cff #39c5cf #b1bac4",
)  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """One row of the chart."""

    label: str
    baselines: str  # and how many cases
    mean: float
    lowest: float
    highest: float


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pictures(judge_repository(ROOT)):
        (FOLDER / name).write_text(text, encoding="utf-8")


def pictures(judged: Judged) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file."""
    verdicts = {verdict.claim.id: verdict for verdict in judged.verdicts}
    bars = [_bar(label, verdicts[claim], judged) for label, claim in BARS]
    record = judged.records[verdicts[SHOWN].evidence or ""]
    # `verify` compares the code too: what it does not say of a claim today is left out.
    shown = [one for one in conclude(record, ROOT, as_recorded=True) if verdicts[one.claim.id].status is one.status]
    for colours in (LIGHT, DARK):
        yield f"speedups-{colours.name}.svg", draw_bars(bars, colours)
        yield f"verdict-{colours.name}.svg", draw_terminal(record, shown, colours)


def _bar(label: str, verdict: Verdict, judged: Judged) -> Bar:
    found = [case.interval.estimate for case in verdict.cases if case.interval]
    if verdict.geometric_mean is None or not found:
        raise SystemExit(f"{verdict.claim.id} has no geometric mean: {verdict.reason}")
    held = len(judged.records[verdict.evidence or ""].cases)
    cases = f"{held} cases" if held == len(found) else f"{len(found)} of {held} cases"
    status = "" if verdict.status is VerdictStatus.DEMONSTRATED else f"; {verdict.status.value}"
    names = ", ".join(NAMES.get(name, name) for name in verdict.claim.baseline)
    return Bar(label, f"{names}; {cases}{status}", verdict.geometric_mean.estimate, min(found), max(found))


def draw_bars(rows: Sequence[Bar], colours: Colours) -> str:
    """Return the chart: for each bar its geometric mean, and a line from the slowest case to the fastest."""
    end = max(row.highest for row in rows) + 0.1
    height = TOP + ROW * len(rows) + BOTTOM
    claims = ", ".join(claim for _, claim in BARS)

    def at(speedup: float) -> float:
        return LEFT + (RIGHT - LEFT) * speedup / end

    foot = TOP + ROW * len(rows)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    note = "NVIDIA H200, bf16, kernel time. Bar: geometric mean. Line: slowest to fastest case."
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONTS}">',
        "<title>Speedup over the fastest baseline</title>",
        f"<desc>Claims: {claims}</desc>",
        _text(16, 26, "Speedup over the fastest baseline of each case", colours.text, size=18, weight=600),
        _text(16, 48, note, colours.muted),
    ]
    for number in range(int(end / STEP) + 1):
        tick = number * STEP
        lines.append(_line(at(tick), TOP, at(tick), foot, colours.grid))
        lines.append(_text(at(tick), foot + 18, f"{tick:g}x" if tick else "0", colours.muted, anchor="middle"))
    for number, row in enumerate(rows):
        middle = TOP + ROW * (number + 0.5)
        lines += [
            _text(16, middle - 4, row.label, colours.text, size=15, weight=600),
            _text(16, middle + 13, row.baselines, colours.muted, size=12),
            _rectangle(at(0), middle - 11, at(row.mean) - at(0), 22, colours.bar),
            _line(at(row.lowest), middle, at(row.highest), middle, colours.text, width=1.5),
            *(_line(at(x), middle - 5, at(x), middle + 5, colours.text, width=1.5) for x in (row.lowest, row.highest)),
            _text(WIDTH - 16, middle + 6, f"{row.mean:.2f}x", colours.text, size=17, weight=600, anchor="end"),
        ]
    lines += [
        _line(at(1), TOP - 4, at(1), foot, colours.text, width=2),
        _text(at(1), TOP - 9, "fastest baseline", colours.text, size=12, anchor="middle"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _text(x: float, y: float, text: str, fill: str, *, size: int = 13, weight: int = 400, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{fill}">{escape(text)}</text>'
    )


def _rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{fill}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, *, width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width:g}"/>'


# rich's own format without its window and without a font from the network.
_TERMINAL = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<title>Gates, times and verdicts of one run</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
{lines}
</defs>
<rect width="{width}" height="{height}" rx="10" fill="PAGE"/>
<g transform="translate({terminal_x}, 16)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def draw_terminal(record: Record, verdicts: Sequence[Verdict], colours: Colours) -> str:
    """Return what ``flashmoe show`` prints of a run: its gates, times and verdicts."""
    with Path("/dev/null").open("w", encoding="utf-8") as nowhere:
        console = Console(
            record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor",
            highlight=False, markup=False, emoji=False, legacy_windows=False,
        )  # fmt: skip
        console.print(*(gate_lines(gate) for gate in record.gates), "", case_table(record), "", sep="\n")
        for verdict in verdicts:
            console.print(verdict_lines(verdict))
    theme = TerminalTheme(_rgb(colours.page), _rgb(colours.text), [_rgb(one) for one in colours.terminal.split()])
    code = _TERMINAL.replace("PAGE", colours.page)
    return console.export_svg(theme=theme, code_format=code, unique_id="verdict")


def _rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour[1:])
    return red, green, blue


if __name__ == "__main__":
    main()
