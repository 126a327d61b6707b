"""A sentence is held against the keys of its claim: what it says beyond them is found, with the words at fault."""

from __future__ import annotations

import pytest

from flashmoe_science.errors import ClaimError
from flashmoe_science.proof.evidence import write_record
from flashmoe_science.proof.judge import VerdictStatus
from flashmoe_science.proof.new_claim import Wish, make_claims
from flashmoe_science.proof.operator import load_operator
from flashmoe_science.proof.subject import BUILTIN_OPERATORS
from flashmoe_science.proof.verify import verify_claims
from flashmoe_science.proof.wording import joined, overstatement, own_rival_names, shown_by

from .builders import L4, build_record
from .claim_builders import build_claim, claim_toml, suite_toml


def faults(sentence, *, record=None, **keys):
    record = record or build_record(speedups=[2.3, 3.0])
    said = overstatement(shown_by(build_claim(sentence=sentence, **keys), record))
    return said.removeprefix("the sentence says more than the claim's keys: ")


def test_one_rival_of_several_operators_has_the_names_of_all():
    found = joined([{"sdpa": ("sdpa", "SDPA"), "other": ("other",)}, {"sdpa": ("sdpa", "gathered SDPA")}])
    assert found == {"sdpa": ("sdpa", "SDPA", "gathered SDPA"), "other": ("other",)}
    for operator in BUILTIN_OPERATORS:
        for name, rival in load_operator(operator).rivals().items():
            assert {name, *getattr(rival, "also_called", ())} <= set(own_rival_names()[name])


def test_eager_calls_are_wall_time_where_a_rival_is_called_eager():
    rivals = {"sdpa": ("sdpa",), "eager": ("eager",)}

    def faults_beside(sentence):
        claim = build_claim(sentence=sentence, metric="wall")
        return overstatement(shown_by(claim, build_record(speedups=[2.3, 3.0]), rivals))

    assert faults_beside("It is 2x faster in eager calls.") == ""
    assert faults_beside("It is 2x faster. So it says of eager.").endswith("baseline is sdpa, not 'eager'")


FINE = [
    "It is twice as fast.",
    "On an H200 it is at least 2 times as fast as SDPA in each case, in a CUDA graph.",
    "flash_attention, replayed in a CUDA graph, takes at most half the time of PyTorch's scaled_dot_product_attention.",
    "On an NVIDIA H200, in each of the 2 cases of suite seed, fp16, at D 64 and S = 512, twice as fast as SDPA.",
    "On every shape of the suite it is 1.9x faster than PyTorch's SDPA.",
    "In both of the two cases it is twice as fast as sdpa, with no causal mask.",
    "More than twice as fast as SDPA; less than half the time.",
    "Our fused kernel is 2x faster than the baseline.",
    "SDPA takes twice as long.",
    "SDPA is 2x slower than ours, and than flash_attention.",
    "Compared with SDPA it is 2x faster.",
    "It outperforms SDPA by 2x.",
    "It runs at 1.5 times the rate of SDPA.",
    "SDPA is at most 2x slower.",  # at most: that says less
]


@pytest.mark.parametrize("sentence", FINE)
def test_a_sentence_that_says_what_its_keys_say_is_fine(sentence):
    assert faults(sentence) == ""


FIGURES = ["50x faster", "3 times as fast", "fifty times as fast", "Sixty per cent less time", "2.01x", "150 % faster"]
GPUS = [
    *("an L4", "every GPU", "any GPU", "all GPUs", "RTX 3090", "MI300X", "an A100", "H100 NVL", "B200", "Hopper"),
    *("Blackwell", "V100", "T4", "GH200", "L40S", "AMD", "8 GPUs", "TPU", "Gaudi 3", "GTX 1080 Ti", "a CPU", "sm_90"),
    *("consumer cards", "multi-node"),
]
RIVALS = [
    *("than TensorRT", "than FlashAttention-3", "than cuDNN", "than any rival", "than everything else", "than triton"),
    *("than FlashInfer", "than SDPA and FlashInfer", "than eager PyTorch", "than our old kernel", "over xFormers"),
    *(
        "compared with Triton",
        "against xformers",
        "than before",
        "than the fastest of SDPA and TensorRT",
        "than FlashAttention",
        "than flex",
    ),
]
METRICS = [
    "by wall time",
    "in eager calls",
    "in kernel time",
    "end-to-end",
    "by the time of its kernels",
    "from Python",
]
SCOPES = ["on every shape", "always", "in all 36 cases", "across the board", "for any length", "whatever the shape"]
WORK = [
    *(
        "in the backward pass",
        "with its gradients",
        "in MoE layers",
        "in training",
        "when decoding",
        "in fp8",
        "in bf16",
    ),
    *(
        "at 128k keys",
        "at D 128",
        "with 32 heads",
        "with a causal mask",
        "with a paged KV cache",
        "for variable lengths",
    ),
    *(
        "in our convolution kernel",
        "with its sparse kernel",
        "for quantized inputs",
        "as `forward_triton`",
        "by my_gelu",
    ),
]


