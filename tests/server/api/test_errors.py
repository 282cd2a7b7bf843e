import pytest

from registry import errors as registry_errors
from registry.errors import RegistryError
from server.accounts import auth
from server.adapters.errors import uploads_busy
from server.api import errors, foreign_errors
from server.api.errors import ApiError, error_body
from server.api.foreign_errors import from_fault as told
from server.database.database import DatabaseError, LedgerUnavailable
from server.faults import Fault
from server.inference import errors as of_inference
from server.limits.rules import Limit, RateLimited, Standing

EVERY_KEY = {"message", "type", "param", "code"}


def subclasses(cls):
    return {cls, *(leaf for child in cls.__subclasses__() for leaf in subclasses(child))}


def make(cls):
    """An instance made without arguments, since the mapping uses only its class."""
    error = cls.__new__(cls)
    Exception.__init__(error, "it failed")
    error.param = getattr(cls, "param", None)
    error.code, error.retry_after_s, error.scope = None, None, None
    error.received_bytes = 7  # an offset mismatch passes this on
    error.reason = ""  # of a store
    return error


@pytest.mark.parametrize(
    ("error", "status", "type", "code"),
    [
        (errors.invalid_api_key(), 401, "invalid_request_error", "invalid_api_key"),
        (errors.insufficient_permissions("usage"), 403, "permission_error",
         "insufficient_permissions"),
        (errors.request_too_large(1), 413, "invalid_request_error", "request_too_large"),
        (told(of_inference.context_length_exceeded(limit=1, at_least=2, param="prompt")), 400,
         "invalid_request_error",
         "context_length_exceeded"),
        (errors.rate_limited("slow", retry_after_s=1.2), 429, "rate_limit_error",
         "rate_limit_exceeded"),
        (errors.insufficient_quota("spent"), 429, "insufficient_quota", "insufficient_quota"),
        (told(of_inference.overloaded()), 503, "overloaded_error", None),
        (told(of_inference.first_token_timeout(30)), 503, "overloaded_error",
         "first_token_timeout"),
        (told(of_inference.metering_unavailable()), 503, "service_unavailable",
         "metering_unavailable"),
        (told(of_inference.engine_unavailable()), 503, "service_unavailable", "engine_unavailable"),
        (errors.unsupported_parameter("tools"), 400, "invalid_request_error",
         "unsupported_parameter"),
        (errors.internal_error(), 500, "server_error", "internal_error"),
        (told(of_inference.adapter_loading()), 503, "service_unavailable", "adapter_loading"),
        (told(of_inference.adapter_missing()), 502, "server_error", "adapter_missing"),
        (told(of_inference.adapter_corrupt()), 502, "server_error", "adapter_corrupt"),
        (told(of_inference.adapter_incompatible()), 400, "invalid_request_error",
         "adapter_incompatible"),
        (told(of_inference.adapter_too_large()), 400, "invalid_request_error", "adapter_too_large"),
        (told(of_inference.request_too_long(param="prompt")), 400, "invalid_request_error",
         "request_too_long"),
        (told(of_inference.adapter_not_invoked(param="prompt")), 400, "invalid_request_error",
         "adapter_not_invoked"),
    ],
)  # fmt: skip
def test_each_situation_has_its_status_and_all_four_keys(error, status, type, code):
    assert error.status == status
    body = error_body(error)["error"]
    assert set(body) == EVERY_KEY
    assert (body["type"], body["code"]) == (type, code)


def test_clients_that_shorten_a_prompt_know_the_error_by_its_words():
    told_text = str(of_inference.context_length_exceeded(limit=1024, at_least=1253, param="prompt"))
    for words in (
        "This model's maximum context length is 1024 tokens",  # LiteLLM, pydantic-ai, CrewAI
        "context_length_exceeded",  # LangChain
        "exceeds the context window",  # LangChain, for an error without a status
    ):
        assert words in told_text


