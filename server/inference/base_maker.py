"""Makes a gateway's parts of one base model, from what the supervisor tells of it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.wire.client import EngineClient
from engine.wire.endpoint import Endpoint
from engine.wire.messages import LeaseLow, TenantService
from registry.base.base_model import BaseModel
from server.database.database import Database
from server.inference.load_shedding import LoadShedder
from server.inference.served_base import ServedBase
from server.inference.token_leases import TokenLeases
from server.launch.settings import Settings
from server.pool.control_files import BaseEntry, Member, members_file
from server.pool.engine_pool import EnginePool
from server.pool.engines import Engine, Engines
from server.pool.keeper import Keeper
from server.pool.running import Running
from server.text.tokenizer import Tokenizer
from server.tools.dialect import Dialect


@dataclass(frozen=True, slots=True)
class BaseMaker:
    """Makes base models for one gateway.

    settings: those that hold for all base models.
    client_key: secret key of the gateways, for engines on other machines.
    cache_dir: where the hashes of base models are kept.   on_end: called when a request has ended.
    number: of this gateway among those of the machine.
    """

    settings: Settings
    database: Database
    client_key: str
    cache_dir: Path
    on_end: Callable[[], None]
    number: int = 1

    def base(self, entry: BaseEntry) -> ServedBase:
        """Load the base model and make its parts. Raises UnsupportedBaseModel, and errors of the
        tokenizer. It takes seconds, and minutes where the hashes are not in the cache.
        """
        settings = self.settings.of_base(entry.settings)
        tokenizer = Tokenizer(Path(entry.model_dir))
        model = replace(
            BaseModel.load(entry.model_dir, entry.name, self.cache_dir),
            served_as=_served_as(tokenizer, settings),
        )
        running = Running()
        token_leases = TokenLeases(self.database, running)
        engines = self._pool(entry, model.base_revision, running, token_leases.extend_soon)
        return ServedBase(
            home=entry.home,
            model=model,
            tokenizer=tokenizer,
            dialect=Dialect.of_base(tokenizer),
            engines=engines,
            running=running,
            load=_load(settings, running, engines),
            token_leases=token_leases,
            keeper=Keeper(engines, running, Path(entry.home), settings, number=self.number),
        )

    def leftover(self, entry: BaseEntry) -> Engines:
        """The engines of a base model of which nothing but journals is left."""
        return self._pool(entry, entry.base_revision, Running(), lambda *_: None)

    def _pool(
        self,
        entry: BaseEntry,
        base_revision: str,
        running: Running,
        on_lease_low: Callable[[Engine, LeaseLow], None],
    ) -> Engines:
        members = members_file(Path(entry.home)).latest
        return EnginePool(members, self._connect, base_revision, running.num_at, on_lease_low)

    def _connect(
        self,
        member: Member,
        on_lease_low: Callable[[LeaseLow], None],
        on_service: Callable[[TenantService], None],
    ) -> EngineClient:
        endpoint = Endpoint(member.address, member.server_key, self.client_key)
        return EngineClient(endpoint, self.on_end, on_lease_low, on_service)


def _served_as(tokenizer: Tokenizer, settings: Settings) -> str:
    """The chat format and the precision: base models of the same weights may differ in them."""
    precision = {"quantization": settings.quantization, "dtype": settings.dtype}
    return json.dumps(tokenizer.chat_format | precision, sort_keys=True)


def _load(settings: Settings, running: Running, engines: Engines) -> LoadShedder:
    # Each gateway has an equal part of the queues, since it knows only its own requests.
    max_waiting = max(1, settings.max_waiting // settings.gateways)
    return LoadShedder(
        running,
        max_queued=lambda: max_waiting * max(1, len(engines.welcomes)),
        max_wait_s=settings.first_token_timeout_s,
        default_share=settings.max_queue_share,
        takes_turns=settings.scheduling_policy == "vtc",
    )
