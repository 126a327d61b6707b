"""Train a small GPT from scratch on this repository's own pages and sources, with our kernels and with PyTorch's.

Both runs start from the same weights and see the same batches, so their loss curves have to agree; what differs is
rounding, and the time a step takes. Prints both, and writes losses.json, with what the run was made with, and, with
matplotlib, losses.png.

    python examples/train_tiny_lm.py                    # on the GPU, in bf16
    python examples/train_tiny_lm.py --device cpu --tiny
    python examples/train_tiny_lm.py --experts 8        # a Mixture of Experts in place of each perceptron
    python examples/train_tiny_lm.py --seed 1 --first sdpa   # other weights and batches; PyTorch's kernels go first
    python examples/train_tiny_lm.py --plot losses.json  # draw again what another machine computed

With the harness (in a clone, pip install -e ".[proof]") losses.json says of machine and tree what a record says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import nn

from flashmoe_science import MoeLayer, flash_attention

ROOT = Path(__file__).parents[1]
VOCABULARY = 256  # bytes


def attend_ours(q, k, v):
    """Return causal attention by ``flash_attention``."""
    return flash_attention(q, k, v, causal=True)


def attend_sdpa(q, k, v):
    """Return causal attention by PyTorch."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTION = {"ours": attend_ours, "sdpa": attend_sdpa}


class LoopOverExperts(MoeLayer):
    """The same layer in plain PyTorch: an expert at a time, over the tokens that go to it."""

    def forward(self, x):
        tokens = x.flatten(0, -2)
        best = F.linear(tokens, self.w_router).float().topk(self.top_k)
        weights, out = torch.softmax(best.values, -1), torch.zeros_like(tokens)
        for expert in range(self.w_down.shape[0]):
            rows, places = torch.where(best.indices == expert)
            gate, up = F.linear(tokens[rows], self.w_gate_up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.w_down[expert]) * weights[rows, places, None]
            out = out.index_add(0, rows, y.to(out.dtype))
        return out.view(x.shape)


EXPERTS = {"ours": MoeLayer, "sdpa": LoopOverExperts}
TOP_K = 2  # experts of a token


class Block(nn.Module):
    """Attention and a multilayer perceptron, or experts, each added to what comes in."""

    def __init__(self, width, heads, attend, experts, expert_layer):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        if experts:
            self.mlp = expert_layer(width, 2 * width, experts, TOP_K)
        else:
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # [B, H, S, D], views
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Bytes in, the logits of the next byte out."""

    def __init__(self, *, layers, width, heads, length, attend, experts, expert_layer):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attend, experts, expert_layer) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens, positions=None):
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        return self.head(self.norm(self.blocks(x)))


def read_text():
    """Return the repository's pages and sources as bytes, the last tenth apart."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]
    data = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    split = len(data) * 9 // 10
    return data[:split], data[split:]


