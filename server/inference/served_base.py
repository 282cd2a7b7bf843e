"""A base model as a gateway serves it: the model, its tokenizer, its engines and its requests."""

import functools
from dataclasses import dataclass, field

from registry.base.base_model import BaseModel
from server.adapters.names import NamedAdapter
from server.inference.encoders import LARGE_BYTES, Encoders
from server.inference.load_shedding import LoadShedder
from server.inference.shared_cache import SharedCache
from server.inference.texts import Text
from server.inference.token_leases import TokenLeases
from server.pool.engines import Engines
from server.pool.keeper import Keeper
from server.pool.running import Running
from server.text.template_process import TemplateProcess
from server.text.tokenizer import Tokenizer
from server.tools.dialect import Dialect

_MAX_TEXTS = 256
"""A text takes a few kilobytes, or 2 MB if the base model has 6,000 added tokens."""
_OWNER_TEXTS = 32


@dataclass(frozen=True, slots=True, eq=False)
class ServedBase:
    """Everything of a gateway that belongs to one base model.

    home: the folder of its engines, by which the supervisor's list names it.
    dialect: its way with tools.
    running: this gateway's requests for it and its adapters.   load: whether there is room for
    more.   keeper: how many engines it has.   templates: renders the templates of versions.
    texts: of versions with a tokenizer or a format of tool calls of their own, by those.
    """

    home: str
    model: BaseModel
    tokenizer: Tokenizer
    dialect: Dialect
    engines: Engines
    running: Running
    load: LoadShedder
    token_leases: TokenLeases
    keeper: Keeper
    templates: TemplateProcess = field(default_factory=TemplateProcess)
    texts: SharedCache[tuple[str | None, str | None], Text] = field(
        default_factory=lambda: SharedCache(_MAX_TEXTS, _OWNER_TEXTS)
    )

    @property
    def model_id(self) -> str:
        """The name by which tenants ask for the model."""
        return self.model.model_id

    @property
    def text(self) -> Text:
        """The text of the base model, and of adapters that bring no other."""
        num_rows: int = self.model.config["vocab_size"]
        size = min(len(self.tokenizer.vocabulary), num_rows)
        return Text(self.tokenizer, self.dialect, size)

    def find_text(self, version: NamedAdapter | None) -> Text | None:
        """The text of a version if it is known; None if it has yet to be made."""
        if version is None or _own(version) == (None, None):
            return self.text
        return self.texts.get(version.owner_id, _own(version))

    async def text_of(
        self, version: NamedAdapter | None, encoders: Encoders, tenant_id: str
    ) -> Text:
        """The text of a version, None for the base model. Raises Overloaded, Unavailable.

        tenant_id: of the caller, which waits for a thread if the text is not known yet.
        """
        text = self.find_text(version)
        if text is None:
            assert version is not None, "the base model's text is known"
            make = functools.partial(self.text.of_version, version, self.templates)
            text = await encoders.run(tenant_id, LARGE_BYTES + 1, make)
            self.texts.keep(version.owner_id, _own(version), text)
        return text

    async def abort(self, request_id: str) -> None:
        """End a request wherever it runs; one that does not run is no error."""
        request = self.running.find(request_id)
        if request and (engine := self.engines.find(request.engine)):
            await engine.abort(request_id)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together, as engines report; 0 until one has connected."""
        return self.engines.max_model_len

    @property
    def longest(self) -> int:
        """The same, or the length that the model was made for until an engine has connected."""
        return self.max_model_len or int(self.model.config["max_position_embeddings"])


def _own(version: NamedAdapter) -> tuple[str | None, str | None]:
    """A version's tokenizer and format of tool calls; (None, None) has the base model's text."""
    return version.tokenizer, version.response_template
