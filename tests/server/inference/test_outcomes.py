"""Outcomes of engines as faults: what each one is, and when the client may come back."""

from typing import Any

import pytest

from engine.errors import EngineAwayError, RequestRefused
from engine.wire.messages import NOT_METERED, RequestOutput, SamplingParams
from registry.errors import Damaged, Failed, Fault, Invalid, Overloaded, Unavailable
from server.inference.generation_request import GenerationRequest
from server.inference.outcomes import failure_of, refusal_of
from server.inference.ticket import Ticket, Timeouts
from server.pool.suspects import Suspected

REQUEST = GenerationRequest(
    model="base", prompts=[[7]], sampling=SamplingParams(max_tokens=5), max_tokens=5
)
TICKET = Ticket(None, REQUEST, "r", Timeouts(12, 60, 90))  # type: ignore[arg-type]
WORDS = "tenants/ten_1/abc at 10.0.0.1 is not there"


def ended(cause: Any, error: str = WORDS, wait_s: float | None = None) -> RequestOutput:
    output = RequestOutput("r", 0, finish_reason="error", stop_cause=cause, error=error)
    return output._replace(retry_after_s=wait_s)


@pytest.mark.parametrize(
    ("said", "kind", "code", "told"),
    [
        (ended("adapter_loading"), Unavailable, "adapter_loading", 5.0),
        (ended("adapter_loading", wait_s=0.2), Unavailable, "adapter_loading", 1.0),
        (ended("adapter_loading", wait_s=7.5), Unavailable, "adapter_loading", 7.5),
        (ended("adapter_missing"), Damaged, "adapter_missing", None),
        (ended("adapter_corrupt"), Damaged, "adapter_corrupt", None),
        (ended("adapter_incompatible"), Invalid, "adapter_incompatible", "model"),
        (ended("adapter_too_large"), Invalid, "adapter_too_large", "model"),
        (ended("request_too_long"), Invalid, "request_too_long", "prompt"),
        (ended("adapter_not_invoked"), Invalid, "adapter_not_invoked", "prompt"),
        (
            ended("first_token_timeout")._replace(finish_reason="length"),
            Overloaded,
            "first_token_timeout",
            1.0,
        ),
        (ended("gateway_lost"), Unavailable, "engine_unavailable", 1.0),
        (ended("engine_failure"), Failed, "internal_error", None),
        (ended("engine_failure", NOT_METERED), Unavailable, "metering_unavailable", 1.0),
        (EngineAwayError("it leaves"), Unavailable, "engine_unavailable", 1.0),
        (RequestRefused("queue_full"), Overloaded, None, 1.0),
        (RequestRefused(NOT_METERED), Unavailable, "metering_unavailable", 1.0),
        (Suspected(), Invalid, "request_quarantined", None),
        (Suspected(2.0), Unavailable, "request_suspected", 2.0),
    ],
)
def test_what_an_engine_says_is_a_fault_that_names_the_parameter_or_when_to_come_back(
    said: Any, kind: type[Fault], code: str | None, told: str | float | None
) -> None:
    fault = failure_of(TICKET, said) if isinstance(said, RequestOutput) else refusal_of(said)
    assert fault is not None
    assert (type(fault), fault.code, fault.param or fault.retry_after_s) == (kind, code, told)
    assert "ten_1" not in str(fault)
    assert "othing was billed" in str(fault) or not str(code).startswith("adapter")