@pytest.mark.parametrize("words", FIGURES)
def test_a_larger_figure_is_found(words):
    assert faults(f"It is {words}.").startswith(f"factor is 2, not '{words}")


@pytest.mark.parametrize(
    "words", ["30 % less memory", "twice the memory", "12 GB less memory", "3x slower", "700 TB/s"]
)
def test_a_figure_of_something_else_is_found(words):
    assert "not '" in faults(f"It is twice as fast, and has {words}.")


def test_no_figure_is_too_odd_to_be_held_against_the_factor():
    assert faults("It has 99 % of them, at an interval of 95 % confidence.") == "factor is 2, not '99 %'"
    assert faults("Nothing is 50x faster.") == "factor is 2, not '50x faster'"  # a claim supposes and denies nothing


@pytest.mark.parametrize("words", GPUS)
def test_another_gpu_is_found(words):
    said = faults(f"On {words} it is twice as fast.")
    assert said.startswith("gpu is H200, not '")
    assert said.split("'")[1] in words


@pytest.mark.parametrize("words", RIVALS)
def test_another_rival_is_found(words):
    assert "baseline is sdpa, not '" in faults(f"It is 2x faster {words}.")


@pytest.mark.parametrize(
    "sentence", ["It beats TensorRT by 2x.", "TensorRT takes twice as long.", "2x TensorRT.", "It is the fastest."]
)
def test_another_rival_is_found_wherever_it_stands(sentence):
    assert "baseline is sdpa, not '" in faults(sentence)


@pytest.mark.parametrize("words", METRICS)
def test_another_metric_is_found(words):
    assert faults(f"It is 2x faster {words}.").startswith("metric is graph, not '")


@pytest.mark.parametrize("metric", ["kernel", "graph", "wall"])
def test_each_metric_has_its_words(metric):
    said = {"kernel": "in kernel time", "graph": "in a CUDA graph", "wall": "by wall time"}
    assert {kind for kind, words in said.items() if not faults(f"2x faster {words}.", metric=metric)} == {metric}


@pytest.mark.parametrize("words", SCOPES)
def test_more_than_the_cases_of_the_suite_is_found(words):
    assert "not '" in faults(f"It is 2x faster {words}.")


@pytest.mark.parametrize(
    "words", ["in each case", "in every one of the 2 cases", "in each of the cases", "on all shapes of the suite"]
)
def test_a_mean_is_not_each_case(words):
    mean = {"scope": "geometric mean"}
    assert faults(f"It is 2x faster {words}.", **mean).startswith("scope is geometric mean, not '")
    assert faults("It is 2x faster.", **mean) == "scope is geometric mean, and it does not say so"
    assert faults("It is 2x faster on average.", **mean) == ""
    assert faults("It is 2x faster, in the geometric mean over 1 case.", **mean).startswith("the claim is about 2 of")


def test_some_cases_are_not_the_whole_suite():
    some = {"cases": ["case0"]}
    assert faults("It is 2x faster in 1 case.", **some) == ""
    assert faults("It is 2x faster on the whole suite.", **some) == "cases is case0, not 'whole suite'"
    assert faults("It is 2x faster in 2 cases.", **some) == "the claim is about 1 of the cases, not '2 cases'"
    assert faults("In suite standard it is 2x faster.") == "suite is seed, not 'suite standard'"


@pytest.mark.parametrize("words", WORK)
def test_other_work_is_found(words):
    assert "not '" in (said := faults(f"It is 2x faster {words}.")) or said.startswith("no case that is claimed has '")


def test_work_that_the_claim_names_is_its_own():
    record = build_record(speedups=[2.3], subject="moe_backward")
    said = "moe_backward is 2x faster in the backward of our MoE kernel."
    assert faults(said, record=record, subject="moe_backward") == ""


