"""One request from start to finish, top to bottom: begin here.

    resolve -> request limit -> prefetch -> tokenize -> token limit -> hold -> engine -> answer

Everything before the hold is free to fail. From the hold on the engine's journal decides what is
paid; nothing here counts a token.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from sqlalchemy import Connection

from engine.errors import EngineDeadError, RequestRefused
from engine.messages import AddRequest, RequestOutput
from registry.ref import AdapterRef
from server import answers, errors
from server.answers import Answer, Choice, Part
from server.auth import Identity
from server.clock import now_ms
from server.database import LedgerUnavailable
from server.engines import Quarantined
from server.errors import ApiError
from server.gateway import Gateway
from server.holds import Hold, open_hold, void_refused
from server.limits import RateLimits, Reservation
from server.model_names import resolve_model
from server.openai import ChatRequest, CompletionRequest
from server.prices import Price, price_for
from server.rating import amount_nanousd, rated_amounts
from server.tokenizer import Detokenizer, TemplateError

_INLINE_CHARACTERS = 4096
"""Longer prompts are tokenized on a thread: 4 kB take 0.3 ms, which no stream notices."""
_MESSAGE_CHARACTERS = 64
"""What a template adds to a message, so that thousands of empty ones count as well."""
_HOLD_SLACK_MS = 60_000
"""A hold outlives its request's deadline, so that no clock difference lets it expire first."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that has been admitted and paid for."""

    asked: ChatRequest | CompletionRequest
    message: AddRequest
    answer: Answer
    price: Price
    reservation: Reservation
    arrived_at: float


async def admit(
    gateway: Gateway, identity: Identity, asked: ChatRequest | CompletionRequest
) -> Generation:
    """Everything up to the durable hold. Raises ApiError, RateLimited and the registry's errors."""
    arrived_at = time.monotonic()
    request_id = uuid.uuid4().hex
    adapter, price = await _resolve(gateway, identity, asked, request_id)
    limits = RateLimits(
        requests_per_minute=identity.requests_per_minute,
        tokens_per_minute=identity.tokens_per_minute,
    )
    reservation = gateway.limiter.acquire_request(identity.tenant_id, limits, time.monotonic())
    try:
        _take_seat(gateway, identity, request_id)
        if not gateway.engines.is_ready:
            raise errors.engine_unavailable()
        if adapter:
            await gateway.engines.prefetch(identity.tenant_id, adapter)
        prompt = await _tokenize(gateway, asked)
        asked.check_token_ids(gateway.vocabulary_size)
        max_tokens = _max_tokens(gateway, asked, len(prompt))
        token_lease = asked.n * max_tokens
        gateway.limiter.acquire_tokens(reservation, len(prompt) + token_lease, time.monotonic())
        message = AddRequest(
            request_id=request_id,
            tenant_id=identity.tenant_id,
            prompt_token_ids=tuple(prompt),
            sampling_params=asked.sampling(max_tokens),
            token_lease=token_lease,
            deadline_s=gateway.settings.request_timeout_s,
            first_token_timeout_s=gateway.settings.first_token_timeout_s,
            adapter=adapter,
            cache_salt=identity.cache_salt,
            weight=identity.weight,
            priority=asked.priority,
        )
        await _hold(gateway, identity, asked.model, message, price)
    except BaseException:
        gateway.running.pop(request_id, None)
        reservation.cancel(time.monotonic())
        raise
    answer = Answer.of(
        request_id,
        asked.model,
        isinstance(asked, ChatRequest),
        gateway.base.base_revision,
        asked.served_tier,
    )
    return Generation(asked, message, answer, price, reservation, arrived_at)


async def outputs(gateway: Gateway, generation: Generation) -> AsyncGenerator[RequestOutput, None]:
    """The engine's outputs, failures as ApiError; leaving early aborts the request."""
    request_id = generation.message.request_id
    num_tokens = 0
    try:
        async with (
            _unpaid_if_broken(gateway, generation),
            aclosing(gateway.engines.generate(generation.message)) as stream,
        ):
            async for output in stream:
                is_first = num_tokens == 0
                num_tokens = output.num_prompt_tokens + output.num_completion_tokens
                if failure := _failure(generation, output):
                    raise failure
                if is_first:
                    waited_s = time.monotonic() - generation.arrived_at
                    gateway.metrics.time_to_first_token.observe(waited_s)
                yield output
    except RequestRefused as refused:
        await _void(gateway, request_id)
        raise _refusal(refused) from None
    except Quarantined:
        await _void(gateway, request_id)
        raise errors.invalid_request(
            "The engine died twice while serving exactly this request; change it.",
            code="request_quarantined",
        ) from None
    except EngineDeadError:
        raise errors.engine_unavailable() from None
    finally:
        gateway.running.pop(request_id, None)
        generation.reservation.settle(num_tokens, time.monotonic())


