"""Beam search: the answers to one prompt that are the likeliest as a whole, by vLLM's algorithm.

Each beam proposes the `2 * width` likeliest tokens after it. Where such a token ends an answer, the
beam with that token is one that has ended, however unlikely it is. Of all other proposals, the
`width` likeliest are the beams that go on. At last, the answers are the best of those that ended
and of those that reached the greatest length.

A beam's score is the sum of its logprobs divided by `length ** length_penalty`; the length is that
of prompt and answer without the token that ended it. vLLM searches up to the greatest length; here
the search ends as soon as no beam that goes on can become one of the best, with the same answers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter

from engine.scheduling.outputs import Ending
from engine.wire.messages import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """The beginning of an answer, or all of it.

    place: number of the answer, among those to the prompt, that computes the beam.
    logprobs: one for each token if they are wanted.   total: sum of the tokens' logprobs.
    ending: None as long as it goes on.
    """

    place: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    ending: Ending | None = None


class BeamSearch:
    """A search for the `params.n` best answers to a prompt.

    beams: those that go on; at first one without tokens.
    num_rows: how many rows of steps have chosen a token for it.
    longest: most tokens that an answer can have.
    """

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, longest: int) -> None:
        self.beams = [Beam()]
        self.num_rows = 0
        self._width, self._num_told = params.n, params.logprobs
        self._num_prompt_tokens, self._longest = num_prompt_tokens, longest
        self._length_penalty = params.length_penalty
        self._told: dict[int, TokenLogprobs] = {}  # by place of the beam before
        self._ended: list[Beam] = []

    def take(self, place: int, told: TokenLogprobs) -> bool:
        """Take the likeliest tokens after a beam; return whether those of all beams are known."""
        self.num_rows += 1
        self._told[place] = told
        return len(self._told) == len(self.beams)

    def advance(self, ending_of: Callable[[int, int], Ending | None]) -> list[tuple[int, int]]:
        """Choose the beams that go on; none do if the search is over.

        ending_of: how an answer ends that has this token as its last, and this many tokens.
        Result: (place, other place) of each beam that goes on at another place as well.
        """
        length = 1 + len(self.beams[0].token_ids)
        proposals = [
            (beam.total + logprob, beam, token_id, logprob)
            for beam in self.beams
            for token_id, logprob in self._told[beam.place].top[: 2 * self._width]
        ]
        proposals.sort(key=itemgetter(0), reverse=True)
        kept: list[Beam] = []
        for total, beam, token_id, logprob in proposals:
            ending = ending_of(token_id, length)
            if ending is not None and ending.reason == "stop":
                self._ended.append(self._longer(beam, token_id, logprob, total, ending))
            elif len(kept) < self._width:
                kept.append(self._longer(beam, token_id, logprob, total, ending))
        self._told = {}
        self._ended = self._best_of(self._ended)
        if kept and kept[0].ending is not None:  # they have reached the greatest length
            self._ended, kept = self._best_of(self._ended + kept), []
        elif kept and self._is_decided(kept[0]):
            kept = []
        self.beams, forks = self._placed(kept)
        return forks

    def best(self) -> list[Beam]:
        """The best of all beams, the best one first, at most `width`."""
        return self._best_of(self._ended + self.beams)

    def _longer(
        self, beam: Beam, token_id: int, logprob: float, total: float, ending: Ending | None
    ) -> Beam:
        logprobs = beam.logprobs
        if self._num_told is not None:
            top = self._told[beam.place].top[: self._num_told]
            logprobs = (*logprobs, TokenLogprobs(logprob=logprob, top=top))
        return Beam(beam.place, (*beam.token_ids, token_id), logprobs, total, ending)

    def _placed(self, beams: list[Beam]) -> tuple[list[Beam], list[tuple[int, int]]]:
        """Give every beam a place of its own: the likeliest child of a beam stays at its place."""
        taken = {beam.place for beam in beams}
        free = [place for place in range(self._width) if place not in taken]
        placed: list[Beam] = []
        forks: list[tuple[int, int]] = []
        for beam in beams:
            if beam.place in taken:
                taken.remove(beam.place)
                placed.append(beam)
            else:
                forks.append((beam.place, free.pop(0)))
                placed.append(replace(beam, place=forks[-1][1]))
        return placed, forks

    def _is_decided(self, likeliest: Beam) -> bool:
        """Whether the best have ended: the likeliest of the others only becomes less likely.

        A greater length raises its score as much as it can, or lowers it.
        """
        if len(self._ended) < self._width:
            return False
        lengths = len(likeliest.token_ids), self._longest
        most = max(self._score(likeliest.total, length) for length in lengths)
        return self._score_of(self._ended[-1]) >= most

    def _best_of(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=self._score_of, reverse=True)[: self._width]

    def _score_of(self, beam: Beam) -> float:
        has_stopped = beam.ending is not None and beam.ending.reason == "stop"
        return self._score(beam.total, len(beam.token_ids) - has_stopped)

    def _score(self, total: float, num_tokens: int) -> float:
        return total / math.pow(self._num_prompt_tokens + num_tokens, self._length_penalty)