def test_every_503_and_429_says_when_to_come_back_or_not_to():
    for error in (
        told(of_inference.overloaded()),
        told(of_inference.first_token_timeout(30)),
        told(of_inference.metering_unavailable()),
        told(of_inference.engine_unavailable()),
        told(of_inference.adapter_loading()),
        errors.rate_limited("slow", retry_after_s=0.2),
        told(uploads_busy("full")),
    ):
        assert int(error.headers["retry-after"]) >= 1
        assert int(error.headers["retry-after-ms"]) >= 1
    hourly = registry_errors.QuotaExceeded(
        quota="max_uploads_per_hour", limit=9, remedy="go on in 600 s", retry_after_s=600
    )
    assert foreign_errors.from_registry(hourly).headers["retry-after"] == "600"
    quota = errors.insufficient_quota("spent")
    assert quota.headers == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    ("engine_says", "retry_after_s"), [(None, 5), (0, 1), (0.2, 1), (1.2, 2), (30, 30)]
)
def test_a_loading_adapter_is_asked_for_again_when_the_engine_says(engine_says, retry_after_s):
    headers = told(of_inference.adapter_loading(engine_says)).headers
    assert headers["retry-after"] == str(retry_after_s)
    assert int(headers["retry-after-ms"]) >= 1000


def test_an_adapter_that_will_not_come_is_not_asked_for_again():
    for error in (
        told(of_inference.adapter_missing()),
        told(of_inference.adapter_corrupt()),
    ):
        assert error.headers == {"x-should-retry": "false"}


def test_a_rate_limit_names_itself_and_says_when_to_come_back():
    limit = Limit("tokens", "key", "k", 600)
    standing = Standing(limit=limit, remaining=12, reset_ms=58_800)
    limited = RateLimited(limit, retry_after_ms=1201, standings=(standing,), is_degraded=True)
    error = foreign_errors.from_rate_limit(limited)
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert error.headers["retry-after"] == "2"
    assert error.headers["retry-after-ms"] == "1201"
    assert error.headers["x-ratelimit-scope"] == "tokens;key"
    assert error.headers["x-ratelimit-remaining-tokens"] == "12"
    assert errors.error_body(error)["error"]["limiter_degraded"] is True
    assert "600 tokens per minute" in error.message


@pytest.mark.parametrize(
    ("family", "status"),
    [
        (registry_errors.Invalid, 400),
        (registry_errors.NotFound, 404),
        (registry_errors.Conflict, 409),
        (registry_errors.TooLarge, 413),
        (registry_errors.QuotaExceeded, 429),
        (registry_errors.StorageError, 503),
        (registry_errors.NoRoom, 507),
    ],
)
def test_a_registry_error_gets_the_status_of_its_family(family, status):
    for cls in subclasses(family):
        assert foreign_errors.from_registry(make(cls)).status == status


def test_an_offset_mismatch_says_where_to_go_on():
    body = error_body(foreign_errors.from_registry(make(registry_errors.UploadOffsetMismatch)))
    assert body["error"]["received_bytes"] == 7


def test_no_error_of_another_module_is_without_a_status():
    # UnsupportedBaseModel ends the start, so no request meets it.
    ours = subclasses(RegistryError) - {RegistryError, registry_errors.UnsupportedBaseModel}
    for cls in ours:
        assert isinstance(foreign_errors.from_registry(make(cls)), ApiError)
    for cls in subclasses(auth.AuthError) - {auth.AuthError}:
        assert isinstance(foreign_errors.from_auth(make(cls)), ApiError)
    for cls in subclasses(Fault) - {Fault}:
        assert isinstance(told(make(cls)), ApiError)
    for cls in subclasses(DatabaseError):
        assert foreign_errors.from_database(make(cls)).status == 503


@pytest.mark.parametrize(
    ("reason", "wait_s", "said"),
    [("SlowDown", "2", "Try again shortly"), ("NoSuchBucket", "60", "until the operator")],
)
def test_tenants_learn_whether_a_store_has_to_be_mended_and_nothing_more(reason, wait_s, said):
    error = registry_errors.StorageError(key="tenants/ten_1/abc", reason=reason)
    answer = foreign_errors.from_registry(error)
    assert (answer.code, answer.headers["retry-after"]) == ("storage_unavailable", wait_s)
    assert said in answer.message
    assert reason not in answer.message


def test_the_worlds_faults_do_not_tell_where_things_are():
    storage = registry_errors.StorageError(key="tenants/ten_1/abc", reason="refused by 10.0.0.1")
    database = LedgerUnavailable("connection to 10.0.0.2 refused")
    for error in (foreign_errors.from_registry(storage), foreign_errors.from_database(database)):
        assert "10.0.0" not in str(error_body(error))
        assert "ten_1" not in str(error_body(error))
