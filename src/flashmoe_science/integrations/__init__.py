"""Our attention behind the signatures of others: flash-attn, Hugging Face transformers, PyTorch's SDPA."""
