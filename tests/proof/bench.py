"""One subject and its baselines on a simulated GPU, taken through the rounds of one case."""

from __future__ import annotations

from typing import Any, cast

from flashmoe_science.proof.measure import rounds
from flashmoe_science.proof.records.evidence import Arm, Rounds, Settings
from flashmoe_science.proof.subject.operator import Operator

from .simulated import Doubling, Gpu, SimulatedTimer, implementation, loaded


class Bench:
    """One subject, one baseline, and what measuring them gave."""

    def __init__(self, *, length=64, l2_bytes=1 << 10):
        self.gpu = Gpu()
        self.timer = SimulatedTimer(self.gpu, l2_bytes)
        self.operator = Doubling()
        self.length = length
        self.subject = loaded("ours", implementation(self.gpu, seconds=2e-6), role="subject", deterministic=True)
        self.baselines = [loaded("sdpa", implementation(self.gpu, seconds=6e-6))]
        self.plan: dict[str, Any] = {}  # more of it

    def run(self, times=("graph", "wall"), *, process=0, control=True, thorough=True, new_seed=None, **settings):
        protocol = Settings(**{"rounds": 4, **settings})
        plan = rounds.Plan(protocol, times, process, control, thorough, new_seed=new_seed, **self.plan)
        case = rounds.Case("n64", cast("Operator", self.operator), self.length)
        self.progress: list[tuple[int, ...]] = []
        result = rounds.measure_case(
            case, [self.subject, *self.baselines], plan, self.timer, on_round=lambda *done: self.progress.append(done)
        )
        self.arms = {arm["name"]: Arm.model_validate(arm) for arm in result["arms"]}
        self.rounds = Rounds.model_validate(result["rounds"]) if result["rounds"] else None
        self.result = result
        return self

    def seconds(self, kind):
        assert self.rounds is not None
        return self.rounds.seconds[kind]
