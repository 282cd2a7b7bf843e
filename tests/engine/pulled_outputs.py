"""The outputs of a request, one after another, for tests that read them so."""

from collections.abc import AsyncGenerator
from typing import Any

from engine.wire.messages import RequestOutput
from engine.wire.pulled import pulled


def outputs_of(client: Any, *request: Any) -> AsyncGenerator[RequestOutput, None]:
    """Outputs of a request to an EngineClient or an EnginePool; closing the generator aborts it.

    request: what its `generate` takes before `take`.
    """
    return pulled(lambda take: client.generate(*request, take))
