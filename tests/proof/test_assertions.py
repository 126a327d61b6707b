"""Sentences that assert a speed or a saving are found with their figure, and those that do not are left alone."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from flashmoe_science.proof.assertions import find_assertions

SPEEDUPS = [
    ("Our kernel is 1.7x faster than SDPA.", 1.7),
    ("It is 1.7 x faster.", 1.7),
    ("It runs 1.7× faster.", 1.7),
    ("A 2x speedup over the baseline.", 2),
    ("We saw a 2.5x speed-up.", 2.5),
    ("It is twice as fast.", 2),
    ("It is at least twice as fast as eager PyTorch.", 2),
    ("Three times as fast.", 3),
    ("It is 3 times faster.", 3),
    ("Ten-fold faster decoding.", 10),
    ("30 % faster", 1.3),
    ("30% faster", 1.3),
    ("Thirty kernels, 30 percent higher throughput.", 1.3),
    ("It takes 50 % less time.", 2),
    ("It has 20% lower latency.", 1.25),
    ("It takes at most two thirds of the wall time.", 1.5),
    ("Half the latency of cuDNN.", 2),
    ("It doubles the throughput.", 2),
    ("Twice the speed of the old one.", 2),
    ("A speedup of 3.2x in training.", 3.2),
    ("speedup: 4x", 4),
    ("It speeds attention up by 40 %.", 1.4),
    ("It cuts the latency by 50 %.", 2),
    ("It halves the latency.", 2),
    ("Its kernel time was halved: it halved the kernel time.", 2),
    ("It cuts run time in half.", 2),
    ("Latency drops by 50 %.", 2),
    ("The wall time is reduced by about 20%.", 1.25),
    ("Latency is 20 % lower than with cuDNN.", 1.25),
    ("It reduces end-to-end run time by 20 percent.", 1.25),
    ("It outperforms FlashAttention by 1.4x.", 1.4),
    ("It outperforms cuDNN.", 1),
    ("Our kernel is faster than cuDNN.", 1),
    ("It is consistently faster than SDPA.", 1),
    ("It is the fastest kernel there is.", 1),
    ("It is an order of magnitude faster.", 10),
    ("At S = 512 the speed is 0.12x.", 0.12),
    ("It was measured at 0.12x of SDPA.", 0.12),
    ("Up to 1,000x faster.", 1000),
    ("Between 2x and 3x faster.", 3),
    ("1.5-3x faster", 3),
    ("Fast: 2x.", 2),
    ("1.7x faster, expected.", 1.7),
    ("1.7x, expected.", 1.7),
    ("Attention: 1.7x as announced.", 1.7),
    ("It is not only 1.7x faster, it is smaller too.", 1.7),
    ("Not just twice as fast.", 2),
    ("A speedup of 1.7.", 1.7),
    ("The speedup is 1.7 on average.", 1.7),
    ("speedup: 2.25", 2.25),
    ("It beats SDPA by 2x.", 2),
    ("It beats all that we know of by up to 40 %.", 1.4),
    ("It beats cuDNN.", 1),
    ("It is 3x better.", 3),
    ("It may be up to 2x faster.", 2),
    ("If you use fp16, it is 3x faster.", 3),
    ("It improves performance by 30%.", 1.3),
    ("It improved the throughput of decoding by 30 %.", 1.3),
    ("Throughput increases by 2x.", 2),
    ("It is faster by a factor of three.", 3),
    ("It outperforms cuDNN by a factor of 3.", 3),
    ("It cuts latency by a factor of 1.5.", 1.5),
    ("It needs only 60% of SDPA's time.", 1 / 0.6),
    ("It takes 60 % of the wall time.", 1 / 0.6),
    ("SDPA takes 1.7x as long.", 1.7),
    ("SDPA is 1.7 times slower.", 1.7),
    ("cuDNN needs twice the time.", 2),
    ("1.7x SDPA.", 1.7),
    ("We reach 1.7x FlashAttention-3 on it.", 1.7),
    ("Ours is 1.7x SDPA's speed.", 1.7),
    ("Twice SDPA's speed.", 2),
    ("It outpaces cuDNN by 30 percent.", 1.3),
    ("It surpasses cuDNN.", 1),
    ("It outruns cuDNN by 2x.", 2),
    ("ours vs SDPA | 1.70x", 1.7),
    ("It takes a third less time.", 1.5),
    ("It saves 20 % of the time.", 1.25),
    ("It takes operations at 0.92 times the rate of a matrix product.", 0.92),
    ("Fifty times as fast.", 50),
]


@pytest.mark.parametrize(("sentence", "figure"), SPEEDUPS, ids=[sentence for sentence, _ in SPEEDUPS])
def test_a_speedup_is_found_with_its_figure(sentence, figure):
    figures = [found.figure for found in find_assertions(sentence) if found.kind == "speedup"]
    assert figures
    assert max(figures) == pytest.approx(figure)


OTHERS = [
    ("It needs 30 % less memory.", "memory", 1 / 0.7),
    ("It uses half the memory.", "memory", 2),
    ("This halves peak memory.", "memory", 2),
    ("It needs 2x less peak memory.", "memory", 2),
    ("Memory savings of any kind: 40 % memory savings.", "memory", 1 / 0.6),
    ("It reduces peak memory by 4x.", "memory", 4),
    ("It saves 12 GB of memory.", "bytes", 12),
    ("It has 12 GB less memory.", "bytes", 12),
    ("Peak memory drops by 40 %.", "memory", 1 / 0.6),
    ("Its memory use falls by 40 %.", "memory", 1 / 0.6),
    ("It needs at most 67 % of the peak memory of SDPA.", "memory", 100 / 67),
    ("It cuts peak memory in half.", "memory", 2),
    ("It needs less memory than SDPA.", "memory", 1),
    ("It needs a third less memory.", "memory", 1.5),
    ("It reduces memory by a factor of four.", "memory", 4),
    ("It needs twice the memory.", "more memory", 2),
    ("It takes 20 % more memory.", "more memory", 20),
    ("It is slower than cuDNN.", "slowdown", 1),
    ("It is slower by a factor of two.", "slowdown", 2),
    ("It takes 1.7x as long.", "slowdown", 1.7),
    ("It is 3x slower.", "slowdown", 3),
    ("Half as fast as cuDNN.", "slowdown", 0.5),
    ("Half the throughput of cuDNN.", "slowdown", 0.5),
    ("It takes twice the time.", "slowdown", 2),
    ("It reaches 740 TFLOP/s.", "TFLOP/s", 740),
    ("740 TFLOPS", "TFLOP/s", 740),
    ("1.2 PFLOPS", "TFLOP/s", 1200),
    ("It copies at 3,900 GB/s.", "TB/s", 3.9),
    ("It moves 4.1 TB/s.", "TB/s", 4.1),
    ("It decodes 120 tokens per second.", "rate", 120),
    ("It decodes 55.7k tokens/s.", "rate", 55.7),
]


@pytest.mark.parametrize(("sentence", "kind", "figure"), OTHERS, ids=[sentence for sentence, *_ in OTHERS])
def test_memory_rates_and_what_is_slower_are_found(sentence, kind, figure):
    (found,) = find_assertions(sentence)
    assert found.kind == kind
    assert found.figure == pytest.approx(figure)


@pytest.mark.parametrize(
    "sentence",
    [
        "The kernel is fast.",
        "It is not 1.7x faster.",
        "A speedup of none.",
        "The speedup is measured in 30 rounds.",
        "An interval of the speedup at 95 %.",
        "Nothing beats a look at the source.",
        "The matrix is 2x, and expected to grow.",
        "Each case is timed 30 times in 3 processes.",
        "A grid of 128x128x128 tiles.",
        "The matrix is 4x4.",
        "A cluster of 2x1x1 blocks is fast.",
        "It runs in rounds, 10 in each process, for a fast answer.",
        "An error within 2x the error of the eager run is fast to check.",
        "The set is 2x its size, so that a fast cache does not hold it.",
        "faster, slower, same or undecided",
        "Outside of 0.5 to 2 times of what was expected: stop.",
        "Faster than the roofline allows is impossible.",
        "No call is faster than the hardware allows.",
        "Nothing is 2x faster for free.",
        "A run is invalid if the copy is 2x faster.",
        "It tells whether the kernel is 3x faster.",
        "Is it 2x faster?",
        "At a spread of 1 % a slowdown of 3 % is seen.",
        "the interval of its speedup at 95 %",
        "13 cases with fp16 on 2 GPUs",
        "The factor is how many times as fast at least.",
        "Shared memory of 160 KB a block does not fit.",
        "It takes 3 s to compile, and half an hour to tune.",
        "Bandwidth is what bounds it.",
        "A capture of 20 calls, the median of 5 replays.",
        "H200 x2",
        "The first version was 1.2.3x.",
        "Half of the cases are open.",
        "Two thirds of all lines are tests.",
        "A budget of twice the error that PyTorch makes.",
        "times two",
        "Two GPUs: 2x RTX cards, 8x NVL.",
        "Time grows by a factor of four with S.",
        "It says which one is faster or slower.",
        "95 % of SDPA's calls are short.",
        "It says whether one revision, or one run, is faster than another.",
        "A call whose kernels take a quarter of its wall time.",
        "At least half of the throughput must be idle.",
        "",
    ],
)
def test_ordinary_prose_is_left_alone(sentence):
    assert find_assertions(sentence) == []


def test_a_bare_figure_counts_under_a_header_about_speed():
    assert find_assertions("b1_h1 | 2.12x") == []
    assert [found.figure for found in find_assertions("b1_h1 | 2.12x", "case | speedup")] == [2.12]


def test_one_place_is_one_assertion():
    (found,) = find_assertions("It is 2x faster, that is what we measured.")
    assert (found.words, found.start) == ("2x faster", 6)


@given(
    st.floats(1.01, 999).map(lambda value: f"{value:.3g}"),
    st.sampled_from(["{}x faster", "{} times faster", "a {}x speedup", "{}× as fast", "speedup of {}x"]),
    st.sampled_from(["", "Our kernel is ", "On an H200, with fp16 inputs, we measured it at ", "up to "]),
    st.sampled_from([".", " than SDPA.", " on every shape", ", on 8 GPUs with 128 heads of size 64"]),
)
def test_a_figure_is_found_whatever_stands_around_it(number, words, before, after):
    (found,) = find_assertions(f"{before}{words.format(number)}{after}")
    assert found.kind == "speedup"
    assert found.figure == pytest.approx(float(number))


@given(st.text(max_size=80))
def test_any_text_is_read(text):
    for found in find_assertions(text):
        assert 0 <= found.start < len(text)
