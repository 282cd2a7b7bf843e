"""Beam search written down as vLLM has it, the reference of `engine.scheduling.beam_search`.

It searches up to the greatest length in any case, and keeps every beam that has ended.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from engine.wire.messages import AddRequest
from tests.engine.fakes import EOS, adapter_of, fake_told

Propose = Callable[[Sequence[int]], Iterable[tuple[int, float]]]
"""The likeliest tokens after those of an answer, with their logprobs, the likeliest first."""


def vllm_beams(
    propose: Propose,
    num_prompt_tokens: int,
    width: int,
    longest: int,
    ends: Collection[int] = (),
    length_penalty: float = 1.0,
) -> list[tuple[list[int], float, str]]:
    """The best `width` answers: their tokens, the sum of their logprobs and their finish reason.

    propose: gives 2 * width tokens.   ends: tokens that end an answer.
    """

    def score(total: float, num_tokens: int) -> float:
        return total / (num_prompt_tokens + num_tokens) ** length_penalty

    beams: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[float, tuple[list[int], float, str]]] = []
    for _ in range(longest):
        longer = [
            ([*tokens, token], total + logprob)
            for tokens, total in beams
            for token, logprob in propose(tokens)
        ]
        longer.sort(key=lambda beam: -beam[1])  # which decides between equal scores
        ended = [beam for beam in longer if beam[0][-1] in ends]
        done += [(score(total, len(ids) - 1), (ids, total, "stop")) for ids, total in ended]
        beams = [beam for beam in longer if beam[0][-1] not in ends][:width]
    done += [(score(total, len(tokens)), (tokens, total, "length")) for tokens, total in beams]
    return [answer for _, answer in sorted(done, key=lambda it: -it[0])[:width]]


def expected_beams(
    message: AddRequest, longest: int, window: int | None = None, invocation: Sequence[int] = ()
) -> list[tuple[list[int], str]]:
    """Tokens and finish reasons of the n answers that a beam search gives."""
    prompt, params = message.prompt_token_ids, message.sampling_params
    adapter = adapter_of(message, invocation)

    def propose(tokens: Sequence[int]) -> Sequence[tuple[int, float]]:
        history = (*prompt, *tokens)[-(window or longest + len(prompt)) :]
        return fake_told(0, 2 * params.n, history, *adapter).top

    ends = () if params.ignore_eos else (EOS,)
    best = vllm_beams(propose, len(prompt), params.n, longest, ends, params.length_penalty)
    return [(tokens, reason) for tokens, _, reason in best]
