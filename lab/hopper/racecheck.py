"""A mailbox between two warp-specialised partitions, guarded by mbarriers both ways: compute-sanitizer calls it a race.

    compute-sanitizer --tool racecheck python lab/hopper/racecheck.py mail

``none`` leaves the mailbox out: no hazard. One integer goes from one warp to four, 20 times; the sum, 190, is right.
"""

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
FOUR_WARPS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def reader(out, buf, ready, free, N: gl.constexpr, MAIL: gl.constexpr):
    total = 0
    if MAIL:
        for n in range(N):
            mbarrier.wait(ready, n & 1)
            total += gl.max(buf.load(FOUR_WARPS), 0)
            mbarrier.arrive(free)
    gl.store(out, total)


@gluon.jit
def writer(out, buf, ready, free, N: gl.constexpr, MAIL: gl.constexpr):
    if MAIL:
        for n in range(N):
            if n > 0:
                mbarrier.wait(free, (n - 1) & 1)
            buf.store(gl.full([1], 0, gl.int32, ONE_WARP) + n)
            mbarrier.arrive(ready)


@gluon.jit
def kernel(out, N: gl.constexpr, MAIL: gl.constexpr):
    buf = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.init(free, count=1)
    gl.warp_specialize(
        [(reader, (out, buf, ready, free, N, MAIL)), (writer, (out, buf, ready, free, N, MAIL))], [1], [32]
    )


out = torch.zeros(1, dtype=torch.int32, device="cuda")
kernel[(1,)](out, 20, sys.argv[1] == "mail", num_warps=4)
torch.cuda.synchronize()
print(sys.argv[1], out.item())
