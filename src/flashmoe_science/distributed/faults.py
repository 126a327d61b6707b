"""What a collective says when a rank is gone: which one, in which exchange, and why."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import torch.distributed as dist

from ..errors import RankLostError

SECONDS_TO_ANSWER = 10.0  # for ranks that are alive to say so
_POLL = 0.05


@contextlib.contextmanager
def collective(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Raise ``RankLostError`` where a collective of torch fails, with the ranks that do not answer.

    Errors that are not of the process group stay what they are: that a device is out of memory, for one.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is RuntimeError or isinstance(error, dist.DistError):  # gloo raises the first, NCCL the second
            raise _error(group, what, error) from error
        raise


def _error(group: dist.ProcessGroup, what: str, error: RuntimeError) -> RankLostError:
    mine = dist.get_rank()
    reason = str(error).strip().split("\n")[0][:300]
    try:
        silent = _silent_ranks(group, mine)
    except RuntimeError as second:  # rank 0 may hold the store
        lost = f"the store of the process group is gone too ({str(second).strip().splitlines()[0][:100]})"
    else:
        lost = (
            f"no answer within {SECONDS_TO_ANSWER:g} s from rank {', '.join(map(str, silent))}"
            if silent
            else "all ranks are alive"
        )
    hint = "end this process: the ranks that are left cannot go on with this group"
    if os.environ.get("FLASHMOE_CHECK") != "1":
        hint = f"{hint}. If ranks made different calls, FLASHMOE_CHECK=1 in the environment names the first"
    return RankLostError(f"{what} failed on rank {mine}: {lost}. torch said: {reason}", hint=hint)


def _silent_ranks(group: dist.ProcessGroup, mine: int) -> list[int]:
    """Say that this rank is alive, and return those that do not say so. Numbers are those of the whole job.

    The store counts the faults of each rank: what a rank said at an earlier fault is no answer to this one.
    """
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - has no public name
    ranks = dist.get_process_group_ranks(group)
    keys = {rank: f"flashmoe_science/faults/{group.group_name}/{rank}" for rank in ranks}
    fault = store.add(keys[mine], 1)
    until = time.monotonic() + SECONDS_TO_ANSWER
    while True:
        silent = [rank for rank in ranks if store.add(keys[rank], 0) < fault]
        if not silent or time.monotonic() > until:
            return silent
        time.sleep(_POLL)
