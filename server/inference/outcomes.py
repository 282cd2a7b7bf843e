"""Faults of requests that an engine refuses, or fails on the way."""

from engine.errors import EngineAwayError, RequestRefused
from engine.wire.messages import NOT_METERED, RequestOutput
from registry.errors import Failed, Fault, Overloaded
from server.inference import errors
from server.inference.ticket import Ticket
from server.pool.suspects import Suspected


def failure_of(ticket: Ticket, output: RequestOutput) -> Fault | None:
    """The failure of a request that the engine accepted; None if it has not failed.

    The engine's own words are not passed on: `output.error` may name keys and hosts.
    """
    if not output.num_completion_tokens:
        if output.stop_cause == "first_token_timeout":
            return errors.first_token_timeout(ticket.timeouts.first_token_s)
        if output.stop_cause == "deadline":
            return errors.request_timeout(ticket.timeouts.request_s)
    if output.finish_reason != "error":
        return None
    match output.stop_cause:
        case "adapter_loading":
            return errors.adapter_loading(output.retry_after_s)
        case "gateway_lost":
            return errors.engine_unavailable()
        case "engine_failure" if output.error == NOT_METERED:
            return errors.metering_unavailable()
    return errors.failed(
        output.stop_cause or "",
        prompt=ticket.request.prompt_param,
        constraint=ticket.request.constraint_param,
    )


def refusal_of(refused: RequestRefused | EngineAwayError | Suspected) -> Fault:
    """The fault of a request that no engine accepted."""
    if isinstance(refused, EngineAwayError):
        return errors.engine_unavailable()
    if isinstance(refused, Suspected):
        return errors.request_suspected(refused.retry_after_s)
    if refused.reason == "queue_full":
        return Overloaded()
    if refused.reason == NOT_METERED:
        return errors.metering_unavailable()
    return Failed()
