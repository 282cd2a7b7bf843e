"""The searches under way: answers compute the beams of each, and end with the best of them."""

from collections.abc import Iterator

from engine.requests.request import Prompt, Request
from engine.scheduling.beam_search import Beam, BeamSearch
from engine.scheduling.outputs import Ending, Outputs
from engine.scheduling.queues import Queues
from engine.wire.messages import SamplingParams, TokenLogprobs


class BeamSearches:
    """A search for each prompt whose answers are beams. Answers without a beam are parked."""

    def __init__(self, queues: Queues, outputs: Outputs) -> None:
        self._queues = queues
        self._outputs = outputs
        self._searches: dict[Prompt, BeamSearch] = {}

    def __contains__(self, prompt: Prompt) -> bool:
        return prompt in self._searches

    def begin(self, prompt: Prompt, params: SamplingParams, max_model_len: int) -> None:
        """Search for answers to a prompt; the first one computes the only beam so far."""
        num_prompt_tokens = len(prompt.token_ids)
        longest = min(params.max_tokens, max_model_len - num_prompt_tokens)
        self._searches[prompt] = BeamSearch(params, num_prompt_tokens, longest)
        for answer in prompt.answers[1:]:
            answer.is_parked = True

    def take(self, request: Request, told: TokenLogprobs) -> bool:
        """Note what follows a beam, and have the next beams computed if this was the last; return
        whether the search is over.
        """
        prompt, request.is_parked = request.prompt, True
        search, answers = self._searches[prompt], prompt.answers
        if not search.take(answers.index(request), told):
            return False
        forks = search.advance(lambda *last: self._outputs.ending(request, *last))
        if not search.beams:
            return True
        staying = {beam.place for beam in search.beams} - {place for _, place in forks}
        for place, answer in enumerate(answers):
            if place not in staying:
                self._queues.put_back(answer)
        for place, other in forks:
            self._queues.fork(answers[place], answers[other])
        for beam in search.beams:
            answers[beam.place].is_parked = False
            self._outputs.set_beam(answers[beam.place], beam.token_ids, beam.logprobs)
        for beam in search.beams:
            self._outputs.announce_beam(answers[beam.place])
        return False

    def end(self, prompt: Prompt, ending: Ending | None) -> Iterator[Request]:
        """End the answers with the best beams, and yield each once it has ended. They are paid for
        token by token.

        ending: of a search that is cut off. Where it has too few beams, answers stay empty.
        """
        search = self._searches.pop(prompt)
        best, num_shared = search.best(), -search.num_rows
        empty = Beam(ending=ending or best[-1].ending)
        best += [empty] * (len(prompt.answers) - len(best))
        for answer, beam in zip(prompt.answers, best, strict=True):
            self._outputs.set_beam(answer, beam.token_ids, beam.logprobs)
        for answer, beam in zip(prompt.answers, best, strict=True):
            is_whole = ending is None or ending.reason == "length"
            own = beam.ending if is_whole and beam.ending else ending
            assert own is not None, "the search goes on"
            self._outputs.finish(answer, own, beam.token_ids)
            self._outputs.note_progress(answer, beam.token_ids)
            num_shared += len(beam.token_ids)
            yield answer
        self._outputs.result.num_forced += max(0, num_shared)
