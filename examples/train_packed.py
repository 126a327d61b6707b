"""Train a small GPT on packed documents: our attention, PyTorch's with a mask, FlexAttention and FlashAttention-4.

Documents are pages and sources of this repository. A batch holds documents, whole or cut, until it is full. A token
attends to those before it in its document. All runs start from the same weights and see the same batches. The script
prints tokens a second. It counts the time that masks take. It writes packed.json and, with matplotlib, packed.png.

    python examples/train_packed.py                      # on the GPU, in bf16
    python examples/train_packed.py --device cpu --tiny
    python examples/train_packed.py --plot packed.json   # draw again what another machine computed
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from train_tiny_lm import GPT, ROOT, describe, loss_of, set_rate, smooth

from flashmoe_science import flash_attention_varlen


class Ours:
    """``flash_attention_varlen``: it is given where documents start."""

    def set_lengths(self, lengths, device):
        """Take the lengths of a batch's documents."""
        self.starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        self.longest = max(lengths)

    def __call__(self, q, k, v):
        """Return attention of ``[1, H, T, D]``, a view of ``[T, H, D]``."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self.attend(q, k, v).transpose(0, 1)[None]

    def attend(self, q, k, v):
        """Return attention of ``[T, H, D]``."""
        return flash_attention_varlen(q, k, v, self.starts, self.starts, self.longest, self.longest, causal=True)


class FlashAttention4(Ours):
    """FlashAttention-4's function of packed sequences."""

    def __init__(self):
        """Import it."""
        from flash_attn.cute import flash_attn_varlen_func

        self.varlen = flash_attn_varlen_func

    def attend(self, q, k, v):
        """Return attention of ``[T, H, D]``. Its first output is o; some versions return no other."""
        found = self.varlen(
            q, k, v, cu_seqlens_q=self.starts, cu_seqlens_k=self.starts, max_seqlen_q=self.longest,
            max_seqlen_k=self.longest, causal=True,
        )  # fmt: skip
        return found[0] if isinstance(found, tuple) else found


def documents_of(lengths, device):
    """Return the number of each token's document."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)


class Sdpa:
    """``scaled_dot_product_attention`` with a mask of all tokens by all tokens."""

    def set_lengths(self, lengths, device):
        """Make the mask of a batch."""
        documents = documents_of(lengths, device)
        self.mask = (documents[:, None] == documents).tril_()

    def __call__(self, q, k, v):
        """Return attention."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


class Flex:
    """FlexAttention, compiled, with a block mask made anew for each batch."""

    def __init__(self):
        """Compile both."""
        from torch.nn.attention import flex_attention

        self.attend = torch.compile(flex_attention.flex_attention)
        self.make_mask = torch.compile(flex_attention.create_block_mask)

    def set_lengths(self, lengths, device):
        """Make the mask of a batch."""
        documents, tokens = documents_of(lengths, device), sum(lengths)
        self.mask = self.make_mask(
            lambda _b, _h, row, key: (documents[row] == documents[key]) & (key <= row),
            None, None, tokens, tokens, device=device,
        )  # fmt: skip

    def __call__(self, q, k, v):
        """Return attention."""
        return self.attend(q, k, v, block_mask=self.mask)


ATTENTION = {"ours": Ours, "sdpa": Sdpa, "flex": Flex, "fa4": FlashAttention4}


def read_documents():
    """Return the repository's pages and sources, a tensor of bytes each."""
    files = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]
    return [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long() for file in files]


def pack_batch(documents, generator, tokens, longest):
    """Return bytes, what follows each, positions, all ``[1, tokens]``, and the lengths of documents.

    Documents come in random order, from a random place where they are longer than ``longest``; the last is cut.
    """
    parts, lengths, room = [], [], tokens
    while room:
        document = documents[int(torch.randint(len(documents), (), generator=generator))]
        length = min(len(document) - 1, longest, room)
        start = int(torch.randint(len(document) - length, (), generator=generator))
        parts.append(document[start : start + length + 1])
        lengths.append(length)
        room -= length
    columns = [part[:-1] for part in parts], [part[1:] for part in parts], [torch.arange(n) for n in lengths]
    return tuple(torch.cat(column)[None] for column in columns), lengths


def train(name, args):
    """Train with one attention: the loss of every step, and tokens a second."""
    torch.manual_seed(args.seed)
    attend = ATTENTION[name]()
    sizes = {"layers": args.layers, "width": args.width, "heads": args.heads, "length": args.longest}
    model = GPT(**sizes, attend=attend, experts=0, expert_layer=None).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    documents, generator = read_documents(), torch.Generator().manual_seed(args.seed)
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    losses, seconds = [], []
    for step in range(args.steps):
        batch, lengths = pack_batch(documents, generator, args.tokens, args.longest)
        set_rate(optimizer, step, args)
        synchronize()
        begin = time.perf_counter()
        attend.set_lengths(lengths, args.device)
        loss = loss_of(model, batch, args.device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        synchronize()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    steady = seconds[len(seconds) // 5 :]  # without compiling, and without what else a first step does
    return {"losses": losses, "tokens_per_second": args.tokens / median(steady)}


def plot(runs, path):
    """Draw tokens a second and the curves, or say why not."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plot: matplotlib is not installed; --plot draws packed.json where it is")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5))
    bars = left.barh(list(runs), [run["tokens_per_second"] for run in runs.values()])
    left.bar_label(bars, fmt="{:,.0f}", padding=3)
    left.invert_yaxis()
    left.margins(x=0.4)
    left.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1e3:,.0f}k")
    left.set(xlabel="tokens a second")
    for name, run in runs.items():
        right.plot(smooth(run["losses"], 20), label=name)
    right.set(xlabel="step", ylabel="loss in nats a byte (mean of 20 steps)")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


def parse(arguments):
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="two layers, and few steps: seconds on a CPU")
    full = {"steps": 100, "tokens": 32768, "longest": 8192, "layers": 6, "width": 512, "heads": 8}
    tiny = {"steps": 6, "tokens": 300, "longest": 64, "layers": 2, "width": 32, "heads": 2}
    for name, value in full.items():
        parser.add_argument(f"--{name}", type=int, help=f"default: {value}")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches; default: 0")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for packed.json and packed.png")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw this packed.json")
    args = parser.parse_args(arguments)
    for name, value in (tiny if args.tiny else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main(arguments=None):
    """Train with each, or draw."""
    args = parse(arguments)
    if args.plot is not None:
        plot(json.loads(args.plot.read_text(encoding="utf-8"))["runs"], args.plot.with_suffix(".png"))
        return
    # FlexAttention has no gradients on a CPU, and FlashAttention-4 needs a GPU.
    names = [name for name in ATTENTION if args.device == "cuda" or name in ("ours", "sdpa")]
    spec = importlib.util.find_spec
    if "fa4" in names and (spec("flash_attn") is None or spec("flash_attn.cute") is None):
        names.remove("fa4")
        print("without FlashAttention-4: the package flash-attn-4 is not installed")
    if args.device == "cpu":
        print("on a CPU ours is the reference in torch, not a kernel: its speed says nothing")
    document = {"environment": describe(), "settings": {n: x for n, x in vars(args).items() if type(x) in (int, float)}}
    document["runs"] = runs = {name: train(name, args) for name in names}
    for name, run in runs.items():
        print(f"{name}: loss {run['losses'][-1]:.4f}, {run['tokens_per_second']:,.0f} tokens a second")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "packed.json").write_text(json.dumps(document), encoding="utf-8")
    print(f"wrote {args.out / 'packed.json'}")
    plot(runs, args.out / "packed.png")


if __name__ == "__main__":
    main()