async def whole(gateway: Gateway, generation: Generation) -> tuple[dict[str, object], str | None]:
    """The complete answer, and the digest of the adapter that was applied."""
    choices = _choices(gateway, generation)
    parts = [Part() for _ in choices]
    async with (
        _unpaid_if_broken(gateway, generation),
        aclosing(outputs(gateway, generation)) as stream,
    ):
        async for output in stream:
            parts[output.index].append(choices[output.index].take(output))
    message = generation.message
    prompt = message.prompt_token_ids if generation.asked.return_token_ids else None
    body = generation.answer.whole(
        [choice.whole(part, prompt) for choice, part in zip(choices, parts, strict=True)],
        _usage(generation, output),
    )
    return body, output.adapter_digest


async def events(
    gateway: Gateway,
    generation: Generation,
    first: RequestOutput,
    rest: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events; a failure on the way is one error event, and the end."""
    asked, answer = generation.asked, generation.answer
    choices = _choices(gateway, generation)
    # With include_usage every chunk carries the key: null until the last one.
    nothing = {"usage": None} if asked.includes_usage else {}
    output = first
    async with _unpaid_if_broken(gateway, generation), aclosing(rest):
        try:
            while True:
                choice = choices[output.index]
                part = choice.take(output)
                chunk = answer.chunk(choice.chunk(part, with_token_ids=asked.return_token_ids))
                yield answers.event(chunk | nothing)
                if output.is_last:
                    break
                output = await anext(rest)
        except ApiError as error:
            yield answers.event(errors.error_body(error))
            return
    if asked.includes_usage:
        yield answers.event(answer.usage_chunk(_usage(generation, output)))
    yield answers.DONE


# ---- the steps, in order ----


async def _resolve(
    gateway: Gateway, identity: Identity, asked: ChatRequest | CompletionRequest, request_id: str
) -> tuple[AdapterRef | None, Price]:
    """The adapter that the model's name means, None for the base; and the price of now."""
    request_key = asked.request_key or request_id

    def read(conn: Connection) -> tuple[AdapterRef | None, Price]:
        named = resolve_model(conn, gateway.catalog, identity, asked.model, request_key=request_key)
        ref = named.ref if named else None
        adapter_id = ref.adapter_id if ref else None
        price = price_for(conn, now_ms(), tenant_id=identity.tenant_id, adapter_id=adapter_id)
        return ref, price

    return await gateway.database.read(read)


def _take_seat(gateway: Gateway, identity: Identity, request_id: str) -> None:
    """One of the tenant's max_concurrency, until its answer has ended. Raises 429."""
    running = sum(tenant_id == identity.tenant_id for tenant_id in gateway.running.values())
    if identity.max_concurrency is not None and running >= identity.max_concurrency:
        raise errors.rate_limited(
            f"{running} requests are under way; the limit is {identity.max_concurrency}.",
            retry_after_s=1.0,
        )
    gateway.running[request_id] = identity.tenant_id


async def _tokenize(gateway: Gateway, asked: ChatRequest | CompletionRequest) -> list[int]:
    """Exact prompt tokens, off the event loop when they are many."""
    if isinstance(asked, ChatRequest):
        messages = [message.plain() for message in asked.messages]
        size = sum(len(message["content"]) + _MESSAGE_CHARACTERS for message in messages)

        def encode() -> list[int]:
            text = gateway.tokenizer.render(messages)
            return gateway.tokenizer.encode(text, add_special_tokens=False)
    else:
        prompt = asked.prompt
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return _checked_ids(gateway, [token for token in prompt if isinstance(token, int)])
        if isinstance(prompt, list) and len(prompt) != 1:
            raise errors.invalid_request("Send one prompt per request.", param="prompt")
        text = str(prompt[0]) if isinstance(prompt, list) else prompt
        size = len(text)

        def encode() -> list[int]:
            return gateway.tokenizer.encode(text)

    try:
        ids = encode() if size <= _INLINE_CHARACTERS else await asyncio.to_thread(encode)
    except TemplateError as error:
        raise errors.invalid_request(str(error), param="messages") from None
    return _checked_ids(gateway, ids)


def _checked_ids(gateway: Gateway, ids: list[int]) -> list[int]:
    if not ids:
        raise errors.invalid_request("The prompt is empty.", param="prompt")
    if max(ids) >= gateway.vocabulary_size:
        raise errors.unknown_token_id(gateway.vocabulary_size, param="prompt")
    return ids


def _max_tokens(
    gateway: Gateway, asked: ChatRequest | CompletionRequest, num_prompt_tokens: int
) -> int:
    """What was asked for, or all that the context leaves. Raises context_length_exceeded."""
    limit = gateway.max_model_len
    wanted = asked.asked_tokens
    if num_prompt_tokens + (wanted or 1) > limit:
        raise errors.context_length_exceeded(
            limit=limit, asked=num_prompt_tokens + (wanted or 1), param=_prompt_param(asked)
        )
    return wanted or limit - num_prompt_tokens


def _prompt_param(asked: ChatRequest | CompletionRequest) -> str:
    return "messages" if isinstance(asked, ChatRequest) else "prompt"


async def _hold(
    gateway: Gateway, identity: Identity, model: str, message: AddRequest, price: Price
) -> None:
    """One durable row before the engine hears of it; without it nothing is served."""
    num_prompt_tokens, now = len(message.prompt_token_ids), now_ms()
    adapter = message.adapter
    hold = Hold(
        request_id=message.request_id,
        tenant_id=identity.tenant_id,
        key_id=identity.key_id,
        model=model,
        price_version=price.price_version,
        amount_nanousd=amount_nanousd(num_prompt_tokens, 0, message.token_lease, price),
        num_prompt_tokens=num_prompt_tokens,
        token_lease=message.token_lease,
        engine_id=gateway.engines.engine_ids()[0],
        created_at_ms=now,
        expires_at_ms=now + int(message.deadline_s * 1000) + _HOLD_SLACK_MS,
        adapter_id=adapter.adapter_id if adapter else None,
        adapter_version=adapter.version if adapter else None,
        adapter_digest=adapter.digest if adapter else None,
    )
    try:
        await gateway.database.write(lambda conn: open_hold(conn, hold))
    except LedgerUnavailable:
        raise errors.metering_unavailable() from None


async def _void(gateway: Gateway, request_id: str) -> None:
    """The engine never accepted it: the hold need not wait for its expiry."""
    await gateway.database.write(lambda conn: void_refused(conn, request_id, now_ms()))


def _choices(gateway: Gateway, generation: Generation) -> list[Choice]:
    """One for each of the n answers."""
    vocabulary = gateway.tokenizer.vocabulary
    echo = _echo(generation, vocabulary)
    is_chat = generation.answer.is_chat
    return [Choice(index, vocabulary, is_chat, echo) for index in range(generation.asked.n)]


def _echo(generation: Generation, vocabulary: Sequence[bytes]) -> str:
    """The prompt as it was sent; of token ids, their text."""
    asked = generation.asked
    if not isinstance(asked, CompletionRequest) or not asked.echo:
        return ""
    if isinstance(asked.prompt, str):
        return asked.prompt
    if isinstance(asked.prompt[0], str):
        return asked.prompt[0]
    return Detokenizer(vocabulary).push(generation.message.prompt_token_ids, final=True)


def _usage(generation: Generation, final: RequestOutput) -> dict[str, object]:
    """The engine's counts and what they cost under the price that was held."""
    assert final.finish_reason is not None
    assert final.stop_cause is not None
    cost = rated_amounts(
        final.finish_reason,
        final.stop_cause,
        final.num_prompt_tokens,
        final.num_cached_tokens,
        final.num_completion_tokens,
        generation.price,
    ).total
    return answers.usage(final, cost, generation.price.price_version)


# ---- failures ----


@asynccontextmanager
async def _unpaid_if_broken(gateway: Gateway, generation: Generation) -> AsyncGenerator[None, None]:
    """A dead engine, or a fault that nobody foresaw: the client gets an error, and pays nothing.

    The engine may have ended the request, and synced that, before it died.
    """
    try:
        yield
    except (ApiError, RequestRefused, Quarantined):
        raise
    except Exception:
        await gateway.failures.note(generation.message.request_id)
        raise


def _failure(generation: Generation, output: RequestOutput) -> ApiError | None:
    """Of a request that the engine accepted and could not serve.

    Never in the engine's words: `output.error` may name keys and hosts.
    """
    message = generation.message
    if not output.num_completion_tokens:
        if output.stop_cause == "first_token_timeout":
            return errors.first_token_timeout(message.first_token_timeout_s)
        if output.stop_cause == "deadline":
            return errors.request_timeout(message.deadline_s)
    if output.finish_reason != "error":
        return None
    match output.stop_cause:
        case "adapter_loading":
            return errors.adapter_loading(output.retry_after_s)
        case "adapter_missing":
            return errors.adapter_missing()
        case "adapter_corrupt":
            return errors.adapter_corrupt()
        case "adapter_incompatible":
            return errors.adapter_incompatible()
        case "adapter_too_large":
            return errors.adapter_too_large()
        case "adapter_not_invoked":
            return errors.adapter_not_invoked(param=_prompt_param(generation.asked))
        case "gateway_lost":
            return errors.engine_unavailable()
    return errors.internal_error()


def _refusal(refused: RequestRefused) -> ApiError:
    if refused.reason == "queue_full":
        return errors.overloaded()
    if refused.reason == "metering_unavailable":
        return errors.metering_unavailable()
    return errors.internal_error()
