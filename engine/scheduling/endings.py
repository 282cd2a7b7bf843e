"""Ends answers, and gives back what they held."""

import math

from engine.drafts.speculation import Speculation
from engine.requests.request import Prompt, Request, RequestGroup
from engine.scheduling.beam_searches import BeamSearches
from engine.scheduling.outputs import Ending, Outputs
from engine.scheduling.queues import Queues


class Endings:
    """Ends every request of the engine once.   groups: requests that have not ended, by id."""

    def __init__(
        self, queues: Queues, outputs: Outputs, searches: BeamSearches, speculation: Speculation
    ) -> None:
        self.groups: dict[str, RequestGroup] = {}
        self._queues = queues
        self._outputs = outputs
        self._searches = searches
        self._speculation = speculation
        self._first_due_at = math.inf  # no request is overdue before

    def expect(self, group: RequestGroup) -> None:
        """Take in a request that is to end."""
        self.groups[group.request_id] = group
        self._first_due_at = min(self._first_due_at, _due_at(group))

    def end_group(self, group: RequestGroup, ending: Ending) -> None:
        """End every answer that has not ended yet."""
        for prompt in group.prompts:
            if prompt in self._searches:
                self.end_search(prompt, ending)
        for request in group.requests:
            if request.finish_reason is None:
                self._outputs.finish(request, ending)
                self.put_away(request)

    def end_search(self, prompt: Prompt, ending: Ending | None) -> None:
        """End the answers to a prompt with the best beams.   ending: if the search is cut off."""
        for answer in self._searches.end(prompt, ending):
            self.put_away(answer)

    def put_away(self, request: Request) -> None:
        """Give back everything that an ended answer held."""
        self._queues.remove(request)
        self._speculation.end(request)
        if request.group.is_over:
            if request.adapter_key:
                self._queues.adapters.leave(request.adapter_key, request.request_id)
            del self.groups[request.request_id]

    def end_overdue(self, now: float) -> None:
        """End the requests without a token or an end in time, and the answers that have waited long
        enough for a longer lease.
        """
        if now >= self._first_due_at:
            for group in list(self.groups.values()):
                waited_s, message = now - group.arrived_at, group.message
                if waited_s >= message.deadline_s:
                    self.end_group(group, Ending("length", "deadline"))
                elif group.first_token_at is None and waited_s >= message.first_token_timeout_s:
                    self.end_group(group, self._late(group))
            self._first_due_at = min(map(_due_at, self.groups.values()), default=math.inf)
        for request, until in list(self._outputs.unleased.items()):
            is_waiting = request.finish_reason is None and request.is_unleased
            if is_waiting and now < until:
                continue
            del self._outputs.unleased[request]
            if is_waiting:
                self._outputs.finish(request, Ending("length", "budget"))
                self.put_away(request)

    def _late(self, group: RequestGroup) -> Ending:
        """Ending of a request without a token in time, for lack of its adapter or of a seat."""
        adapters = self._queues.adapters
        if group.adapter and not adapters.is_ready(key := group.adapter.object_key):
            retry_after_s = adapters.retry_after_s(key)
            return Ending("error", "adapter_loading", "still on its way", retry_after_s)
        return Ending("error", "first_token_timeout")


def _due_at(group: RequestGroup) -> float:
    """Time from which the group is overdue, if it does not get a token or its end before."""
    timeout_s = group.message.deadline_s
    if group.first_token_at is None:
        timeout_s = min(timeout_s, group.message.first_token_timeout_s)
    return group.arrived_at + timeout_s
