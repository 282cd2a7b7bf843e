"""Completions over HTTP, around an engine that says what the test wants it to say."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from engine.errors import EngineAwayError, EngineDeadError, RequestRefused
from engine.messages import AddRequest, RequestOutput, TokenLogprobs, Welcome
from registry.ref import AdapterRef
from server.admin_key import AdminKey
from server.answers import Choice
from server.app import create_app
from server.assembly import assemble
from server.clock import now_ms
from server.database import DEFAULT_FILE
from server.gateway import Gateway
from server.holds import void_refused
from server.keys import create_key
from server.ledger_tables import holds
from server.limiter.memory import MemoryLimiter
from server.pool.quarantine import Quarantined, fingerprint
from server.prices import ensure_price
from server.rating import amount_nanousd
from server.settings import Settings
from tests.server.factories import NOW_MS, make_tenant

DEMO = Path(__file__).parents[2] / "demo" / "model"
MAX_MODEL_LEN = 512
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
TEXT = {"model": "base", "prompt": "Hello there", "max_tokens": 9}

Script = Callable[[AddRequest], Sequence[RequestOutput | Exception]]


def token_ids(index: int) -> tuple[int, ...]:
    """What the engine says in its index-th answer."""
    return tuple(range(40 + 10 * index, 43 + 10 * index))


def answer_all(message: AddRequest) -> list[RequestOutput]:
    """Three tokens for each answer, one by one and in turn; the last output has the counts.

    Before them logprobs of the prompts, where they are asked for: a piece for each.
    """
    params = message.sampling_params
    said = [(index, place) for place in range(3) for index in range(message.num_answers)]
    outputs = []
    if params.prompt_logprobs is not None:
        outputs = [
            RequestOutput(
                request_id=message.request_id, seq=number, index=number * params.n,
                prompt_logprobs=tuple(prompt_score(token) for token in prompt[1:]),
            )
            for number, prompt in enumerate(message.prompts)
        ]  # fmt: skip
    for seq, (index, place) in enumerate(said):
        token = token_ids(index)[place]
        named = (TokenLogprobs(logprob=-0.5, top=((token, -0.5), (7, -1.5))),)
        outputs.append(
            RequestOutput(
                request_id=message.request_id,
                seq=len(outputs),
                index=index,
                new_token_ids=(token,),
                logprobs=None if params.logprobs is None else named,
                finish_reason="length" if place == 2 else None,
                stop_cause="max_tokens" if place == 2 else None,
                num_prompt_tokens=message.num_prompt_tokens,
                num_completion_tokens=seq + 1,
                is_last=seq + 1 == len(said),
            )
        )
    return outputs


def prompt_score(token: int) -> TokenLogprobs:
    return TokenLogprobs(logprob=-token / 8, top=((7, -0.25), (token, -token / 8)))


def end_at_once(**fields: Any) -> Script:
    """The engine ends the request before any token."""

    def script(message: AddRequest) -> list[RequestOutput]:
        return [RequestOutput(request_id=message.request_id, seq=0, is_last=True, **fields)]

    return script


@dataclass
class FakeEngines:
    """Follows its script, and remembers what it was asked. away: those of `names` that have gone,
    as a request finds out there.
    """

    script: Script = answer_all
    names: tuple[str, ...] = ("engine",)
    away: frozenset[str] = frozenset()
    is_ready: bool = True
    asked: list[AddRequest] = field(default_factory=list)
    welcome: Welcome = field(
        default_factory=lambda: Welcome(
            engine_id="engine-1", epoch=1, base_revision="b" * 64, max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8, device="fake", dtype="float32",
        )
    )  # fmt: skip

    max_model_len = MAX_MODEL_LEN

    @property
    def welcomes(self) -> tuple[Welcome, ...]:
        return (self.welcome,) if self.is_ready else ()

    def route(self, message: AddRequest, besides: str | None = None) -> str:
        for name in self.names:
            if name != besides:
                return name
        raise EngineAwayError("no engine is ready")

    def engine_id(self, name: str) -> str:
        return f"id of {name}"

    async def prefetch(self, tenant_id: str, adapter: AdapterRef, name: str) -> None:
        raise AssertionError("the base model needs no adapter")

    async def generate(self, message: AddRequest, name: str) -> AsyncGenerator[RequestOutput, None]:
        self.asked.append(message)
        if name in self.away:
            raise EngineAwayError("the engine leaves")
        for said in self.script(message):
            if isinstance(said, Exception):
                raise said
            yield said


@dataclass
class Product:
    """The gateway's application with one tenant, called without a socket."""

    gateway: Gateway
    engines: FakeEngines
    api_key: str

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(create_app(self.gateway))
            headers = {"authorization": f"Bearer {self.api_key}"}
            async with httpx.AsyncClient(
                transport=transport, base_url="http://gateway", headers=headers
            ) as client:
                return await client.post(f"/v1/{path}", json=body)

        return asyncio.run(call())

    def chat(self, **changes: Any) -> httpx.Response:
        return self.post("chat/completions", CHAT | changes)

    def text(self, **changes: Any) -> httpx.Response:
        return self.post("completions", TEXT | changes)

    def words(self, ids: Sequence[int]) -> str:
        return b"".join(self.gateway.tokenizer.vocabulary[i] for i in ids).decode()

    def hold(self) -> sa.Row[Any]:
        """The newest."""
        request_id = self.engines.asked[-1].request_id
        query = sa.select(holds).where(holds.c.request_id == request_id)
        return self.gateway.database.write_sync(lambda conn: conn.execute(query).one())


