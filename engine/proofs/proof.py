"""Proofs: an adapter is served on fixed prompts, and must give what its merged weights give.

A proof's requests go through the scheduler like a tenant's, in the batch class, so that the adapter
is fetched, packed, placed and applied as it will be for its tenant. The same tokens then run
through the merged weights: on a CPU a few milliseconds of work at a time between the engine's
steps, on a device beside them.
"""

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.requests.request import find_adapter_start
from engine.scheduling.scheduler import NOT_FINITE, Scheduler
from engine.wire.messages import (
    PROOF_TENANT,
    AddRequest,
    Priority,
    ProofResult,
    ProveAdapter,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from lora.errors import AdapterError
from registry.formats.peft_config import MAX_INVOCATION_TOKENS
from registry.ref import AdapterRef
from registry.uploads.proof import PROOF_FAILED, Proof, Verdict

logger = logging.getLogger(__name__)

MAX_WAITING = 64
_PROMPT_LENGTHS = (7, 19)
"""Tokens of the fixed prompts: one prompt fits into a KV block, one takes two blocks."""
_MOST_ADDED = 8
"""Tokens of an adapter's own in a prompt."""
_NUM_TOKENS = 4
MOST_TOKENS = sum(_PROMPT_LENGTHS) + len(_PROMPT_LENGTHS) * (
    MAX_INVOCATION_TOKENS + _NUM_TOKENS - 1
)
"""Tokens that the merged weights are run on, at most."""
_TOP = 20
_BUSY_SHARE = 0.1
"""Share of the loop's time that merged weights may take while requests are served. On a device they
take next to none of it, and the device's time is not limited.
"""
_NOISE_FACTOR, _LEAST_NOISE = 4.0, 1e-5
"""Rounding that is tolerated: a multiple of the base model's own, which is measured at all tokens
of the prompts, as few of them meet the worst (another expert), plus a least amount in nats.
"""
_DEADLINE_S = 600.0
_QUIET_S = 300.0
"""How long a proof that wants the engine alone waits for a moment without other requests."""

# Stop causes that another try may not meet; all others are the adapter's own fault.
# A full disk ends requests as an engine failure, or without a cause if they were never written.
_PASSING = {"adapter_missing", "adapter_loading", "adapter_corrupt", "deadline",
            "first_token_timeout", "aborted", "gateway_lost", "engine_failure", None}  # fmt: skip

Logprobs = npt.NDArray[np.float32]
_Row = tuple[int, TokenLogprobs]
"""Logprobs that were served, with the row of the reference's for the same token."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens to run.   adapter_start: the first position that the adapter applies to."""

    token_ids: tuple[int, ...]
    adapter_start: int


@dataclass(frozen=True, slots=True)
class Compared:
    """Logprobs after every token, [tokens, vocab]: of the base model, and merged.

    unrounded: merged into the weights as they were before they were rounded to few bits; None if
    they were not, or are not known.
    """

    base: Logprobs
    merged: Logprobs
    unrounded: Logprobs | None = None


class Reference(Protocol):
    """Runs tokens on the base weights, and on those with an adapter merged into them."""

    vocab_size: int

    def own_tokens(self, object_path: Path) -> tuple[tuple[int, ...] | None, Sequence[int]]:
        """Invocation tokens of an activated LoRA, None for other adapters; and the tokens that the
        adapter adds to the vocabulary. Raises AdapterError.
        """
        ...

    def compare(
        self, sequences: Sequence[TokenSequence], object_path: Path
    ) -> Generator[None, None, Compared]:
        """Run sequences, yielding every few milliseconds at least.

        Raises AdapterError; OSError or MemoryError if another try may do it.
        """
        ...


class _Failed(Exception):
    """Ends a proof early, with the verdict that it came to."""

    def __init__(self, verdict: Verdict, message: str) -> None:
        self.proof = Proof(verdict=verdict, message=message)
        super().__init__(message)


_Steps = Generator[None, None, Proof]


class ProofRunner:
    """Runs proofs, one after the other.

    accept: hands a request to the engine; returns the reason in a word if it is refused.
    is_alone: whether no other request may begin, as a proof runs under which an engine may end.
    precision: how much served and merged logprobs may differ, as a share of the adapter's effect.
    """

    def __init__(
        self,
        reference: Reference,
        scheduler: Scheduler,
        accept: Callable[[AddRequest], str | None],
        precision: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reference = reference
        self.scheduler = scheduler
        self.adapters = scheduler.adapters
        self.accept = accept
        self.precision = precision
        self.clock = clock
        self._waiting: deque[tuple[str, ProveAdapter]] = deque()
        self._current: tuple[str, ProveAdapter, _Steps] | None = None
        self._outputs: dict[str, list[RequestOutput]] = {}
        self._begun_at = self._resume_at = 0.0
        self.is_alone = False

    @property
    def has_work(self) -> bool:
        return self._current is not None or bool(self._waiting)

    def add(self, gateway_id: str, message: ProveAdapter) -> ProofResult | None:
        """Queue a proof, or return its result at once if it cannot be queued."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append((gateway_id, message))
            return None
        refused = Proof(verdict="unavailable", message="Too many adapters wait to be proved.")
        return ProofResult(proof_id=message.proof_id, proof=refused)

    def take(self, output: RequestOutput) -> None:
        """Collect an output of the current proof's requests."""
        if output.request_id in self._outputs:
            self._outputs[output.request_id].append(output)

    def advance(self) -> list[tuple[str, ProofResult]]:
        """Do a unit of work if one is due, and return the proof that it completed, if any."""
        if self._current is None:
            if not self._waiting:
                return []
            gateway_id, message = self._waiting.popleft()
            self._current = gateway_id, message, self._prove(message)
            self._begun_at = self.clock()
        started_at = self.clock()
        if started_at < self._resume_at and self.scheduler.has_work:
            return []
        gateway_id, message, steps = self._current
        try:
            next(steps)
        except StopIteration as done:
            proof: Proof = done.value
        except Exception:
            # It ends this proof; those who are served beside it are not to end with it.
            logger.exception("the proof of %s failed", message.adapter.object_key)
            proof = Proof(verdict="proof_failed", message=PROOF_FAILED)
        else:
            now = self.clock()
            self._resume_at = now + (now - started_at) * (1 / _BUSY_SHARE - 1)
            return []
        self._current, self.is_alone = None, False
        # A proof that failed half-way may have left requests running.
        self.scheduler.abort(list(self._outputs))
        self._outputs.clear()
        proof = replace(proof, seconds=self.clock() - self._begun_at)
        return [(gateway_id, ProofResult(proof_id=message.proof_id, proof=proof))]

    # ---- one proof, top to bottom ----

    def _prove(self, message: ProveAdapter) -> _Steps:
        adapter, path = message.adapter, Path(message.object_path)
        longest = self.scheduler.config.max_model_len
        try:
            if message.alone:
                yield from self._wait_for_quiet()
            invocation, all_added = self.reference.own_tokens(path)
            added = tuple(all_added[:_MOST_ADDED])
            prompts = fixed_prompts(self.reference.vocab_size, longest, invocation or added)
            known = [prompt[: len(prompt) - len(added)] for prompt in prompts]
            base, _, _ = yield from self._serve(known, None, num_tokens=1)
            served, device_bytes, load_s = yield from self._serve(prompts, adapter, _NUM_TOKENS)
            sequences = [answer.sequence(invocation) for answer in served]
            compared = yield from self.reference.compare(sequences, path)
        except _Failed as failed:
            return failed.proof
        except AdapterError as error:
            return Proof(verdict="not_served", message=f"{error}; upload the adapter again.")
        except (OSError, MemoryError) as error:
            return Proof(verdict="unavailable", message=f"It cannot be proved now: {error}.")
        proof = judge(base, served, compared, self.precision)
        return replace(proof, device_bytes=device_bytes, cold_load_s=load_s)

    def _wait_for_quiet(self) -> Generator[None, None, None]:
        """Wait for a moment without other requests, none of which may begin from then on.

        Raises _Failed if no such moment comes.
        """
        until = self.clock() + _QUIET_S
        while self.scheduler.groups:
            if self.clock() >= until:
                raise _Failed("unavailable", "The engine was never without requests.")
            yield
        self.is_alone, self._begun_at = True, self.clock()

    def _serve(
        self, prompts: Sequence[tuple[int, ...]], adapter: AdapterRef | None, num_tokens: int
    ) -> Generator[None, None, tuple[list["Answer"], int, float | None]]:
        """Serve all prompts at once, greedily, in the batch class. Raises _Failed.

        Returns the answers, the size of the adapter's slabs, and the seconds until it lay in the
        arena; None if it had left the store before, so that no cold load can be timed.
        """
        entry = self.adapters.entries.get(adapter.object_key) if adapter else None
        is_cold = entry is None or entry.tier == "remote"
        asked_at, load_s, device_bytes = self.clock(), None, 0
        messages = [_request(prompt, adapter, num_tokens) for prompt in prompts]
        for message in messages:
            self._outputs[message.request_id] = []
            if refusal := self.accept(message):
                verdict: Verdict = "not_served" if refusal == "prompt_too_long" else "unavailable"
                raise _Failed(verdict, f"The engine refused a request of a proof: {refusal}.")
        asked = [self._outputs[message.request_id] for message in messages]
        while not all(outputs and outputs[-1].is_last for outputs in asked):
            if adapter and not device_bytes and self.adapters.is_ready(adapter.object_key):
                num_slabs = self.adapters.arena.owned_by(adapter.object_key)
                device_bytes = num_slabs * self.scheduler.layout.slab_bytes
                load_s = self.clock() - asked_at if is_cold else None
            yield
        self._outputs.clear()
        answers = [Answer.of(m, outputs) for m, outputs in zip(messages, asked, strict=True)]
        return answers, device_bytes, load_s


@dataclass(frozen=True, slots=True)
class Answer:
    """Complete answer to one request of a proof.

    logprobs: one for every token.   prompt_logprobs: one for every token of the prompt but the
    first, if they were asked for.
    """

    message: AddRequest
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @classmethod
    def of(cls, message: AddRequest, outputs: Sequence[RequestOutput]) -> "Answer":
        """Make an answer from a request's outputs. Raises _Failed if the answer is not complete."""
        last = outputs[-1]
        if last.error == NOT_FINITE and message.adapter:
            raise _Failed(
                "not_finite",
                "Served on fixed prompts it gives values that are not finite; its weights or its "
                "scale are too large, train again.",
            )
        if last.stop_cause != "max_tokens":
            is_passing = last.stop_cause in _PASSING or message.adapter is None
            reason = last.error or last.stop_cause
            verdict: Verdict = "unavailable" if is_passing else "not_served"
            raise _Failed(verdict, f"It could not be served on fixed prompts: {reason}.")
        return cls(
            message,
            tuple(token for output in outputs for token in output.new_token_ids),
            tuple(each for output in outputs for each in output.logprobs or ()),
            tuple(each for output in outputs for each in output.prompt_logprobs or ()),
        )

    def sequence(self, invocation: tuple[int, ...] | None) -> TokenSequence:
        """The prompt and the answer but its last token, for the reference."""
        start = find_adapter_start(self.message.adapter, self.message.prompt_token_ids, invocation)
        assert start is not None, "the prompts hold what invokes it"
        tokens = (*self.message.prompt_token_ids, *self.token_ids[:-1])
        return TokenSequence(tokens, start)


def fixed_prompts(
    vocab_size: int, max_model_len: int, invocation: Sequence[int]
) -> list[tuple[int, ...]]:
    """Prompts that are the same in every proof. An activated LoRA's invocation tokens end them, or
    some of the tokens that an adapter adds to the vocabulary.
    """
    room = max_model_len - _NUM_TOKENS - len(invocation)
    numbers = (n * 0x9E3779B1 >> 7 for n in range(1, 1 << 20))
    return [
        (*(next(numbers) % vocab_size for _ in range(min(length, room))), *invocation)
        for length in _PROMPT_LENGTHS
    ]


def judge(
    base: Sequence[Answer], served: Sequence[Answer], compared: Compared, precision: float
) -> Proof:
    """Judge whether the served logprobs are those of the merged weights.

    base: answers to the same prompts without the adapter. They measure what serving loses to
    rounding, in the same arithmetic.
    """
    if not np.isfinite(compared.merged).all():
        return Proof(
            verdict="not_finite",
            message="Merged into the base weights it gives values that are not finite; its weights "
            "or its scale are too large, train again.",
        )
    before: list[_Row] = []
    rows: list[_Row] = []
    end = 0
    for asked, answer in zip(base, served, strict=True):
        before += enumerate((*asked.prompt_logprobs, *asked.logprobs), start=end)
        end += len(answer.message.prompt_token_ids) + len(answer.token_ids) - 1
        rows += enumerate(answer.logprobs, start=end - len(answer.logprobs))
    effect = max(_distance(row, compared.base[i]) for i, row in rows)
    difference = max(_distance(row, compared.merged[i]) for i, row in rows)
    noise = max(_distance(row, compared.base[i]) for i, row in before)
    lost = _NOISE_FACTOR * noise + _LEAST_NOISE
    base_shift, base_agreement = _of_rounding(compared, rows)
    proof = Proof(
        verdict="passed",
        max_effect=effect,
        max_difference=difference,
        tolerance=lost + precision * effect,
        num_prompts=len(served),
        num_tokens=len(rows),
        base_shift=base_shift,
        base_agreement=base_agreement,
    )
    if np.array_equal(compared.base, compared.merged):
        message = "On fixed prompts it changes nothing at all; save the adapter after training."
        return replace(proof, verdict="no_effect", message=message)
    if difference > proof.tolerance:
        message = (
            f"On fixed prompts it is not what its merged weights are: logprobs differ by "
            f"{difference:.3g}, {proof.tolerance:.3g} is allowed; its values may be too large for "
            "the precision that is served."
        )
        return replace(proof, verdict="mismatch", message=message)
    if effect <= lost:
        warning = (
            f"On fixed prompts it changes logprobs by {effect:.2g}, which is within what the "
            f"arithmetic loses ({lost:.2g}): too little to be told from nothing."
        )
        return replace(proof, warnings=(warning,))
    if proof.base_shift is not None and proof.base_shift > effect:
        warning = (
            "The base model's weights are rounded to few bits, which changes logprobs by "
            f"{proof.base_shift:.2g} on fixed prompts, more than the adapter does ({effect:.2g}): "
            "measure its quality here before you rely on it."
        )
        return replace(proof, warnings=(warning,))
    return proof


def _of_rounding(compared: Compared, rows: Sequence[_Row]) -> tuple[float | None, float | None]:
    """`base_shift` and `base_agreement` of Proof, which tell of the rounding of the base model."""
    if compared.unrounded is None:
        return None, None
    pairs = [(row, compared.merged[i], compared.unrounded[i]) for i, row in rows]
    shift = max(
        abs(float(merged[token] - whole[token]))
        for row, merged, whole in pairs
        for token, _ in row.top
    )
    same = [int(merged.argmax()) == int(whole.argmax()) for _, merged, whole in pairs]
    return shift, sum(same) / len(same)


def _distance(served: TokenLogprobs, reference: Logprobs) -> float:
    """Largest difference of logprobs over the likeliest served tokens. reference: [vocab]."""
    return max(abs(logprob - float(reference[token])) for token, logprob in served.top)


def _request(prompt: tuple[int, ...], adapter: AdapterRef | None, num_tokens: int) -> AddRequest:
    params = SamplingParams(
        max_tokens=num_tokens,
        temperature=0.0,
        logprobs=_TOP,
        prompt_logprobs=None if adapter else _TOP,
        ignore_eos=True,
    )
    return AddRequest(
        request_id=f"proof-{uuid.uuid4().hex}",
        tenant_id=PROOF_TENANT,
        prompt_token_ids=prompt,
        sampling_params=params,
        token_lease=num_tokens,
        deadline_s=_DEADLINE_S,
        first_token_timeout_s=_DEADLINE_S,
        adapter=adapter,
        cache_salt=PROOF_TENANT,
        priority=Priority.BATCH,
    )
