"""A request that has been admitted, to the end of its answer: the engine's outputs, as OpenAI
sends them. Begin with `server.inference.admission`, which is what comes before.

The engine's journal decides what is paid; nothing here counts a token.
"""

import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager

from sqlalchemy.engine import Connection

from engine.errors import EngineAwayError, EngineDeadError, RequestRefused
from engine.messages import RequestOutput
from server.api import answers, errors, logs
from server.api.answers import Choice, Part, ShownPrompt
from server.api.errors import ApiError
from server.api.logprobs import PromptLogprobs
from server.api.openai import CompletionRequest
from server.billing.holds import move_hold, void_refused
from server.billing.rating import rated_amounts
from server.database.clock import now_ms
from server.gateway import Gateway
from server.inference import outcomes, prompts
from server.inference.admission import Admitted
from server.inference.prompts import Asked
from server.pool.quarantine import Quarantined
from server.text.tokenizer import Detokenizer

_MAX_MOVES = 2
"""How often a request may move to another engine after its own was found gone."""


async def outputs(gateway: Gateway, admitted: Admitted) -> AsyncGenerator[RequestOutput, None]:
    """The engine's outputs, failures as ApiError; leaving early aborts the request."""
    message = admitted.message
    used_tokens: int | None = 0
    try:
        async with (
            _unpaid_if_broken(gateway, admitted),
            aclosing(_at_engines(gateway, admitted)) as stream,
        ):
            async for output in stream:
                used_tokens = _used_tokens(gateway, output)
                param = prompts.param_of(admitted.asked)
                if failure := outcomes.failure_of(message, output, prompt_param=param):
                    raise failure
                if output.index not in admitted.running.begun and not output.is_of_prompt:
                    _begin(gateway, admitted, output.index)
                if output.is_last:
                    _learn(gateway, admitted, output)
                    logs.note(
                        prompt_tokens=output.num_prompt_tokens,
                        completion_tokens=output.num_completion_tokens,
                    )
                yield output
    except RequestRefused as refused:
        used_tokens = None
        await _void(gateway, message.request_id)
        raise outcomes.refusal_of(refused) from None
    except Quarantined:
        used_tokens = None
        await _void(gateway, message.request_id)
        raise outcomes.quarantined() from None
    except EngineAwayError:
        used_tokens = None
        await _void(gateway, message.request_id)
        raise errors.engine_unavailable() from None
    except EngineDeadError:
        raise errors.engine_unavailable() from None
    finally:
        gateway.load.remove(admitted.running)
        gateway.limiter.settle(admitted.grant, used_tokens)


async def whole(gateway: Gateway, admitted: Admitted) -> tuple[dict[str, object], str | None]:
    """The complete answer, and the digest of the adapter that was applied."""
    choices = _choices(gateway, admitted)
    parts = [Part() for _ in choices]
    async with (
        _unpaid_if_broken(gateway, admitted),
        aclosing(outputs(gateway, admitted)) as stream,
    ):
        async for output in stream:
            parts[output.index].append(choices[output.index].take(output))
    body = admitted.answer.whole(
        [choice.whole(part) for choice, part in zip(choices, parts, strict=True)],
        _usage(admitted, output),
    )
    if admitted.answer.is_chat and choices[0].listed_prompt is not None:
        body["prompt_logprobs"] = choices[0].listed_prompt
    return body, output.adapter_digest