def test_work_has_endings():
    record = build_record(speedups=[2.3], suite="decode")
    assert faults("It is 2x faster in decoding.", record=record, suite="decode") == ""
    assert faults("It is 2x faster in decoding.", record=build_record(speedups=[2.3])) != ""


def test_a_memory_claim_is_about_memory():
    memory = {"metric": "memory", "factor": 1.5}
    assert faults("It needs 30 % less memory than SDPA.", **memory) == ""
    assert faults("It needs half the memory of SDPA.", **memory) == "factor is 1.5, not 'half the memory'"
    assert faults("It is 1.2x faster.", **memory).startswith("metric is memory")
    assert faults("It needs 30 % less memory, by wall time.", **memory) == "metric is memory, not 'wall time'"


@pytest.mark.parametrize("kind", ["kernel", "graph", "wall", "memory"])
@pytest.mark.parametrize("scope", ["each case", "geometric mean"])
@pytest.mark.parametrize("cases", [(), ("case[01]",)])
@pytest.mark.parametrize("baselines", [["sdpa"], ["sdpa", "sdpa-cudnn"], ["my_torch"]])
@pytest.mark.parametrize("subject", ["flash_attention", "rms_norm", "my-MoE.v2"])
def test_a_sentence_that_is_worded_from_the_keys_is_fine(kind, scope, cases, baselines, subject):
    record = build_record(subject=subject, baselines=dict.fromkeys(baselines, 1.0), gpu=L4, baseline_seconds=2e-4)
    wish = Wish(kinds=[kind], scope=scope, cases=cases, baselines=baselines)
    (claim,) = make_claims(record, wish)  # which refuses a sentence that says more
    assert overstatement(shown_by(claim, record)) == ""


@pytest.mark.parametrize(
    "gpu", ["NVIDIA GeForce RTX 3060 Laptop GPU", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 NVL", "Tesla T4"]
)
def test_a_gpu_as_the_claim_writes_it_is_its_own(gpu):
    record = build_record(gpu=L4.model_copy(update={"name": gpu}), baseline_seconds=2e-4)
    (claim,) = make_claims(record, Wish())
    assert overstatement(shown_by(claim, record)) == ""
    assert overstatement(shown_by(claim.model_copy(update={"sentence": "On an L4 it is 2x faster."}), record))


def test_the_sentence_of_the_review_is_refused_by_verify_and_by_claim_new(tmp_path):
    sentence = "flash_attention is 50x faster than FlashAttention-3 on every GPU, an L4 too, and needs 30 % less memory"
    for folder in ("claims", "suites", "evidence"):
        (tmp_path / folder).mkdir()
    (tmp_path / "claims" / "a.toml").write_text(claim_toml(sentence=sentence, suite="made_up"))
    (tmp_path / "suites" / "made_up.toml").write_text(suite_toml("made_up", "case0", "case1"))
    record = build_record(speedups=[2.3, 3.0], suite="made_up")
    write_record(record, tmp_path / "evidence" / "run.json")
    (verdict,) = verify_claims(tmp_path)
    assert verdict.status is VerdictStatus.INCONCLUSIVE
    reasons = ("factor is 2, not '50x faster'", "metric is graph, at least 2 times, not '30 % less memory'")
    for reason in (*reasons, "gpu is H200, not 'L4'", "gpu is H200, not 'every GPU'", "baseline is sdpa, not 'fa3'"):
        assert reason in verdict.reason
    with pytest.raises(ClaimError, match="the sentence says more than the claim's keys: factor is 2, not '50x faster'"):
        make_claims(record, Wish(sentence=sentence))


def test_a_refuted_claim_stays_so_whatever_its_sentence_says(tmp_path):
    for folder in ("claims", "suites", "evidence"):
        (tmp_path / folder).mkdir()
    (tmp_path / "claims" / "a.toml").write_text(claim_toml(sentence="90x faster.", suite="made_up", factor=9.0))
    (tmp_path / "suites" / "made_up.toml").write_text(suite_toml("made_up", "case0", "case1"))
    write_record(build_record(speedups=[2.3, 3.0], suite="made_up"), tmp_path / "evidence" / "run.json")
    (verdict,) = verify_claims(tmp_path)
    assert verdict.status is VerdictStatus.REFUTED
    assert "factor is 9, not '90x faster'" in verdict.reason
