"""Train the small GPT of train_tiny_lm.py on several GPUs, and on one, and compare the loss curves.

    torchrun --nproc-per-node 2 examples/train_on_several_gpus.py cp   # sequences over ranks, weights sharded by FSDP2
    torchrun --nproc-per-node 2 examples/train_on_several_gpus.py ep   # experts over ranks, each with its own sequences
    torchrun --nproc-per-node 2 examples/train_on_several_gpus.py cp --tiny --device cpu   # seconds, over gloo

All runs start from the same weights and see the same batches, so what differs is rounding. Options are those of
train_tiny_lm.py; the ranks divide heads (cp), and sequences of a batch and experts (ep).
"""

import argparse
import functools
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from train_tiny_lm import GPT, attend_ours, draw_batch, loss_of, parse, read_text, set_rate

from flashmoe_science import MoeLayer
from flashmoe_science.distributed import ContextParallel


def make_model(args, attend=attend_ours, expert_layer=MoeLayer):
    """Return the model, with the weights of the seed."""
    torch.manual_seed(args.seed)
    sizes = {"layers": args.layers, "width": args.width, "heads": args.heads, "length": args.length}
    with torch.device(args.device):
        return GPT(**sizes, attend=attend, experts=args.experts, expert_layer=expert_layer)


class OneGPU:
    """All tokens and weights on each rank."""

    def __init__(self, args):
        self.model = make_model(args)

    def cut(self, batch):
        """Return the part of a batch that this rank has."""
        return batch

    def sum_gradients(self):
        """Make gradients those of the mean over all ranks."""


class SplitSequences(OneGPU):
    """Context parallel: each rank has some tokens of every sequence. FSDP2 shards weights over the same ranks."""

    def __init__(self, args):
        mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]
        self.cp = ContextParallel(mesh, heads_kv=args.heads)
        self.model = make_model(args, functools.partial(self.cp.attention, causal=True))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)  # it averages gradients: those of the mean over all tokens

    def cut(self, batch):
        """Return this rank's tokens, what follows them, and their positions."""
        tokens, following = batch
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return [self.cp.shard(x, dim=1) for x in (tokens, following, positions)]


class SplitExperts(OneGPU):
    """Expert parallel: each rank has some experts of every layer, and some sequences of every batch."""

    def __init__(self, args):
        mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("ep",))["ep"]
        self.model = make_model(args, expert_layer=functools.partial(MoeLayer, ep_mesh=mesh))
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, make_model(args).state_dict(), options=options)

    def cut(self, batch):
        """Return this rank's sequences."""
        return [x.chunk(dist.get_world_size())[dist.get_rank()] for x in batch]

    def sum_gradients(self):
        """Average gradients over ranks. Those of layers over a mesh are sums already."""
        for parameter in self.model.parameters():
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def clip(groups, most):
    """Clip gradients by their norm. Groups are of one kind of tensor each."""
    norms = [nn.utils.get_total_norm([parameter.grad for parameter in group]) for group in groups]
    norm = torch.stack([x.full_tensor() if isinstance(x, DTensor) else x for x in norms]).norm()
    for group in groups:
        for parameter in group:
            parameter.grad *= (most / (norm + 1e-6)).clamp(max=1.0)


def train(run, args):
    """Return the loss of every step, the mean over ranks."""
    parameters = list(run.model.parameters())
    groups = [[x for x in parameters if isinstance(x, DTensor) == split] for split in (False, True)]
    groups = [group for group in groups if group]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=args.lr, weight_decay=0.1)
    seen, _ = read_text()
    generator = torch.Generator().manual_seed(args.seed)
    losses = []
    for step in range(args.steps):
        batch = run.cut(draw_batch(seen, generator, args.batch, args.length))
        set_rate(optimizer, step, args)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(run.model, batch, args.device)
        loss.backward()
        run.sum_gradients()
        clip(groups, 1.0)
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


def main():
    """Train on all ranks and on one, and print the largest difference between the curves."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("split", choices=("cp", "ep"))
    chosen, others = first.parse_known_args()
    ranks = int(os.environ["WORLD_SIZE"])
    if chosen.split == "ep" and "--experts" not in others:
        others += ["--experts", str(max(4, ranks))]
    args = parse(others)
    if chosen.split == "ep" and "--batch" not in others:
        args.batch = -(-args.batch // ranks) * ranks
    if chosen.split == "ep" and args.batch % ranks:
        raise SystemExit(f"--batch must be a multiple of the {ranks} ranks, got {args.batch}")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    try:
        curves = [
            train(kind(args), args) for kind in (OneGPU, {"cp": SplitSequences, "ep": SplitExperts}[chosen.split])
        ]
        if dist.get_rank() == 0:
            for step, (one, several) in enumerate(zip(*curves, strict=True)):
                if step % max(1, args.steps // 10) == 0:
                    print(f"step {step}: loss {several:.4f}, on one {one:.4f}")
            largest = max(abs(one - several) for one, several in zip(*curves, strict=True))
            print(f"largest difference between the curves: {largest:.6f}")
        dist.barrier()  # no rank leaves while another still waits for it
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Threads of gloo may outlive destroy_process_group (torch 2.13), and abort a process that shuts down under them.
    sys.stdout.flush()
    os._exit(0)
