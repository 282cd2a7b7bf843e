"""The verdict: the limit that a growing load meets first, and the change that moves it."""

from dataclasses import dataclass

from server.capacity.engine_plan import EnginePlan, Load, Objective
from server.capacity.replay import Replayed

_ADVICE = {
    "weights": "the weights do not fit: take --quantization int4, more devices with "
    "--tensor-parallel-size, or hardware with more memory",
    "arena": "the longest request does not fit beside the weights: take --quantization int4, "
    "shorter requests, or hardware with more memory",
    "slabs": "the arena is full, so that requests wait for KV blocks: take --quantization int4, a "
    "larger --tensor-parallel-size, shorter requests, or hardware with more memory",
    "seats": "all seats are taken: raise max_num_seqs, or add an engine",
    "ranks": "the step's sum of adapter ranks is reached: raise max_sum_ranks_per_step, or use "
    "lower ranks",
    "compute": "prompts wait for each other, as products of prompts take the time: add an engine, "
    "share prompts' prefixes, or take hardware with more FLOPs",
    "chunks": "prompts of other requests are computed in the same steps: lower "
    "max_num_batched_tokens, add an engine, or take hardware with more FLOPs",
    "weight bytes": "every token reads all weights: take --quantization int8 or int4, a larger "
    "--tensor-parallel-size, or hardware with more bandwidth",
    "kv bytes": "every token reads the KV of its request: take shorter requests, fewer at once in "
    "an engine, or hardware with more bandwidth",
    "adapter bytes": "every step reads the tiles of its adapters: use lower ranks, or lower "
    "max_sum_ranks_per_step",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The limit that breaks first.

    what: "memory", "ttft", "tpot" or "throughput".   why: a key of the advice.
    load: the smallest load of one engine that was seen to break; None if none does.
    """

    what: str
    why: str
    load: Load | None = None

    @property
    def change(self) -> str:
        """Advice: what happens, and what to change."""
        return _ADVICE[self.why]


def judge(plan: EnginePlan, objective: Objective, capacity: Load | None, kind: Load) -> Verdict:
    """Find what breaks first in one engine.   capacity: the largest load that keeps the objective."""
    if not plan.fits:
        arena = plan.arena
        has_room = arena.weight_bytes + arena.step_bytes < arena.memory_bytes and arena.num_slabs
        return Verdict("memory", "arena" if has_room else "weights")
    if capacity is None:
        load = kind.of(1e-3)
    elif kind.rate is None:
        load = kind.of(capacity.size + 1)
    else:
        load = kind.of(1.15 * capacity.size)
    replayed = plan.replay(load)
    broken = objective.broken_by(replayed)
    why = _why_late(plan, replayed) if broken != "tpot" else _why_slow(replayed)
    return Verdict(broken or "throughput", why, load)


def _why_late(plan: EnginePlan, replayed: Replayed) -> str:
    """Name what waiting requests lacked most; computing, if they did not wait for room."""
    lacked = {name: replayed.waited[name] for name in ("seats", "slabs", "ranks")}
    most = max(lacked, key=lambda name: lacked[name])
    if lacked[most] > 0.1 * replayed.num_steps:
        return most
    return "compute"


def _why_slow(replayed: Replayed) -> str:
    """The part that takes most of the steps' time; chunks, where prompts take most of them."""
    parts = replayed.parts_s
    tokens = replayed.prompt_tokens_per_s
    if replayed.chunk_s > 0.5 * replayed.busy_s and tokens:
        return "chunks"
    names = {"attention": "kv bytes", "lora": "adapter bytes"}
    most = max(parts, key=lambda name: parts[name])
    return names.get(most, "weight bytes")
