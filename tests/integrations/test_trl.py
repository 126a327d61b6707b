"""TRL's trainer on a tiny model: the losses of packed documents by our attention are those of SDPA."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from flashmoe_science import flash_attention_varlen
from flashmoe_science.integrations import transformers as integration

from ..required import import_needed

# Sums of fp32 in another order change a loss by some 1e-7 of it. AdamW divides by the size of a gradient, so a
# difference does not fade; over ten steps it stays below 1e-6. Documents that see each other change the loss by 1e-3
# from the second step on.
TOLERANCE = 1e-5
LENGTHS = (5, 17, 9, 30, 3, 24, 12, 8)
STEPS = 10


@pytest.fixture
def trl(monkeypatch) -> Any:
    pytest.importorskip("transformers", minversion="5.0", reason="transformers is optional")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return import_needed("trl", "trl", "needs trl: pip install trl")


@pytest.fixture
def calls(monkeypatch) -> list[list[int]]:
    """Return where the documents of each packed call start."""
    starts: list[list[int]] = []

    def spy(q, k, v, cu_seqlens_q, *args, **options):
        starts.append(cu_seqlens_q.tolist())
        return flash_attention_varlen(q, k, v, cu_seqlens_q, *args, **options)

    monkeypatch.setattr(integration, "flash_attention_varlen", spy)
    return starts


def losses(trl: Any, folder: Any, implementation: str, batch: int, **options: Any) -> list[float]:
    """Return the loss of each step. Weights, documents and their order are the same in every call."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
    documents = [torch.randint(3, 64, (length,)).tolist() for length in LENGTHS]
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attn_implementation=implementation,
    )  # fmt: skip
    arguments = trl.SFTConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=batch, learning_rate=1e-2,
        lr_scheduler_type="constant", logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, bf16=False,
        disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=Qwen3ForCausalLM(config),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": documents}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2"),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # trl 1.16 sets it
def test_packed_documents_train_as_padded_ones_do_by_sdpa(trl, tmp_path, calls):
    """Every step sees all documents, so that it does not matter which row a document was packed into."""
    options = {"packing": True, "max_length": 32}
    ours = losses(trl, tmp_path, integration.register(), len(LENGTHS), **options)
    assert len(ours) == STEPS
    assert len(calls) >= 2 * STEPS  # each layer; more where activations are made again
    assert all(sorted(b - a for a, b in itertools.pairwise(call)) == sorted(LENGTHS) for call in calls)
    packed = losses(trl, tmp_path, "sdpa", len(LENGTHS), **options)
    padded = losses(trl, tmp_path, "sdpa", len(LENGTHS), max_length=None)
    assert ours == pytest.approx(packed, rel=TOLERANCE)
    assert ours == pytest.approx(padded, rel=TOLERANCE)
    assert ours[-1] < ours[0] / 2


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # trl 1.16 sets it
def test_batches_without_padding_train_as_padded_ones_do_by_sdpa(trl, tmp_path, calls):
    """Batches of three documents: other lengths in each step."""
    ours = losses(trl, tmp_path, integration.register(), 3, padding_free=True, max_length=None)
    assert len({tuple(call) for call in calls}) > 3
    padded = losses(trl, tmp_path, "sdpa", 3, max_length=None)
    assert ours == pytest.approx(padded, rel=TOLERANCE)
