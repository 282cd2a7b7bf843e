"""The settings of a base model's engines together; `chorale serve` has each of them too."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from engine.config import Bounds, EngineSettings
from server.pool.control_files import MAX_ENGINES


@dataclass(frozen=True, kw_only=True)
class PoolSettings(EngineSettings):
    """The settings of one base model's pool, and of each engine in it.

    The comment above a field describes it, and the comment behind a field says what None means.
    Fields without a comment are flags, which server/cli/serve.py describes.
    """

    model: str = ""
    model_name: str | None = None
    engines: Annotated[int, Bounds(ge=1, le=MAX_ENGINES)] = 1
    max_engines: Annotated[int | None, Bounds(ge=1, le=MAX_ENGINES)] = None
    # Seconds within which 9 of 10 first tokens should come; where they come later, another engine
    # is started, up to max_engines.
    slo_first_token_s: Annotated[float, Bounds(gt=0)] = 2.0
    # Seconds without an admitted request after which the model's engines end and let go of their
    # memory; the next one starts them again.
    sleep_after_s: Annotated[float | None, Bounds(gt=0)] = None  # default: never
    # Seconds that a request waits for the engines of a model that slept, before it is refused with
    # 503; 0 refuses at once.
    wake_timeout_s: Annotated[float, Bounds(ge=0)] = 30.0
    # Share of the engines' queues (max_waiting each), of the room that other tenants leave in them,
    # that a tenant without a share of its own may hold. Each of several gateways has an equal part
    # of the queues for its requests.
    max_queue_share: Annotated[float, Bounds(gt=0, le=1)] = 0.5
    # Gateway processes, which take connections from the same port; several need PostgreSQL and
    # Redis.
    gateways: Annotated[int, Bounds(ge=1, le=64)] = 1

    @property
    def most_engines(self) -> int:
        """How many engines may run at once."""
        return self.max_engines or self.engines

    @property
    def model_id(self) -> str:
        return self.model_name or Path(self.model).name
