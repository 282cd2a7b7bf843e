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
    "compute": "the products of prompts take most of the time: add an engine, "
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

_OFTEN = 0.1
"""Share of steps in which requests wait for room, from which on room is what is short."""


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
    """Find what breaks first in one engine.   capacity: the largest load that it keeps."""
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
    match broken := objective.broken_by(replayed):
        case "ttft":
            why = _lacked(replayed) or "compute"
        case "tpot":
            why = "chunks" if _computes_prompts(replayed) else _largest_part(replayed)
        case _:
            why = _lacked(replayed) or (
                "compute" if _computes_prompts(replayed) else _largest_part(replayed)
            )
    return Verdict(broken or "throughput", why, load)


def _lacked(replayed: Replayed) -> str:
    """Name what waiting requests lacked most often; "" if room was seldom short."""
    lacked = {name: replayed.waited[name] for name in ("seats", "slabs", "ranks")}
    most = max(lacked, key=lambda name: lacked[name])
    return most if lacked[most] > _OFTEN * replayed.num_steps else ""


def _computes_prompts(replayed: Replayed) -> bool:
    """Whether steps with tokens of prompts take most of the time."""
    return replayed.chunk_s > 0.5 * replayed.busy_s


def _largest_part(replayed: Replayed) -> str:
    """Name the part that takes most of the steps' time."""
    names = {"attention": "kv bytes", "lora": "adapter bytes"}
    most = max(replayed.parts_s, key=lambda name: replayed.parts_s[name])
    return names.get(most, "weight bytes")
