"""Drafts from text: what the prompt, the prediction or the answer itself says after such words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.drafts.ngrams import LONGEST_MATCH, Draft, NgramIndex
from engine.drafts.pools import DraftPools, PoolKey
from engine.requests.request import Request

_BEGUN = 2
"""Tokens of the prompt that are kept before a text, so that its first token is a match of 3."""

_MOST_TOKENS = 8192
"""Tokens of a prompt that are looked at, the last ones, and of a prediction: 2.5 MB each."""


@dataclass(slots=True)
class _Text:
    """The text that an answer may repeat.   num_tokens: its own ones before this are in the index,
    or are not looked at.
    """

    index: NgramIndex
    num_tokens: int


class TextDrafter:
    """Drafts for answers from their own prompts, predictions and beginnings, and from the pools of
    those tenants that want it.
    """

    def __init__(self, pools: DraftPools) -> None:
        self._pools = pools
        self._texts: dict[Request, _Text] = {}

    def drafts(self, requests: Sequence[Request], most: int) -> Mapping[Request, Draft]:
        """See engine.drafts.speculation.Drafter."""
        return {request: self._draft(request, most) for request in requests}

    def end(self, request: Request) -> None:
        """See engine.drafts.speculation.Drafter."""
        self._texts.pop(request, None)
        if request.message.shares_drafts and request.output_token_ids:
            said = (*request.prompt.token_ids[-_BEGUN:], *request.output_token_ids)
            self._pools.add(_pool_of(request), said)

    def _draft(self, request: Request, most: int) -> Draft:
        text = self._texts.get(request)
        if text is None:
            start = max(0, request.num_tokens - _MOST_TOKENS)
            text = self._texts[request] = _Text(_predicted(request), start)
        text.index.extend(request.tokens(text.num_tokens, request.num_tokens))
        text.num_tokens = request.num_tokens
        own = text.index.continuation(most)
        if not request.message.shares_drafts:
            return own
        tail = request.tokens(max(0, request.num_tokens - LONGEST_MATCH), request.num_tokens)
        pooled = self._pools.find(_pool_of(request), tail, most)
        return pooled if pooled.match > own.match else own


def _pool_of(request: Request) -> PoolKey:
    return request.tenant_id, request.group.digest


def _predicted(request: Request) -> NgramIndex:
    """An index of the predicted text, if there is one, as if it had followed the prompt before."""
    index = NgramIndex()
    if predicted := request.message.predicted_token_ids:
        index.add_text((*request.prompt.token_ids[-_BEGUN:], *predicted[:_MOST_TOKENS]))
    return index
