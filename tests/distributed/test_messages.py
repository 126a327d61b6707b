"""What a rank sends, in bytes and in words."""

from __future__ import annotations

import dataclasses

import pytest

from flashmoe_science.distributed.layout import plan_documents
from flashmoe_science.distributed.messages import Sizes, explain, sent

TWO = Sizes(ranks=2, batch=1, tokens=32, heads=8, heads_kv=2, columns=256, item_bytes=2)


def test_by_heads_a_rank_sends_its_part_of_all_tensors_to_each_other():
    tensors = 32 * (8 + 2) * 256 * 2  # q and o, k and v
    assert sent("heads", TWO, None) == (tensors // 2, tensors // 2)


def test_by_gather_sums_of_gradients_are_fp32():
    k_and_v = 32 * 2 * 256
    assert sent("gather", TWO, None) == (2 * k_and_v, 6 * k_and_v)


def test_documents_that_stay_whole_are_not_sent():
    assert sent("gather", TWO, plan_documents([32, 32], 2)) == (0, 0)
    packed = plan_documents([48, 16], 2)
    assert 0 < packed.sent <= 32
    k_and_v = packed.sent * 2 * 256
    assert sent("gather", TWO, packed) == (2 * k_and_v, 6 * k_and_v)


def test_few_keys_that_came_are_kept_and_not_sent_again():
    packed = plan_documents([8, *[1] * 40], 2)
    k_and_v = packed.sent * 2 * 256
    assert sent("gather", TWO, packed) == (2 * k_and_v, 4 * k_and_v)
    assert sent("gather", dataclasses.replace(TWO, may_keep=False), packed) == (2 * k_and_v, 6 * k_and_v)
    *_, backward = explain("gather", TWO, packed, "collectives")
    assert backward.endswith(f"foreseen: {0.07 + 4 * k_and_v / 261e6:.2f} ms")


@pytest.mark.parametrize(
    ("lengths", "texts"),
    [
        ([32, 32], ["1 to 1 whole documents a rank, 0 split; each rank sends 0 tokens", "foreseen: 0.00 ms"]),
        (
            [48, 16],
            ["strategy gather: ranks have whole documents", "0 to 0 whole documents a rank, 2 split", "MB backward"],
        ),
    ],
)
def test_a_plan_of_documents_is_explained(lengths, texts):
    lines = "\n".join(explain("gather", TWO, plan_documents(lengths, 2), "collectives"))
    for text in texts:
        assert text in lines


def test_the_time_foreseen_is_that_of_starts_and_bytes():
    large = Sizes(ranks=2, batch=1, tokens=32768, heads=32, heads_kv=8, columns=256, item_bytes=2)
    forward, _ = sent("heads", large, None)
    (line, _) = explain("heads", large, None, "collectives")[-2:]
    assert line.endswith(f"foreseen: {2 * 0.07 + forward / 261e6:.2f} ms")
