"""A request's sampling parameters as the engine wants them: texts as the model's tokens."""

from dataclasses import replace

from engine.wire.messages import ReasoningBudget, SamplingParams
from registry.errors import Invalid
from server.inference.generation_request import GenerationRequest
from server.inference.prompts import Prompts
from server.inference.texts import Text


def sampling_of(
    request: GenerationRequest, text: Text, encoded: Prompts, max_tokens: int
) -> SamplingParams:
    """The parameters in full. Raises Invalid.   max_tokens: completion tokens of each answer."""
    words = dict(text.words)
    if request.shows_special_tokens:
        words |= text.tokenizer.special_words
    return replace(
        request.sampling,
        max_tokens=max_tokens,
        bad_words=encoded.bad_words,
        eos_token_ids=text.eos_token_ids,
        words=tuple(words.items()) if request.sampling.stop else (),
        reasoning=_budget(request.thinking_token_budget, text, is_begun=encoded.is_reasoning),
    )


def _budget(max_tokens: int | None, text: Text, *, is_begun: bool) -> ReasoningBudget | None:
    if max_tokens is None:
        return None
    if (reasoning := text.dialect.template.reasoning) is None:
        param = "thinking_token_budget"
        raise Invalid.at(param, "this model writes no reasoning; leave it out")
    ids = text.dialect.token_ids
    closing = text.tokenizer.encode(reasoning.closes[0], add_special_tokens=False)
    marks = {
        ids[mark]: mark.encode() for mark in (*reasoning.opens, *reasoning.closes) if mark in ids
    }
    return ReasoningBudget(
        max_tokens=max_tokens,
        is_begun=is_begun,
        opens=tuple(mark.encode() for mark in reasoning.opens),
        closes=tuple(mark.encode() for mark in reasoning.closes),
        opening=tuple(ids[mark] for mark in reasoning.opens if mark in ids),
        closing=tuple(closing),
        words=tuple({**text.words, **marks}.items()),
    )
