"""Drafts from text: what the prompt, the prediction or the answer itself says after such words."""

from dataclasses import dataclass

from engine.drafts.ngrams import Draft, NgramIndex
from engine.request import Request


@dataclass(slots=True)
class _Text:
    """The text that an answer may repeat.   num_tokens: how many of its own are in the index."""

    index: NgramIndex
    num_tokens: int = 0


class TextDrafter:
    """Drafts for answers from their own prompts, predictions and beginnings."""

    def __init__(self) -> None:
        self._texts: dict[Request, _Text] = {}

    def draft(self, request: Request, most: int) -> Draft:
        """See engine.speculation.Drafter."""
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(_predicted(request))
        text.index.extend(request.tokens(text.num_tokens, request.num_tokens))
        text.num_tokens = request.num_tokens
        return text.index.continuation(most)

    def forget(self, request: Request) -> None:
        """See engine.speculation.Drafter."""
        self._texts.pop(request, None)


def _predicted(request: Request) -> NgramIndex:
    """An index of the predicted text, if there is one, as if it had followed the prompt before."""
    index = NgramIndex()
    if predicted := request.message.predicted_token_ids:
        index.add_text((*request.prompt.token_ids[-2:], *predicted))
    return index