def draw_batch(data, generator, batch, length):
    """Return sequences from anywhere, and what follows each of their bytes."""
    starts = torch.randint(len(data) - length - 1, (batch,), generator=generator)
    rows = torch.stack([data[start : start + length + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, batch, device):
    """Return the mean surprise at the next byte, in nats; on a GPU computed in bf16.

    A batch is tokens, and what follows each, and the positions of tokens unless they are the first ones.
    """
    tokens, following, *positions = (x.to(device) for x in batch)
    bf16 = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()
    with bf16:
        logits = model(tokens, *positions)
    return F.cross_entropy(logits.float().flatten(0, 1), following.flatten())


def set_rate(optimizer, step, args):
    """Set the learning rate of a step: up over the first tenth, then down to a tenth."""
    rise, fall = (step + 1) / max(1, args.steps // 10), 1 - 0.9 * step / args.steps
    for group in optimizer.param_groups:
        group["lr"] = args.lr * min(rise, fall)


def train(name, args):
    """Train with the kernels of one: the loss of every step, that of text not seen, and tokens a second."""
    torch.manual_seed(args.seed)
    sizes = {"layers": args.layers, "width": args.width, "heads": args.heads, "length": args.length}
    model = GPT(**sizes, attend=ATTENTION[name], experts=args.experts, expert_layer=EXPERTS[name]).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    seen, unseen = read_text()
    generator = torch.Generator().manual_seed(args.seed)
    synchronize = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    losses, seconds = [], []
    for step in range(args.steps):
        batch = draw_batch(seen, generator, args.batch, args.length)
        set_rate(optimizer, step, args)
        synchronize()
        begin = time.perf_counter()
        loss = loss_of(model, batch, args.device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        synchronize()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        if step % max(1, args.steps // 10) == 0:
            print(f"{name}: step {step}, loss {losses[-1]:.4f}")
    with torch.no_grad():
        generator.manual_seed(args.seed + 1)
        batches = [draw_batch(unseen, generator, args.batch, args.length) for _ in range(8)]
        final = sum(loss_of(model, batch, args.device).item() for batch in batches) / len(batches)
    steady = sorted(seconds[len(seconds) // 5 :])  # without compiling, and without what else a first step does
    tokens_per_second = args.batch * args.length / steady[len(steady) // 2]
    return {"losses": losses, "unseen": final, "tokens_per_second": tokens_per_second}


def smooth(losses, window):
    """Return the mean of each loss with those before it."""
    return [sum(losses[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(losses))]


def compare(runs, window=20):
    """Return the largest difference between two smoothed curves."""
    a, b = (smooth(run["losses"], window) for run in runs.values())
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def describe():
    """Return machine, versions and commit as the harness' records have them, or None without the harness."""
    try:
        from flashmoe_science.proof.measure.environment import environment
    except ModuleNotFoundError as error:
        print(
            f'{error.name} is not installed, so losses.json has no environment; in a clone: pip install -e ".[proof]"'
        )
        return None
    return environment().model_dump(mode="json")


def plot(runs, path):
    """Draw the curves, or say why not."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plot: matplotlib is not installed; --plot draws losses.json where it is")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, height_ratios=(3, 1), figsize=(7, 5))
    # The curves lie on one another: the first is broad, and the second shows on it, dashed.
    for (name, run), style in zip(runs.items(), ({"linewidth": 4, "alpha": 0.5}, {"linestyle": "--"}), strict=True):
        label = f"{name}, {run['tokens_per_second']:,.0f} tokens a second"
        above.plot(smooth(run["losses"], 20), label=label, **style)
    a, b = (run["losses"] for run in runs.values())
    below.plot([x - y for x, y in zip(a, b, strict=True)], color="grey", linewidth=0.8)
    below.axhline(0, color="black", linewidth=0.6)
    above.set(ylabel="loss in nats a byte\n(mean of 20 steps)")
    below.set(xlabel="step", ylabel=f"{' - '.join(runs)}\n(each step)")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.align_ylabels()
    above.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


def parse(arguments):
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda; with --tiny cpu where there is none")
    parser.add_argument("--tiny", action="store_true", help="two layers, and few steps: seconds on a CPU")
    for name, value in (("steps", 400), ("batch", 32), ("length", 1024), ("layers", 6), ("width", 512), ("heads", 8)):
        parser.add_argument(f"--{name}", type=int, help=f"default: {value}", default=None)
        parser.set_defaults(**{f"full_{name}": value})
    parser.add_argument(
        "--experts", type=int, default=0, help=f"experts of each layer, {TOP_K} a token; default: 0, a perceptron"
    )
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches; default: 0")
    parser.add_argument("--first", choices=tuple(ATTENTION), default="ours", help="whose run is made first")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for losses.json and losses.png")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw this losses.json")
    args = parser.parse_args(arguments)
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
        if args.device == "cpu" and not args.tiny and args.plot is None:
            parser.error("torch finds no GPU: --tiny takes seconds on a CPU; --device cpu trains the whole model")
    if 0 < args.experts < TOP_K:
        parser.error(f"--experts must be 0, or at least the {TOP_K} that a token goes to, got {args.experts}")
    tiny = {"steps": 8, "batch": 2, "length": 64, "layers": 2, "width": 32, "heads": 2}
    for name, small in tiny.items():
        if getattr(args, name) is None:
            setattr(args, name, small if args.tiny else getattr(args, f"full_{name}"))
    return args


def main(arguments=None):
    """Train both, or draw."""
    args = parse(arguments)
    if args.plot is not None:
        plot(json.loads(args.plot.read_text(encoding="utf-8"))["runs"], args.plot.with_suffix(".png"))
        return
    if args.device == "cpu":
        print("on a CPU ours is the reference in torch, not a kernel: its speed says nothing")
    began, where = datetime.now(timezone.utc).isoformat(timespec="seconds"), describe()
    made = {name: train(name, args) for name in sorted(ATTENTION, key=lambda name: name != args.first)}
    runs = {name: made[name] for name in ATTENTION}  # compared and drawn in one order, whoever went first
    for name, run in runs.items():
        print(f"{name}: loss of unseen text {run['unseen']:.4f}, {run['tokens_per_second']:,.0f} tokens a second")
    print(f"largest difference between the curves: {compare(runs):.4f}")
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    names = ("steps", "batch", "length", "layers", "width", "heads", "experts", "lr", "seed", "first")
    settings = {name: getattr(args, name) for name in names}
    document = {
        "date": began,
        "device": device,
        "torch": torch.__version__,
        "environment": where,
        **settings,
        "runs": runs,
    }
    (args.out / "losses.json").write_text(json.dumps(document), encoding="utf-8")
    print(f"wrote {args.out / 'losses.json'}")
    plot(runs, args.out / "losses.png")


if __name__ == "__main__":
    main()
