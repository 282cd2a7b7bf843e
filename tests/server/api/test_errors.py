import pytest

from registry.errors import (
    Fault,
    Limited,
    NoRoom,
    ObjectNotFound,
    Overloaded,
    QuotaExceeded,
    StorageError,
)
from registry.uploads.ends import ProofFailed
from server.adapters.spool import uploads_busy
from server.api import errors
from server.api.errors import answer_of
from server.database.errors import DatabaseError, LedgerUnavailable
from server.inference import errors as of_inference
from server.limits.rules import Limit, RateLimited, Standing

EVERY_KEY = {"message", "type", "param", "code"}


def subclasses(cls):
    return {cls, *(leaf for child in cls.__subclasses__() for leaf in subclasses(child))}


def make(cls):
    """An instance made without arguments, since its answer follows from its class."""
    error = cls.__new__(cls)
    Fault.__init__(error, "it failed")
    error.scope, error.is_degraded, error.standings = None, False, ()
    error.limit = Limit("tokens", "key", "k", 600)
    return error


@pytest.mark.parametrize(
    ("fault", "status", "type", "code"),
    [
        (errors.missing_api_key(), 401, "invalid_request_error", "invalid_api_key"),
        (errors.insufficient_permissions("usage"), 403, "permission_error",
         "insufficient_permissions"),
        (errors.request_too_large(1), 413, "invalid_request_error", "request_too_large"),
        (of_inference.context_length_exceeded(limit=1, at_least=2, param="prompt"), 400,
         "invalid_request_error", "context_length_exceeded"),
        (Limited("slow", retry_after_s=1.2), 429, "rate_limit_error", "rate_limit_exceeded"),
        (QuotaExceeded("spent"), 429, "insufficient_quota", "insufficient_quota"),
        (QuotaExceeded.of("max_adapters", 1, "delete one"), 429, "insufficient_quota",
         "quota_exceeded"),
        (Overloaded(), 503, "overloaded_error", None),
        (of_inference.first_token_timeout(30), 503, "overloaded_error", "first_token_timeout"),
        (of_inference.metering_unavailable(), 503, "service_unavailable", "metering_unavailable"),
        (errors.unsupported_parameter("tools"), 400, "invalid_request_error",
         "unsupported_parameter"),
        (make(ProofFailed), 500, "server_error", "proof_failed"),
        (of_inference.failed("adapter_missing"), 502, "server_error", "adapter_missing"),
        (NoRoom(), 507, "insufficient_storage", "no_room"),
    ],
)  # fmt: skip
def test_each_kind_has_its_status_and_all_four_keys(fault, status, type, code):
    answer = answer_of(fault)
    assert answer.status == status
    assert set(answer.error) == EVERY_KEY
    assert (answer.error["type"], answer.error["code"]) == (type, code)


def test_clients_that_shorten_a_prompt_know_the_error_by_its_words():
    told_text = str(of_inference.context_length_exceeded(limit=1024, at_least=1253, param="prompt"))
    for words in (
        "This model's maximum context length is 1024 tokens",  # LiteLLM, pydantic-ai, CrewAI
        "context_length_exceeded",  # LangChain
        "exceeds the context window",  # LangChain, for an error without a status
    ):
        assert words in told_text


def test_every_503_and_429_says_when_to_come_back_or_not_to():
    for fault in (
        Overloaded(),
        of_inference.first_token_timeout(30),
        of_inference.metering_unavailable(),
        of_inference.engine_unavailable(),
        of_inference.adapter_loading(),
        Limited("slow", retry_after_s=0.2),
        uploads_busy("full"),
        NoRoom(),
    ):
        headers = answer_of(fault).headers
        assert int(headers["retry-after"]) >= 1
        assert int(headers["retry-after-ms"]) >= 1
    assert answer_of(QuotaExceeded("spent")).headers == {"x-should-retry": "false"}


def test_what_will_not_change_is_not_asked_for_again():
    for fault in (of_inference.failed("adapter_corrupt"), make(ProofFailed)):
        assert answer_of(fault).headers == {"x-should-retry": "false"}


def test_a_rate_limit_names_itself_and_says_when_to_come_back():
    limit = Limit("tokens", "key", "k", 600)
    standing = Standing(limit=limit, remaining=12, reset_ms=58_800)
    limited = RateLimited(limit, retry_after_ms=1201, standings=(standing,), is_degraded=True)
    answer = answer_of(limited)
    assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
    assert answer.headers["retry-after"] == "2"
    assert answer.headers["retry-after-ms"] == "1201"
    assert answer.headers["x-ratelimit-scope"] == "tokens;key"
    assert answer.headers["x-ratelimit-remaining-tokens"] == "12"
    assert answer.error["limiter_degraded"] is True
    assert "600 tokens per minute" in answer.error["message"]


def test_no_fault_is_without_a_status():
    for cls in subclasses(Fault) - {Fault}:
        assert 400 <= answer_of(make(cls)).status < 600


@pytest.mark.parametrize(
    ("reason", "wait_s", "said"),
    [("SlowDown", "2", "Try again shortly"), ("NoSuchBucket", "60", "until the operator")],
)
def test_tenants_learn_whether_a_store_has_to_be_mended_and_nothing_more(reason, wait_s, said):
    answer = answer_of(StorageError(key="tenants/ten_1/abc", reason=reason))
    assert (answer.error["code"], answer.headers["retry-after"]) == ("storage_unavailable", wait_s)
    assert said in answer.error["message"]
    assert reason not in answer.error["message"]


def test_the_worlds_faults_do_not_tell_where_things_are():
    for error in (
        StorageError(key="tenants/ten_1/abc", reason="refused by 10.0.0.1"),
        ObjectNotFound(key="tenants/ten_1/abc"),
        LedgerUnavailable("connection to 10.0.0.2 refused"),
        DatabaseError("connection to 10.0.0.2 refused"),
    ):
        answer = answer_of(error)
        assert answer.status == 503
        assert "10.0.0" not in str(answer.body)
        assert "ten_1" not in str(answer.body)