async def events(
    gateway: Gateway,
    admitted: Admitted,
    first: RequestOutput,
    rest: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events; a failure on the way is one error event, and the end."""
    asked, answer = admitted.asked, admitted.answer
    choices = _choices(gateway, admitted)
    # With include_usage every chunk carries the key: null until the last one.
    usage: dict[str, object] = {"usage": None} if asked.includes_usage else {}
    output = first
    async with _unpaid_if_broken(gateway, admitted), aclosing(rest):
        try:
            while True:
                choice = choices[output.index]
                part = choice.take(output)
                if not output.is_of_prompt:
                    if asked.counts_usage:
                        usage = {"usage": answers.counts(output)}
                    yield answers.event(answer.chunk(choice.chunk(part)) | usage)
                if output.is_last:
                    break
                output = await anext(rest)
        except ApiError as error:
            yield answers.event(errors.error_body(error))
            return
    if asked.includes_usage:
        yield answers.event(answer.usage_chunk(_usage(admitted, output)))
    yield answers.DONE


def _begin(gateway: Gateway, admitted: Admitted, index: int) -> None:
    """Note an answer's first token; the first of all is what the client has waited for."""
    if not admitted.running.has_begun:
        waited_s = time.monotonic() - admitted.arrived_at
        gateway.metrics.time_to_first_token.observe(waited_s)
        gateway.first_tokens.note(waited_s)
    gateway.load.begin(admitted.running, index)


async def _at_engines(gateway: Gateway, admitted: Admitted) -> AsyncGenerator[RequestOutput, None]:
    """Outputs of the request's engine, or of another if that one has gone and never had it."""
    for moves_left in reversed(range(_MAX_MOVES + 1)):
        logs.note(engine=admitted.running.engine)
        try:
            stream = gateway.engines.generate(admitted.message, admitted.running.engine)
            async with aclosing(stream):
                async for output in stream:
                    yield output
            return
        except EngineAwayError:
            if not moves_left:
                raise
            await _move(gateway, admitted)


async def _move(gateway: Gateway, admitted: Admitted) -> None:
    """The hold first, as it was before the first engine. Raises EngineAwayError: there is none."""
    request_id, running = admitted.message.request_id, admitted.running
    name = gateway.engines.route(admitted.message, besides=running.engine)
    engine_id = gateway.engines.engine_id(name)
    lifetime_ms = int(gateway.settings.hold_lifetime_s * 1000)

    def write(conn: Connection) -> bool:
        return move_hold(conn, request_id, engine_id, lifetime_ms)

    if not await gateway.database.write(write):
        raise EngineAwayError("its hold has been resolved")
    gateway.running.move(running, name)
    gateway.metrics.moves.inc()


def _used_tokens(gateway: Gateway, output: RequestOutput) -> int:
    """Tokens that count against the limits; a cached one counts as much as the settings say."""
    cached = output.num_cached_tokens
    counted = math.ceil(cached * gateway.settings.cached_token_weight)
    return output.num_prompt_tokens - cached + counted + output.num_completion_tokens


def _learn(gateway: Gateway, admitted: Admitted, final: RequestOutput) -> None:
    """Learn how long answers are that ended by themselves."""
    if admitted.asked.asked_tokens is None and final.finish_reason in ("stop", "length"):
        tokens = final.num_completion_tokens // admitted.message.num_answers
        gateway.learned_tokens.learn(admitted.message.tenant_id, tokens)


async def _void(gateway: Gateway, request_id: str) -> None:
    """The engine never accepted it: the hold need not wait for its expiry."""
    await gateway.database.write(lambda conn: void_refused(conn, request_id, now_ms()))


def _choices(gateway: Gateway, admitted: Admitted) -> list[Choice]:
    """A Choice for each answer: n for the first prompt, then n for the next."""
    vocabulary, is_chat = gateway.tokenizer.vocabulary, admitted.answer.is_chat
    shown = [
        _shown(admitted.asked, n, ids, vocabulary) for n, ids in enumerate(admitted.message.prompts)
    ]
    of_answers = [prompt for prompt in shown for _ in range(admitted.asked.n)]
    return [Choice(i, vocabulary, is_chat, prompt) for i, prompt in enumerate(of_answers)]


def _shown(
    asked: Asked, number: int, token_ids: Sequence[int], vocabulary: Sequence[bytes]
) -> ShownPrompt:
    """What answers show of a prompt. An echo is the text that was sent; where token ids were sent,
    or some were cut off, it is the text of the tokens.
    """
    echo, num_echoed = "", None
    if isinstance(asked, CompletionRequest) and asked.echo:
        sent, num_echoed = asked.prompts[number], asked.logprobs
        is_whole = isinstance(sent, str) and asked.truncate_prompt_tokens is None
        echo = str(sent) if is_whole else Detokenizer(vocabulary).push(token_ids, final=True)
    logprobs = None
    if asked.num_prompt_logprobs is not None:
        logprobs = PromptLogprobs(vocabulary, token_ids, num_echoed, asked.prompt_logprobs)
    return ShownPrompt(echo, token_ids if asked.return_token_ids else None, logprobs)


def _usage(admitted: Admitted, final: RequestOutput) -> dict[str, object]:
    """The engine's counts and what they cost under the price that was held."""
    assert final.finish_reason is not None
    assert final.stop_cause is not None
    cost = rated_amounts(
        final.finish_reason,
        final.stop_cause,
        final.num_prompt_tokens,
        final.num_cached_tokens,
        final.num_completion_tokens,
        admitted.price,
    ).total
    return answers.usage(final, cost, admitted.price.price_version)


# ---- failures ----


@asynccontextmanager
async def _unpaid_if_broken(gateway: Gateway, admitted: Admitted) -> AsyncGenerator[None, None]:
    """A dead engine, or a fault that nobody foresaw: the client gets an error, and pays nothing.

    The engine may have ended the request, and synced that, before it died.
    """
    try:
        yield
    except (ApiError, EngineAwayError, RequestRefused, Quarantined):
        raise
    except Exception:
        await gateway.failures.note(admitted.message.request_id)
        raise
