"""The verbs of ``flashmoe``: what each takes, and what its help teaches.

What they do is in ``proving.py`` and ``looking.py``. These take long to import, so each verb imports what it needs, and
``flashmoe --help`` answers at once.
"""

# ruff: noqa: D301 - the character \b in a docstring tells typer to keep the lines of a paragraph apart

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperGroup

from .. import __version__
from . import claiming, compare_verbs, cost_verbs, diagnose_verbs, keeping, linting, report_verbs, study_verbs
from .options import Csv, Json, Junit, Metric, StoreName, given, split

_ORDER = (
    *("prove", "compare", "diagnose", "history", "verify", "claim", "lint", "show", "report", "runs", "import"),
    *("export", "cost", "explain", "doctor", "study", "suites", "baselines", "readme"),
)


class _Verbs(TyperGroup):
    """Lists the verbs as docs/reference/cli.md does: typer lists groups, such as ``claim``, behind all others."""

    def list_commands(self, ctx: Any) -> list[str]:  # Any: click, or the one within typer
        return sorted(super().list_commands(ctx), key=_ORDER.index)


app = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    rich_markup_mode=None,  # plain text, as wide as the terminal and the same in a file
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

app.add_typer(claiming.app, name="claim", short_help="Write a claim from a run.")
app.add_typer(report_verbs.app)
app.add_typer(keeping.app)
app.add_typer(cost_verbs.app, name="cost", short_help="Say what runs have cost.")
app.command(short_help="Find figures in Markdown that name no claim.")(linting.lint)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashmoe {__version__}")
        raise typer.Exit


