"""Turns sampled tokens into messages: which tokens may leave, and which end an answer."""

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from engine.grammar.constraint import allows, also, without
from engine.grammar.matcher import Mask, mask_bytes
from engine.requests.reasoning import Reasoning
from engine.requests.request import Request, RequestGroup
from engine.steps.batch import StepResult
from engine.wire.messages import (
    FinishReason,
    LeaseLow,
    RequestOutput,
    SamplingParams,
    StopCause,
    TokenLogprobs,
)
from engine.wire.records import RequestProgress

_LEASE_LOW_TOKENS = 64
_LEASE_WAIT_S = 2.0
"""Seconds that an answer waits at the end of its lease for a longer one."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How and why an answer ends.

    num_stop_bytes: how many of the text's last bytes belong to a stop string or follow it.
    retry_after_s: seconds after which a retry may succeed, if known.
    """

    reason: FinishReason
    cause: StopCause
    error: str | None = None
    retry_after_s: float | None = None
    num_stop_bytes: int = 0


class Outputs:
    """Collects what answers get, in order; `take` hands it over.

    vocabulary: token id -> bytes, for stop strings.   clock: seconds.
    result: what has been collected since then.
    unleased: answers that have used up their lease, and until when they wait for a longer one.
    """

    def __init__(
        self,
        max_model_len: int,
        vocabulary: Sequence[bytes],
        eos_token_ids: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        self.max_model_len = max_model_len
        self._vocabulary = vocabulary
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self.result = StepResult()
        self.unleased: dict[Request, float] = {}

    def take(self, step: int) -> StepResult:
        """Take what was collected since the last call, as the result of this step."""
        taken, self.result = self.result, StepResult()
        taken.step = step
        return taken

    def note_progress(self, request: Request, new_token_ids: tuple[int, ...]) -> None:
        """Note for the journal how far an answer has come."""
        group = request.group
        progress = RequestProgress(
            request.request_id,
            group.num_prompt_tokens_done,
            new_token_ids,
            request.index,
            group.num_cached_tokens,
        )
        self.result.progress.append(progress)

    def add_tokens(
        self, request: Request, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> Ending | None:
        """Add tokens up to the answer's end, which are sent or held back. Returns the end, None if
        the answer goes on.   logprobs: one for each token, if they are wanted.
        """
        if request.group.first_token_at is None:
            request.group.first_token_at = self._clock()
        if logprobs:
            request.held_logprobs.extend(logprobs)
        released: list[int] = []
        for token_id in token_ids:
            ending = self._add_token(request, token_id, released)
            if ending:
                break
            self._announce_low_lease(request)
        if ending or released:
            self._emit(request, released, ending)
        return ending

    def _add_token(self, request: Request, token_id: int, released: list[int]) -> Ending | None:
        """Add a token, and to `released` what may leave now. Returns the answer's end, if any."""
        request.output_token_ids.append(token_id)
        if request.reasoning is not None:
            request.reasoning.push(token_id, self._vocabulary[token_id])
        num_stop_bytes, params = None, request.params
        if params.stop and len(request.output_token_ids) > params.min_tokens:
            sure, num_stop_bytes = request.stops.push(token_id, self._vocabulary[token_id])
            released += sure
        else:
            released.append(token_id)
        count = len(request.output_token_ids)
        ending = self.ending(request, token_id, count, num_stop_bytes)
        if ending is None and request.is_unleased:
            self.unleased[request] = self._clock() + _LEASE_WAIT_S
        return ending

    def before_end(self, request: Request, draft_token_ids: Sequence[int]) -> Sequence[int]:
        """The drafts that are certain not to end the answer if all of them are accepted, and for
        which the same tokens are banned.

        A token that would end it is not drafted, but is chosen behind the drafts before it. So no
        step chooses a token that the answer has no place for. If a token is pending, the first
        draft is a guess at it, and those behind are certain not to end the answer even if that
        guess is wrong; only the pending token itself may do so.
        """
        params, count = request.params, len(request.output_token_ids)
        room = min(request.max_tokens - count, self.max_model_len - request.num_tokens) - 1
        if count < params.min_tokens:
            room = min(room, params.min_tokens - count - 1)
        stops = request.stops.copy() if params.stop and count >= params.min_tokens else None
        behind = b""  # a pending token
        for place, token_id in enumerate(draft_token_ids[: max(0, room)]):
            is_stop = self._ends(request, token_id) or token_id in params.stop_token_ids
            if stops is not None and not is_stop:
                word = stops.word(token_id, self._vocabulary[token_id])
                is_stop = stops.push(token_id, word)[1] is not None
                if place and request.num_pending_tokens:
                    behind += word
                    is_stop |= request.stops.may_end(behind)
            if is_stop:
                return draft_token_ids[:place]
        return draft_token_ids[: max(0, room)]

    def masks(
        self, request: Request, drafts: Sequence[int], allowed: Sequence[Mask] | None
    ) -> list[Mask]:
        """The masks of an answer's next token and of those behind drafts, as far as the request's
        parameters leave them.   allowed: by the answer's grammar, or None without one.
        """
        if allowed is None:
            everything = np.full(mask_bytes(len(self._vocabulary)), 255, dtype=np.uint8)
            allowed = [everything] * (1 + len(drafts))
        tokens, bad_words = request.output_token_ids, request.group.bad_words
        said = tokens[max(0, len(tokens) - bad_words.longest) :]
        reasoning, found = copy(request.reasoning), []
        for place, mask in enumerate(allowed):
            banned = self.banned_token_ids(request.params, len(tokens) + place, reasoning)
            bad = bad_words.completing(said)
            forced = None if reasoning is None else reasoning.forced
            found.append(self._masked(request, mask, {*banned, *bad}, forced))
            for draft in drafts[place : place + 1]:
                said.append(draft)
                if reasoning is not None:
                    reasoning.push(draft, self._vocabulary[draft])
        return found

    def _masked(self, request: Request, mask: Mask, banned: set[int], forced: int | None) -> Mask:
        """The mask without banned tokens, or of the forced one alone if it has that.

        EOS is taken out if it is to be ignored, unless the grammar lets nothing else follow. The
        grammar knows the model's EOS only; the request's own may stand wherever that may.
        """
        params = request.params
        if forced is not None and allows(mask, forced):
            return also(np.zeros_like(mask), (forced,))
        if request.constraint is not None:
            if params.eos_token_ids and any(allows(mask, i) for i in self._eos_token_ids):
                mask = also(mask, params.eos_token_ids)
            banned |= self._eos_of(params) if params.ignore_eos else set()
        return without(mask, banned)

    def banned_token_ids(
        self, params: SamplingParams, num_output_tokens: int, reasoning: Reasoning | None
    ) -> tuple[int, ...]:
        """Tokens that would open more reasoning, or end the answer before `min_tokens`."""
        banned = reasoning.banned if reasoning is not None else ()
        if num_output_tokens >= params.min_tokens:
            return banned
        ending = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_of(params))}
        allowed = params.allowed_token_ids
        return banned if allowed and ending.issuperset(allowed) else (*banned, *ending)

    def add_prompt_logprobs(self, request: Request, named: Sequence[TokenLogprobs]) -> None:
        """Send the logprobs of the prompt's next tokens at once."""
        request.num_scored_tokens += len(named)
        self._emit(request, [], None, tuple(named))

    def finish(self, request: Request, ending: Ending, token_ids: Sequence[int] = ()) -> None:
        """End an answer between two tokens, for a reason outside of its text.

        token_ids: those of a beam, which leave only now.
        """
        self._emit(request, list(token_ids), ending)

    def set_beam(
        self, request: Request, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Note the tokens of an answer's beam, which stay here until its search ends."""
        request.output_token_ids = list(token_ids)
        request.held_logprobs = deque(logprobs)

    def announce_beam(self, request: Request) -> None:
        """Tell the gateway that a beam has its first token, or that its lease is low."""
        if request.group.first_token_at is None:
            request.group.first_token_at = self._clock()
        if len(request.output_token_ids) == 1:
            self._emit(request, [], None)
        self._announce_low_lease(request)

    def ending(
        self, request: Request, token_id: int, count: int, num_stop_bytes: int | None = None
    ) -> Ending | None:
        """How an answer ends whose last token this is, as its count-th; None if it goes on."""
        params = request.params
        if self._ends(request, token_id):
            return Ending("stop", "eos", num_stop_bytes=num_stop_bytes or 0)
        if token_id in params.stop_token_ids:
            return Ending("stop", "stop_token", num_stop_bytes=num_stop_bytes or 0)
        if num_stop_bytes is not None:
            return Ending("stop", "stop_string", num_stop_bytes=num_stop_bytes)
        if count >= params.max_tokens:
            return Ending("length", "max_tokens")
        if request.is_beam and count >= request.token_lease:  # a search cannot stop and go on
            return Ending("length", "budget")
        if request.num_prompt_tokens + count >= self.max_model_len:
            return Ending("length", "max_model_len")
        return None

    def _ends(self, request: Request, token_id: int) -> bool:
        """Whether a token is EOS, where that ends the answer."""
        is_heeded = not request.params.ignore_eos or request.constraint is not None
        is_eos = token_id in self._eos_token_ids or token_id in request.params.eos_token_ids
        return is_heeded and is_eos

    def _eos_of(self, params: SamplingParams) -> frozenset[int]:
        return self._eos_token_ids.union(params.eos_token_ids)

    def _emit(
        self,
        request: Request,
        released: list[int],
        ending: Ending | None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> None:
        group = request.group
        if ending:
            released = released + request.stops.flush()
            request.finish_reason, request.stop_cause = ending.reason, ending.cause
        # By place, which takes half the time that it takes by name.
        output = RequestOutput(
            request.request_id,
            group.num_outputs_sent,
            request.index,
            tuple(released),
            self._logprobs(request, len(released)),
            prompt_logprobs,
            request.finish_reason,
            request.stop_cause,
            None,
            group.num_prompt_tokens_done,
            group.num_cached_tokens,
            group.num_completion_tokens,
            group.num_accepted_tokens,
            group.num_rejected_tokens,
            0,
            group.applied_digest,
        )
        if ending:
            output = self._ended(group, output, ending)
        group.num_outputs_sent += 1
        self.result.outputs.append((group.gateway_id, output))

    def _ended(self, group: RequestGroup, output: RequestOutput, ending: Ending) -> RequestOutput:
        """The last output of an answer, and of the request if no other answer goes on."""
        is_last = group.is_over
        if is_last:
            group.end(self._clock())
            self.result.ended.append(group)
        return output._replace(
            error=ending.error,
            num_stop_bytes=ending.num_stop_bytes,
            retry_after_s=ending.retry_after_s,
            timings=group.timings,
            is_last=is_last,
        )

    @staticmethod
    def _logprobs(request: Request, count: int) -> tuple[TokenLogprobs, ...] | None:
        """Take the logprobs of the tokens that leave, which were held back together with them."""
        if request.params.logprobs is None:
            return None
        return tuple(request.held_logprobs.popleft() for _ in range(count))

    def _announce_low_lease(self, request: Request) -> None:
        lease = request.token_lease
        if request.num_leased_tokens > _LEASE_LOW_TOKENS or request.params.max_tokens <= lease:
            return
        if request.announced_lease == lease:
            return
        request.announced_lease = lease
        group = request.group
        low = LeaseLow(
            request_id=group.request_id,
            num_completion_tokens=group.num_completion_tokens,
            token_lease=group.message.token_lease,
        )
        self.result.leases_low.append((group.gateway_id, low))