@pytest.fixture
def product(migrated_sqlite: Path, tmp_path: Path) -> Iterator[Product]:
    shutil.copy(migrated_sqlite, tmp_path / DEFAULT_FILE)
    settings = Settings(
        model=str(DEMO), model_name="base", data_dir=tmp_path, first_token_timeout_s=12
    )
    engines = FakeEngines()
    built = assemble(settings, DEMO, AdminKey("admin"))
    # Its clock stands still, or limits would refill while a test runs.
    gateway = replace(built, engines=engines, limiter=MemoryLimiter(lambda: NOW_MS))
    gateway.database.write_sync(lambda conn: ensure_price(conn, NOW_MS))
    tenant = make_tenant(gateway.database, tokens_per_minute=1000)
    api_key = gateway.database.write_sync(
        lambda conn: create_key(conn, tenant.tenant_id, "a key", gateway.pepper, now_ms=NOW_MS)[1]
    )
    yield Product(gateway, engines, api_key)
    gateway.database.close()
    asyncio.run(built.engines.close())


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_n_answers_are_n_choices_in_order_and_one_usage(product: Product) -> None:
    body = product.chat(n=3, return_token_ids=True).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    for index, choice in enumerate(body["choices"]):
        assert choice["token_ids"] == list(token_ids(index))
        assert choice["message"]["content"] == product.words(token_ids(index))
        assert choice["finish_reason"] == "length"
    prompt = len(product.engines.asked[0].prompt_token_ids)
    assert body["usage"]["prompt_tokens"] == prompt
    assert body["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_stream_of_n_answers_has_each_ones_pieces_role_and_end(product: Product, kind) -> None:
    ask = product.chat if kind == "chat" else product.text
    chunks = events(ask(n=3, stream=True, stream_options={"include_usage": True}))
    for index in range(3):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        texts = [c["delta"]["content"] if kind == "chat" else c["text"] for c in own]
        assert "".join(texts) == product.words(token_ids(index))
        assert [c["finish_reason"] for c in own] == [None, None, "length"]
        if kind == "chat":
            assert ["role" in c["delta"] for c in own] == [True, False, False]
    assert [c["usage"] for c in chunks[:-1]] == [None] * 9
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 9


def test_a_list_of_prompts_is_answered_by_index_under_one_hold(product: Product) -> None:
    texts = ["Hello there", "You", "Good day to you"]
    encode = product.gateway.tokenizer.encode
    for prompt in (texts, [encode(text) for text in texts]):
        body = product.text(prompt=prompt, n=2, echo=True, return_token_ids=True).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        for index, choice in enumerate(body["choices"]):
            assert choice["text"] == texts[index // 2] + product.words(token_ids(index))
            assert choice["prompt_token_ids"] == encode(texts[index // 2])
        (message,) = product.engines.asked
        num_prompt_tokens = sum(len(encode(text)) for text in texts)
        assert body["usage"]["prompt_tokens"] == num_prompt_tokens
        assert (message.token_lease, message.sampling_params.n) == (6 * 9, 2)
        hold = product.hold()
        assert (hold.num_prompt_tokens, hold.token_lease) == (num_prompt_tokens, 6 * 9)
        product.engines.asked.clear()


def test_a_list_of_one_prompt_is_that_prompt(product: Product) -> None:
    alone, listed = product.text(), product.text(prompt=[TEXT["prompt"]])
    assert alone.json()["choices"] == listed.json()["choices"]


def test_every_chunk_says_how_many_tokens_there_have_been(product: Product) -> None:
    options = {"continuous_usage_stats": True}
    chunks = events(product.text(n=2, stream=True, stream_options=options))
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 4, 5, 6]
    assert all(
        c["usage"]["total_tokens"] == c["usage"]["prompt_tokens"] + c["usage"]["completion_tokens"]
        for c in chunks
    )
    options["include_usage"] = True
    *chunks, last = events(product.chat(stream=True, stream_options=options))
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_logprobs_as_an_evaluator_reads_them(product: Product, stream: bool) -> None:
    prompts = [[40, 41, 42], [50, 7]]
    answer = product.text(prompt=prompts, echo=True, logprobs=1, stream=stream)
    if stream:
        chunks = events(answer)
        firsts = [next(c for c in chunks if c["choices"][0]["index"] == i) for i in range(2)]
        choices = [chunk["choices"][0] for chunk in firsts]
    else:
        choices = answer.json()["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["tokens"][: len(prompt)] == [product.words([token]) for token in prompt]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        for place, token in enumerate(prompt[1:], start=1):
            assert logprobs["token_logprobs"][place] == -token / 8
            # The prompt's token is there whether it is likely or not.
            assert logprobs["top_logprobs"][place][product.words([token])] == (
                -0.25 if token == 7 else -token / 8
            )
        assert choice["text"].startswith(product.words(prompt))
        end = logprobs["text_offset"][len(prompt)]
        assert end == len(product.words(prompt)), "the answer begins behind the echo"


def test_logprobs_of_a_prompt_are_listed_by_token_id(product: Product) -> None:
    product.engines.script = answer_all
    body = product.text(prompt=[40, 41], prompt_logprobs=1).json()
    shown = body["choices"][0]["prompt_logprobs"]
    assert shown[0] is None
    assert {i: entry["logprob"] for i, entry in shown[1].items()} == {"41": -41 / 8, "7": -0.25}
    chat = product.chat(prompt_logprobs=0).json()
    assert len(chat["prompt_logprobs"]) == len(product.engines.asked[-1].prompt_token_ids)
    assert "prompt_logprobs" not in product.chat().json()


def test_a_stream_begins_with_the_prompts_token_ids_where_ids_were_asked_for(
    product: Product,
) -> None:
    for ask in (product.chat, product.text):
        first, *rest = (c["choices"][0] for c in events(ask(stream=True, return_token_ids=True)))
        assert first["prompt_token_ids"] == list(product.engines.asked[-1].prompt_token_ids)
        assert not any("prompt_token_ids" in choice for choice in rest)


def test_a_long_prompt_is_cut_to_its_last_tokens_on_request(product: Product) -> None:
    ids = [40 + i % 50 for i in range(MAX_MODEL_LEN + 100)]
    cut = product.text(prompt=ids, truncate_prompt_tokens=5, echo=True)
    assert product.engines.asked[-1].prompt_token_ids == tuple(ids[-5:])
    assert cut.json()["choices"][0]["text"].startswith(product.words(ids[-5:]))
    product.text(prompt=ids, truncate_prompt_tokens=-1, max_tokens=9)
    assert product.engines.asked[-1].prompt_token_ids == tuple(ids[-(MAX_MODEL_LEN - 9) :])
    assert product.text(prompt=ids).json()["error"]["code"] == "context_length_exceeded"


def test_a_last_message_of_the_assistant_is_continued_on_request(product: Product) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good day"}]

    def prompt(**changes: Any) -> str:
        assert product.chat(messages=messages, **changes).status_code == 200
        return product.words(product.engines.asked[-1].prompt_token_ids)

    whole = prompt(add_generation_prompt=False)
    assert prompt().startswith(whole), "without being asked, a new answer begins"
    begun = prompt(continue_final_message=True)
    assert begun.endswith("Good day")
    assert whole.startswith(begun)
    assert prompt(continue_final_message=True, add_generation_prompt=False) == begun


def test_hold_lease_and_limit_cover_the_prompt_once_and_every_answer(product: Product) -> None:
    answer = product.text(n=4, max_tokens=20)
    message = product.engines.asked[-1]
    num_prompt_tokens = len(message.prompt_token_ids)
    assert (message.token_lease, message.sampling_params.max_tokens) == (80, 20)
    hold = product.hold()
    assert (hold.num_prompt_tokens, hold.token_lease) == (num_prompt_tokens, 80)
    price = product.gateway.database.write_sync(lambda conn: ensure_price(conn, NOW_MS))
    assert hold.amount_nanousd == amount_nanousd(num_prompt_tokens, 0, 80, price)
    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert left == 1000 - num_prompt_tokens - 80
    # Used: the prompt and 12 tokens; the next request takes its own prompt and one.
    again = product.text(max_tokens=1)
    left = int(again.headers["x-ratelimit-remaining-tokens"])
    assert left == 1000 - (num_prompt_tokens + 12) - (num_prompt_tokens + 1)


def test_without_max_tokens_every_answer_may_fill_the_context(product: Product) -> None:
    product.chat(n=2, max_tokens=None)
    message = product.engines.asked[-1]
    rest = MAX_MODEL_LEN - len(message.prompt_token_ids)
    assert (message.sampling_params.max_tokens, message.token_lease) == (rest, 2 * rest)


def test_logprobs_come_in_both_shapes_whole_and_streamed(product: Product) -> None:
    whole = product.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    assert (
        b"".join(bytes(entry["bytes"]) for entry in whole["content"])
        == product.words(token_ids(0)).encode()
    )
    chunks = events(product.chat(logprobs=True, top_logprobs=2, stream=True))
    streamed = [entry for c in chunks for entry in c["choices"][0]["logprobs"]["content"]]
    assert streamed == whole["content"]
    whole = product.text(logprobs=2).json()["choices"][0]["logprobs"]
    assert whole["text_offset"][0] == 0
    assert whole["tokens"] == [product.words([token]) for token in token_ids(0)]
    chunks = events(product.text(logprobs=2, stream=True))
    for name, entries in whole.items():
        assert [e for c in chunks for e in c["choices"][0]["logprobs"][name]] == entries


def test_logprobs_that_were_not_asked_for_are_null(product: Product) -> None:
    assert product.chat().json()["choices"][0]["logprobs"] is None
    assert {c["choices"][0]["logprobs"] for c in events(product.text(stream=True))} == {None}


def test_an_echo_stands_before_each_answer_whole_and_streamed(product: Product) -> None:
    said = [product.words(token_ids(index)) for index in range(2)]
    whole = product.text(echo=True, n=2).json()["choices"]
    assert [choice["text"] for choice in whole] == [TEXT["prompt"] + words for words in said]
    ids = product.gateway.tokenizer.encode(TEXT["prompt"])
    for prompt in (TEXT["prompt"], [TEXT["prompt"]], ids):
        chunks = events(product.text(echo=True, n=2, stream=True, prompt=prompt))
        for index, words in enumerate(said):
            own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert own[0]["text"].startswith(TEXT["prompt"])
            assert "".join(c["text"] for c in own) == TEXT["prompt"] + words


@pytest.mark.parametrize(
    ("asked", "tier", "priority"), [("auto", "default", 0), ("default", "default", 0),
    ("flex", "flex", 1)]
)  # fmt: skip
def test_the_tier_is_the_priority_and_is_told(product: Product, asked, tier, priority) -> None:
    assert product.chat(service_tier=asked).json()["service_tier"] == tier
    assert product.engines.asked[-1].priority == priority
    chunks = events(product.chat(service_tier=asked, stream=True))
    assert {chunk["service_tier"] for chunk in chunks} == {tier}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"logit_bias": {"999999": 1}}, 'logit_bias["999999"]'),
        ({"stop_token_ids": [999999]}, "stop_token_ids[0]"),
        ({"prompt": [999999]}, "prompt"),
        ({"prompt": [[7], []]}, "prompt"),
        ({"prompt": [[7], [8] * MAX_MODEL_LEN]}, "prompt"),
        ({"min_tokens": 10}, "min_tokens"),
        ({"n": 17}, "n"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_costs_nothing(
    product: Product, changes, param
) -> None:
    refused = product.text(**changes)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert product.engines.asked == []
    assert not product.gateway.running
    left = int(product.text(max_tokens=1).headers["x-ratelimit-remaining-tokens"])
    assert left == 1000 - len(product.engines.asked[-1].prompt_token_ids) - 1


def test_a_token_that_the_model_has_no_row_for_is_refused(product: Product) -> None:
    base = product.gateway.base
    smaller = replace(base, config=base.config | {"vocab_size": 50})
    product.gateway = replace(product.gateway, base=smaller)
    for changes, param in (
        ({"prompt": [50]}, "prompt"),
        ({"prompt": [49], "stop_token_ids": [50]}, "stop_token_ids[0]"),
        ({"prompt": [49], "logit_bias": {"50": 1}}, 'logit_bias["50"]'),
    ):
        assert product.text(**changes).json()["error"]["param"] == param
    assert product.text(prompt=[49], stop_token_ids=[49]).status_code == 200


@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_no_token_in_time_is_a_503_that_says_when_to_come_back(product: Product, reason) -> None:
    product.engines.script = end_at_once(finish_reason=reason, stop_cause="first_token_timeout")
    for stream in (False, True):
        answer = product.chat(stream=stream)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("overloaded_error", "first_token_timeout")
    assert product.engines.asked[-1].first_token_timeout_s == 12


@pytest.mark.parametrize(
    "fault",
    [
        EngineDeadError("it died"),
        RequestRefused("queue_full"),
        RequestRefused("metering_unavailable"),
        EngineAwayError("it leaves"),
        end_at_once(finish_reason="error", stop_cause="adapter_loading"),
        end_at_once(finish_reason="error", stop_cause="gateway_lost"),
    ],
    ids=["dead", "queue full", "not metered", "leaving", "adapter loading", "gateway lost"],
)
def test_every_503_says_when_to_come_back(product: Product, fault) -> None:
    product.engines.script = fault if callable(fault) else lambda _: [fault]
    for stream in (False, True):
        answer = product.chat(stream=stream)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert int(answer.headers["retry-after-ms"]) >= 1
    product.engines.is_ready = False
    assert int(product.chat().headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        ("adapter_loading", 503),
        ("adapter_missing", 502),
        ("adapter_corrupt", 502),
        ("adapter_incompatible", 400),
        ("adapter_too_large", 400),
        ("adapter_not_invoked", 400),
    ],
)
def test_an_adapter_that_cannot_be_served_is_an_error_of_its_own(
    product: Product, cause, status
) -> None:
    words = "tenants/ten_1/abc at 10.0.0.1 is not there"
    product.engines.script = end_at_once(finish_reason="error", stop_cause=cause, error=words)
    for ask, param in ((product.chat, "messages"), (product.text, "prompt")):
        for stream in (False, True):
            answer = ask(stream=stream)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (status, cause)
            assert "othing was billed" in error["message"]
            assert "ten_1" not in answer.text
            assert "10.0.0.1" not in answer.text
            if cause == "adapter_not_invoked":
                assert error["param"] == param
    assert not product.gateway.running


def test_a_loading_adapters_503_says_what_the_engine_says(product: Product) -> None:
    product.engines.script = end_at_once(
        finish_reason="error", stop_cause="adapter_loading", retry_after_s=7.5
    )
    assert product.chat().headers["retry-after"] == "8"


def test_an_adapter_that_is_lost_on_the_way_is_an_error_event(product: Product) -> None:
    def script(message: AddRequest) -> list[RequestOutput]:
        said = answer_all(message)[:2]
        lost = replace(said[1], seq=2, finish_reason="error", stop_cause="adapter_loading")
        return [*said, lost]

    product.engines.script = script
    streamed = product.chat(stream=True)
    assert streamed.status_code == 200
    last = streamed.text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "adapter_loading"


def test_a_failure_is_no_first_token(product: Product) -> None:
    def observed() -> str:
        lines = product.gateway.metrics.render().decode().splitlines()
        return next(line for line in lines if "first_token_seconds_count" in line).split()[-1]

    product.engines.script = end_at_once(finish_reason="error", stop_cause="adapter_missing")
    product.chat()
    assert observed() == "0.0"
    product.engines.script = answer_all
    product.chat()
    assert observed() == "1.0"


def test_one_answer_that_fails_fails_the_request(product: Product) -> None:
    def script(message: AddRequest) -> list[RequestOutput]:
        said = answer_all(message)[:3]
        return [*said, replace(said[0], seq=3, finish_reason="error", stop_cause="engine_failure")]

    product.engines.script = script
    assert product.chat(n=2).status_code == 500
    streamed = product.chat(n=2, stream=True)
    assert streamed.status_code == 200
    last = streamed.text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert not product.gateway.running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [EngineDeadError(), RuntimeError("a bug")])
@pytest.mark.parametrize("num_outputs", [0, 2])
def test_an_answer_that_we_broke_is_noted_before_the_client_hears_of_it(
    product: Product, fault, stream, num_outputs
) -> None:
    product.engines.script = lambda message: [*answer_all(message)[:num_outputs], fault]
    with contextlib.suppress(RuntimeError):  # a server logs it and hangs up
        answer = product.chat(stream=stream)
        assert answer.is_error or "error" in answer.text
    assert product.hold().failed_at_ms is not None


def test_a_fault_while_an_answer_is_put_into_words_is_ours(product: Product, monkeypatch) -> None:
    def break_down(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Choice, "take", break_down)
    for stream in (False, True):
        with contextlib.suppress(RuntimeError):
            product.chat(stream=stream)
        assert product.hold().failed_at_ms is not None


def test_an_answer_that_came_whole_is_not_a_failed_one(product: Product) -> None:
    for stream in (False, True):
        assert product.chat(stream=stream).status_code == 200
        assert product.hold().failed_at_ms is None


# ---- engines that have gone ----


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_engine_has_gone_is_another_engines_with_its_hold(product, stream) -> None:
    product.engines.names, product.engines.away = ("a", "b"), frozenset("a")
    asked_at_ms = now_ms()
    answer = product.chat(stream=stream)
    assert answer.status_code == 200
    assert len(product.engines.asked) == 2
    hold, lifetime_ms = product.hold(), product.gateway.settings.hold_lifetime_s * 1000
    assert (hold.engine_id, hold.state) == ("id of b", "open")
    assert hold.expires_at_ms >= asked_at_ms + lifetime_ms
    assert hold.failed_at_ms is None
    assert b"\nchorale_request_moves_total 1.0\n" in product.gateway.metrics.render()


@pytest.mark.parametrize(("names", "num_asked"), [(("a",), 1), (("a", "b"), 3)])
def test_a_request_that_no_engine_takes_is_a_503_that_holds_nothing(
    product: Product, monkeypatch, names, num_asked
) -> None:
    settled = []
    monkeypatch.setattr(product.gateway.limiter, "settle", lambda grant, used: settled.append(used))
    product.engines.names, product.engines.away = names, frozenset(names)
    answer = product.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert (product.hold().state, product.hold().failed_at_ms) == ("voided", None)
    assert settled == [None], "it counts against no limit, not as a request either"
    assert len(product.engines.asked) == num_asked
    assert len(product.gateway.running) == 0
    assert {product.gateway.running.num_at(name) for name in names} == {0}


def test_an_engine_that_died_of_a_request_is_not_followed_by_another(product: Product) -> None:
    """Its journal may have it."""
    product.engines.names = ("a", "b")
    product.engines.script = lambda _: [EngineDeadError("it died")]
    assert product.chat().status_code == 503
    assert len(product.engines.asked) == 1
    assert (product.hold().engine_id, product.hold().state) == ("id of a", "open")


def test_a_hold_that_was_resolved_in_the_meantime_is_not_moved(product: Product) -> None:
    def script(message):
        product.gateway.database.write_sync(
            lambda conn: void_refused(conn, message.request_id, NOW_MS)
        )
        return [EngineAwayError("it leaves")]

    product.engines.names, product.engines.script = ("a", "b"), script
    assert product.chat().status_code == 503
    assert len(product.engines.asked) == 1
    assert product.hold().engine_id == "id of a"
    assert b"\nchorale_request_moves_total 0.0\n" in product.gateway.metrics.render()


def test_a_quarantined_request_is_told_to_change(product: Product) -> None:
    product.engines.script = lambda _: [Quarantined()]
    answer = product.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_quarantined")


def test_a_request_is_known_again_by_everything_that_reaches_the_model(product: Product) -> None:
    product.chat()
    product.chat(service_tier="flex")
    same, again = product.engines.asked
    assert same.request_id != again.request_id
    assert fingerprint(same) == fingerprint(again)
    for change in (
        {"n": 2}, {"logit_bias": {"5": 1}}, {"min_p": 0.1}, {"logprobs": True}, {"max_tokens": 8},
        {"presence_penalty": 1}, {"frequency_penalty": 1}, {"repetition_penalty": 1.1},
    ):  # fmt: skip
        product.chat(**change)
        assert fingerprint(product.engines.asked[-1]) != fingerprint(same)