@app.callback()
def flashmoe(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Prove what a GPU kernel does, and how fast it is.

    \b
    Start here:
      flashmoe prove                  the whole chain for flash_attention, on this machine
      flashmoe prove my_kernel.toml   the same chain for yours
      flashmoe verify                 what this repository claims, and what of it is shown
      flashmoe doctor                 what this machine lacks

    \b
    Exit codes:
      0  everything asked for holds        3  a gate failed
      1  a claim is refuted                4  inconclusive, or nothing was measured
      2  wrong usage                       130  interrupted
    """


@app.command(short_help="Take a kernel from its sources to a verdict.")
def prove(
    context: typer.Context,
    subject: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="SUBJECT", help="One of ours, or a kernel.toml.", show_default="flash_attention"),
    ] = None,
    suite: Annotated[str, typer.Option("--suite", "-s", metavar="SUITE", help="A packaged suite, or a file.")] = "seed",
    baseline: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--baseline", "-b", metavar="NAME", help="A baseline; repeat it for more. Default: the operator's."
        ),
    ] = None,
    gpu: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--gpu", metavar="NAME", help="Compile for this GPU, e.g. L4; repeat it. Default: every kind."),
    ] = None,
    until: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--until", metavar="GATE", help="The last gate to run, e.g. correct."),
    ] = None,
    expect: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--expect", metavar="X", min=0, help="Speedup expected over the first baseline."),
    ] = None,
    metric: Annotated[
        Optional[list[Metric]],  # noqa: UP045
        typer.Option("--time", metavar="KIND", help="Take only kernel, graph or wall time; repeat it. Default: all."),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Worker processes that measure. A claim needs 3.")
    ] = 3,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Rounds in each process. A claim needs 30 in all.")
    ] = 10,
    width: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--width",
            metavar="SHARE",
            min=0,
            help="Where an interval is wider to either side, measure in as many processes again; e.g. 0.02.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Seed of inputs and orders.", show_default="drawn")
    ] = None,
    resume: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--resume", metavar="RUN", help="Go on with an interrupted run; what is not given is as it was."),
    ] = None,
    budget: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--budget", metavar="DOLLARS", min=0, help="Stop before the gate that would pass it, or in it."),
    ] = None,
    time_limit: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--time-limit", metavar="SECONDS", min=0, help="Longest silence of a worker. Default: [limits] of the file."
        ),
    ] = None,
    store: StoreName = None,
    host: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--host", metavar="USER@MACHINE", help="Run on this machine, over SSH; repeat it for several."),
    ] = None,
    python: Annotated[
        str, typer.Option("--python", metavar="PATH", help="Python of that machine, with torch and triton.")
    ] = "",
    as_json: Json = False,
    csv: Csv = None,
    junit: Junit = None,
) -> None:
    """Take a kernel through the chain of proof: sources, build, import, launch, correct, quick, bench.

    Stops at the first gate that fails. Writes a record to evidence/ of this repository (or folder) and to the store.
    With no GPU it shows what can be shown here, and ends with the verdicts of `flashmoe verify`.

    \b
    Examples:
      flashmoe prove
      flashmoe prove my_kernel.toml --expect 1.7
      flashmoe prove --suite standard --baseline sdpa --baseline sdpa-flash
      flashmoe prove my_kernel.toml --until correct --json
      flashmoe prove kernels/*.toml
      flashmoe prove --resume 20261120T235959Z
      flashmoe prove my_kernel.toml --host me@rented-h200 --host me@rented-l4

    \b
    Exit codes:
      0  every gate passed that is possible here, and its claims hold
      1  a claim is refuted            3  a gate failed
      2  wrong usage                   4  inconclusive
    Of several subjects the worst: 3, then 1, then 4.
    """
    from .proving import Wanted, run_prove

    wanted = Wanted(
        subjects=subject or ["flash_attention"],
        suite=suite,
        baselines=split(baseline),
        gpus=split(gpu),
        until=until,
        expect=expect,
        times=[m.value for m in metric or ()],
        processes=processes,
        rounds=rounds,
        width=width,
        seed=seed,
        budget=budget,
        time_limit=time_limit,
        store=store,
        args=context.obj or [],
        resume=resume,
        hosts=split(host),
        python=python,
        given=given(context),
    )
    raise typer.Exit(run_prove(wanted, csv=csv, junit=junit, as_json=as_json))


app.command(short_help="Compare two revisions, or two runs.")(compare_verbs.compare)
app.command(short_help="Find where a subject became faster or slower.")(compare_verbs.history)
app.command(short_help="Say why a kernel is slow.")(diagnose_verbs.diagnose)


@app.command(short_help="Judge every claim of this repository.")
def verify(
    why: Annotated[bool, typer.Option("--why", help="Give the reason of every verdict, also of good ones.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="A stale claim does not hold: 4, and not 0, where one is.")
    ] = False,
    as_json: Json = False,
    junit: Junit = None,
) -> None:
    """Judge every claim in claims/ by the records in evidence/. Needs no GPU.

    One line a claim: verdict, sentence, the figure with its 95 % interval, the run that shows it. A claim is
    stale when what it measured has changed since the run that demonstrates it: sources of its subject, unless
    it is about device time and the GPU runs the same. Then one line for every study in evidence/studies/,
    worked out anew from its samples.

    \b
    Examples:
      flashmoe verify
      flashmoe verify --strict
      flashmoe verify --json | jq '.verdicts[] | {id: .claim.id, status}'

    \b
    Exit codes:
      0  all hold (or are stale)       3  a gate failed in the run that should show one
      1  one is refuted                4  one is inconclusive, invalid, without evidence,
      2  wrong usage                      or stale under --strict; or there is no claim;
                                          or a study shows that comparisons are not to be trusted
    """
    from .looking import run_verify

    raise typer.Exit(run_verify(why=why, strict=strict, junit=junit, as_json=as_json))


@app.command(short_help="Show a run again.")
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The id of a run, the beginning of one, or a JSON file.")],
    metric: Annotated[
        Optional[Metric],  # noqa: UP045
        typer.Option("--time", metavar="KIND", help="Show speedups of kernel, graph or wall time. Default: graph."),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show the peak bytes that a call allocates, in place of times.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also the details of every gate, and the kernels that ran.")
    ] = False,
    store: StoreName = None,
    as_json: Json = False,
    csv: Csv = None,
) -> None:
    """Show a run from the store or from evidence/: its gates, its times, its verdict. Or a study, by its file.

    \b
    Examples:
      flashmoe show 20261120
      flashmoe show evidence/20261120T235959Z-seed-flash_attention-1a2b3c.json.gz --verbose
      flashmoe show 20261120 --time wall
      flashmoe show 20261120 --csv times.csv

    \b
    Exit codes:
      0  shown    2  there is no such run, or it cannot be read
    """
    from .looking import run_show

    kind = metric.value if metric else None
    raise typer.Exit(run_show(run, kind=kind, memory=memory, verbose=verbose, csv=csv, store=store, as_json=as_json))


@app.command(short_help="List the runs that are kept here.")
def runs(
    subject: Annotated[str, typer.Option(metavar="NAME", help="Only runs of this subject.")] = "",
    suite: Annotated[str, typer.Option(metavar="NAME", help="Only runs of this suite.")] = "",
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Only runs on a GPU with this in its name.")] = "",
    since: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="DATE", help="Only runs since this date (UTC), or since 7d, 12h or 2w ago."),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="At most this many, newest first; 0 for all.")] = 20,
    store: StoreName = None,
    as_json: Json = False,
) -> None:
    """List the runs in the store and in evidence/ of this repository, newest first.

    The store is the folder ~/.local/share/flashmoe/runs, or the one that --store or FLASHMOE_STORE names.

    \b
    Examples:
      flashmoe runs --gpu H200 --suite seed
      flashmoe runs --since 7d --store ~/runs

    \b
    Exit codes:
      0  listed    2  the store cannot be read
    """
    from .looking import run_runs

    raise typer.Exit(
        run_runs(subject=subject, suite=suite, gpu=gpu, since=since, limit=limit, store=store, as_json=as_json)
    )


@app.command(short_help="Say which kernel would serve a call, on any GPU.")
def explain(
    shape: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="B,H,S,D", help="Attention: batch, heads, positions, head size."),
    ] = None,
    experts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="T,E,K,H,I", help="Experts: tokens, experts, top_k, hidden and inner size."),
    ] = None,
    activation: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="Of experts. Default: swiglu."),
    ] = None,
    kv_heads: Annotated[Optional[int], typer.Option(min=1, metavar="N", help="Default: H.")] = None,  # noqa: UP045
    seqlen_k: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, metavar="N", help="Default: S. With --cache what it has room for, a sequence."),
    ] = None,
    head_dim_v: Annotated[Optional[int], typer.Option(min=1, metavar="N", help="Default: D.")] = None,  # noqa: UP045
    dtype: Annotated[str, typer.Option(metavar="NAME", help="fp16, bf16 or fp32.")] = "fp16",
    causal: Annotated[bool, typer.Option("--causal", help="With a causal mask, aligned bottom-right.")] = False,
    cache: Annotated[bool, typer.Option("--cache", help="With a K/V cache, and lengths on the device.")] = False,
    page_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, metavar="N", help="Of a cache: in pages of so many positions."),
    ] = None,
    mla: Annotated[bool, typer.Option("--mla", help="Of a cache: values are the first columns of the keys.")] = False,
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help="Of a cache.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Of the gradients instead.")] = False,
    gpu: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="e.g. L4, A100, H100, H200, B200. Default: the GPU of this machine."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which kernel would serve a call of attention or experts, with which tile and grid, and why. Needs no GPU.

    The kernel is compiled for that GPU: its registers, spills and shared memory are what the compiler says.

    \b
    Examples:
      flashmoe explain --shape 1,16,4096,128 --gpu L4
      flashmoe explain --shape 1,32,1,128 --kv-heads 8 --seqlen-k 8192 --gpu H200 --json
      flashmoe explain --shape 2,16,4096,128 --dtype bf16 --causal --backward --gpu H200
      flashmoe explain --shape 16,128,1,576 --cache --mla --page-size 64 --seqlen-k 8192 --dtype bf16 --gpu H200
      flashmoe explain --experts 8192,128,8,2048,768 --dtype bf16 --gpu H200

    \b
    Exit codes:
      0  explained    2  wrong usage, or no kernel serves this problem    3  the kernel breaks a limit
    """
    from .explaining import attention_call, cache_call, experts_call, run_explain

    if (shape is None) == (experts is None):
        raise typer.BadParameter("expected one of --shape, for attention, and --experts")
    of_cache = {"--page-size": page_size, "--mla": mla, "--batch-invariant": batch_invariant}
    if not cache and (wrong := [name for name, value in of_cache.items() if value]):
        raise typer.BadParameter(f"{' and '.join(wrong)}: of a cache, so --cache is needed")
    if cache and backward:
        raise typer.BadParameter("--backward: there are no gradients through a cache")
    if shape is not None:
        if activation is not None:
            raise typer.BadParameter("--activation is of --experts")
        more: dict[str, Any] = {"heads_kv": kv_heads, "seqlen_k": seqlen_k, "head_dim_v": head_dim_v, "dtype": dtype}
        more["causal"] = causal or None
        if cache:
            more |= {"page_size": page_size, "batch_invariant": batch_invariant or None}
        call = cache_call(shape, more, mla=mla) if cache else attention_call(shape, more)
    else:
        assert experts is not None
        of_attention = {
            "--kv-heads": kv_heads, "--seqlen-k": seqlen_k, "--head-dim-v": head_dim_v, "--causal": causal,
            "--cache": cache,
        }  # fmt: skip
        if wrong := [name for name, value in of_attention.items() if value]:
            raise typer.BadParameter(f"{' and '.join(wrong)}: of attention, which --shape describes")
        call = experts_call(experts, {"dtype": dtype, "activation": activation})
    raise typer.Exit(run_explain(call, gpu=gpu, backward=backward, as_json=as_json))


@app.command(short_help="Say what this machine has and lacks.")
def doctor(as_json: Json = False) -> None:
    """Check GPU, driver, torch, triton, nvcc, Nsight Compute, baselines and clocks; every trouble with a hint.

    \b
    Example:
      flashmoe doctor

    \b
    Exit codes:
      0  checked: a machine that lacks something is no error
    """
    from .looking import run_doctor

    raise typer.Exit(run_doctor(as_json=as_json))


app.command(short_help="See how often comparisons are wrong on this GPU.")(study_verbs.study)


@app.command(short_help="List the suites, or the cases of one.")
def suites(
    name: Annotated[Optional[str], typer.Argument(metavar="SUITE", help="A packaged suite, or a file.")] = None,  # noqa: UP045
    as_json: Json = False,
) -> None:
    """List the packaged suites, or the cases of one and where each comes from.

    \b
    Examples:
      flashmoe suites
      flashmoe suites seed

    \b
    Exit codes:
      0  listed    2  there is no such suite, or its file is wrong
    """
    from .looking import run_suites

    raise typer.Exit(run_suites(name, as_json=as_json))


@app.command(short_help="List the baselines, and which can run here.")
def baselines(
    operator: Annotated[str, typer.Option(metavar="NAME", help="Baselines of this operator.")] = "attention",
    as_json: Json = False,
) -> None:
    """List the baselines of an operator, each tried in a process of its own: its version, or why it cannot run here.

    \b
    Example:
      flashmoe baselines

    \b
    Exit codes:
      0  listed    2  there is no such operator
    """
    from .looking import run_baselines

    raise typer.Exit(run_baselines(operator, as_json=as_json))


@app.command(short_help="Write the tables of speeds into README.md and pages.")
def readme(
    paths: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Argument(
            metavar="FILE",
            help="Default: README.md of this repository, and the pages below docs/ that have marks.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; say whether the tables are current.")] = False,
    as_json: Json = False,
) -> None:
    """Write the tables of speeds, made from claims/ and evidence/, between two marks in README.md and other pages.

    \b
    Each mark is a line of its own:
      <!-- summary:begin -->   <!-- summary:end -->    a row for every run and kind of time that claims are about
      <!-- slower:begin -->    <!-- slower:end -->     a row for every suite in which a baseline is faster somewhere
      <!-- verdicts:begin -->  <!-- verdicts:end -->   a row for every claim
      <!-- cases:begin -->     <!-- cases:end -->      a row for every case, below a heading for each run and baseline

    \b
    Examples:
      flashmoe readme
      flashmoe readme --check
      flashmoe readme docs/results.md

    \b
    Exit codes:
      0  the tables are current    1  --check found one out of date    2  a file lacks the marks
    """
    from .looking import run_readme

    raise typer.Exit(run_readme(paths or [], check=check, as_json=as_json))
