"""A request's outputs in OpenAI's formats: one whole answer, or server-sent events."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from engine.wire.delivery import Take
from engine.wire.messages import RequestOutput
from registry.errors import Fault
from server.api import answers
from server.api.answer_events import AnswerEvents
from server.api.answers import Answer, Choice, Part, ShownPrompt
from server.api.errors import answer_of
from server.api.logprobs import PromptLogprobs
from server.api.openai import ChatRequest, CompletionRequest
from server.api.padding import Padding
from server.inference.generation import Generation, cost_nanousd
from server.inference.output_stream import OutputStream
from server.inference.ticket import Ticket
from server.text.json_object import JsonObject
from server.text.tokenizer import Detokenizer
from server.text.vocabulary import ExtendedVocabulary
from server.tools.grammar import AnswerForm
from server.tools.parser import AnswerParser
from server.traces import spans

Asked = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class Rendering:
    """Renders the outputs of an admitted request in the format that the request came in."""

    generation: Generation
    asked: Asked
    ticket: Ticket
    padding: Padding

    async def whole(self, outputs: OutputStream) -> tuple[dict[str, object], str | None]:
        """The complete answer, and the digest of the adapter that was applied. Raises Fault."""
        answer, choices = self._answer(), self._choices()
        parts = [Part() for _ in choices]
        last: list[RequestOutput] = []

        def take(output: RequestOutput) -> None:
            parts[output.index].append(choices[output.index].take(output))
            last[:] = [output]

        await self._follow(outputs, take)
        (output,) = last
        body = answer.whole(
            [choice.whole(part) for choice, part in zip(choices, parts, strict=True)],
            self._usage(output, choices),
        )
        if answer.is_chat:
            body["prompt_token_ids"] = choices[0].prompt.token_ids
            body["prompt_logprobs"] = choices[0].listed_prompt
        return body, output.adapter_digest

    async def stream(self, outputs: OutputStream, write: Callable[[bytes], None]) -> None:
        """Write the answer as server-sent events, each in the moment of its output; a fault on the
        way is written as an event and ends it.
        """
        try:
            await self._follow(outputs, self._events(write).take)
        except Fault as fault:
            told = answer_of(fault)
            spans.note_error(told.error["code"] or told.error["type"])
            write(self.padding.last(answers.event(told.body)))

    async def _follow(self, outputs: OutputStream, take: Take) -> None:
        async with self.generation.unpaid_if_broken(self.ticket), aclosing(outputs):
            outputs.follow(take)
            await outputs.end()

    def _events(self, write: Callable[[bytes], None]) -> AnswerEvents:
        choices, options = self._choices(), self.asked.options
        counts = options.include_usage and options.continuous_usage_stats
        return AnswerEvents(
            self._answer(),
            choices,
            self.padding,
            write,
            usage_so_far=(lambda output: self._counts(output, choices)) if counts else None,
            usage=(lambda output: self._usage(output, choices)) if options.include_usage else None,
        )

    def _answer(self) -> Answer:
        answer = Answer(
            self.ticket.request_id,
            self.asked.model,
            isinstance(self.asked, ChatRequest),
            self.ticket.base.model.base_revision,
            self.asked.served_tier,
        )
        spans.note(response_id=answer.id, response_model=answer.model)
        return answer

    def _choices(self) -> list[Choice]:
        """A Choice for each answer: n for the first prompt, then n for the next."""
        tokenizer = self.ticket.text.tokenizer
        vocabulary = tokenizer.vocabulary
        if not self.asked.skip_special_tokens and (words := tokenizer.special_words):
            vocabulary = ExtendedVocabulary(vocabulary, words)
        is_chat = isinstance(self.asked, ChatRequest)
        shown = [
            _shown(self.asked, number, ids, vocabulary)
            for number, ids in enumerate(self.ticket.message.prompts)
        ]
        of_answers = [prompt for prompt in shown for _ in range(self.asked.n)]
        form, told = self.ticket.form, self.ticket.not_enforced
        shows = getattr(self.asked, "include_reasoning", True)
        marks = {token_id: mark.encode() for mark, token_id in form.token_ids.items()}
        return [
            Choice(
                i,
                vocabulary,
                is_chat,
                prompt,
                parser_of(form),
                marks,
                told,
                shows_reasoning=shows,
                shows_stop=self.asked.include_stop_str_in_output,
                names_ids=self.asked.return_tokens_as_token_ids,
            )
            for i, prompt in enumerate(of_answers)
        ]

    def _counts(self, output: RequestOutput, choices: Sequence[Choice]) -> JsonObject:
        """The engine's counts up to this output."""
        has_reasoning = self.ticket.form.template.reasoning is not None
        num_reasoning_tokens = sum(choice.num_reasoning_tokens for choice in choices)
        return answers.counts(output, num_reasoning_tokens if has_reasoning else None)

    def _usage(self, final: RequestOutput, choices: Sequence[Choice]) -> JsonObject:
        """The engine's counts and what they cost under the price that was held."""
        cost, price = cost_nanousd(self.ticket, final), self.ticket.price
        return answers.usage(final, self._counts(final, choices), cost, price.price_version)


def parser_of(form: AnswerForm) -> AnswerParser | None:
    """A parser of one answer; None where there is nothing but content."""
    if not form.tools and form.template.reasoning is None:
        return None
    names = [tool.name for tool in form.tools]
    most_calls = form.use.most_calls if form.use else None
    return AnswerParser(
        form.template,
        names,
        most_calls,
        is_reasoning=form.is_reasoning,
        is_constrained=form.constraint is not None,
        tokens=form.token_ids,
        must_call=bool(form.tools and form.use and form.use.mode == "required"),
    )


def _shown(
    asked: Asked, number: int, token_ids: Sequence[int], vocabulary: Sequence[bytes]
) -> ShownPrompt:
    """The parts of a prompt that its answers show. An echo is the text that was sent, of a chat the
    last message's; where token ids were sent, or some were cut off, it is the text of the tokens.
    """
    echo, num_echoed = "", None
    if isinstance(asked, ChatRequest):
        echo = asked.echoed_text
    elif asked.echo:
        sent, num_echoed = asked.asked_prompts[number], asked.logprobs
        is_whole = isinstance(sent, str) and asked.truncate_prompt_tokens is None
        echo = str(sent) if is_whole else Detokenizer(vocabulary).push(token_ids, final=True)
    logprobs = None
    if asked.num_prompt_logprobs is not None:
        as_ids, num_listed = asked.return_tokens_as_token_ids, asked.prompt_logprobs
        logprobs = PromptLogprobs(vocabulary, token_ids, num_echoed, num_listed, as_ids=as_ids)
    return ShownPrompt(echo, list(token_ids) if asked.return_token_ids else None, logprobs)
