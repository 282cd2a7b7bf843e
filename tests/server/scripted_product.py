"""The gateway's application around an engine whose outputs the test scripts."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa

from engine.wire.messages import AddRequest, RequestOutput, TokenLogprobs
from server.accounts.keys import create_key
from server.billing.tables import holds
from server.limits.memory import MemoryLimiter
from tests.server.factories import NOW_MS, make_tenant
from tests.server.fake_engines import Script
from tests.server.in_process import InProcess, User

CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
TEXT = {"model": "base", "prompt": "Hello there", "max_tokens": 9}


def token_ids(index: int) -> tuple[int, ...]:
    """Tokens of the engine's answer number `index`."""
    return tuple(range(40 + 10 * index, 43 + 10 * index))


def answer_all(message: AddRequest) -> list[RequestOutput]:
    """Outputs with three tokens for each answer, one by one and in turn; the last has the counts.

    If logprobs of the prompts are asked for, an output with those of each prompt comes first.
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
    """A script that ends the request before any token."""

    def script(message: AddRequest) -> list[RequestOutput]:
        return [RequestOutput(request_id=message.request_id, seq=0, is_last=True, **fields)]

    return script


@dataclass
class Product(InProcess):
    """The gateway's application with one tenant, called without a socket."""

    tenant_id: str = ""
    api_key: str = ""

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """Post to a path under /v1, or to one that begins with a slash."""
        user = User(self, self.tenant_id, "acme", self.api_key)
        return user.call("POST", path if path[0] == "/" else f"/v1/{path}", body, headers)

    def chat(self, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
        return self.post("chat/completions", CHAT | changes, headers)

    def text(self, **changes: Any) -> httpx.Response:
        return self.post("completions", TEXT | changes)

    def words(self, ids: Sequence[int]) -> str:
        return b"".join(self.gateway.bases.default.tokenizer.vocabulary[i] for i in ids).decode()

    def hold(self) -> sa.Row[Any]:
        """The hold of the newest request."""
        request_id = self.engines.asked[-1].request_id
        query = sa.select(holds).where(holds.c.request_id == request_id)
        return self.gateway.database.write_sync(lambda conn: conn.execute(query).one())


@contextlib.contextmanager
def scripted_product(migrated: Path, data_dir: Path) -> Iterator[Product]:
    """Make the product on a copy of a migrated SQLite database, and close it at the end."""
    with Product.running(migrated, data_dir, first_token_timeout_s=12) as product:
        product.engines.script = answer_all
        # The limiter's clock stands still, so that no limit refills while a test runs.
        product.gateway = replace(product.gateway, limiter=MemoryLimiter(lambda: NOW_MS))
        database, pepper = product.gateway.database, product.gateway.pepper
        tenant = make_tenant(database, tokens_per_minute=1000)
        product.tenant_id = tenant.tenant_id
        product.api_key = database.write_sync(
            lambda conn: create_key(conn, tenant.tenant_id, "a key", pepper, now_ms=NOW_MS)[1]
        )
        yield product


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]
