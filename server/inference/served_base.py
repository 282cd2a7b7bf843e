"""A base model as a gateway serves it: the model, its tokenizer, its engines and its requests."""

import functools
from dataclasses import dataclass

from registry.base_model import BaseModel
from server.inference.load_shedding import LoadShedder
from server.inference.token_leases import TokenLeases
from server.pool.engines import Engines
from server.pool.keeper import Keeper
from server.pool.running import Running
from server.text.tokenizer import Tokenizer
from server.tools.dialect import Dialect
from server.tools.proof import stored_template


@dataclass(frozen=True, slots=True, eq=False)
class ServedBase:
    """Everything of a gateway that belongs to one base model.

    home: the folder of its engines, by which the supervisor's list names it.
    dialect: its way with tools.
    running: this gateway's requests for it and its adapters.   load: whether there is room for
    more.   keeper: how many engines it has.
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

    @property
    def model_id(self) -> str:
        """The name by which tenants ask for the model."""
        return self.model.model_id

    def dialect_of(self, response_template: str | None) -> Dialect:
        """The dialect of an adapter with this format of tool calls; the base's for None."""
        return _dialect(self, response_template) if response_template else self.dialect

    @property
    def vocabulary_size(self) -> int:
        """Token ids below this are served: both the tokenizer and the model have them."""
        num_rows: int = self.model.config["vocab_size"]
        return min(len(self.tokenizer.vocabulary), num_rows)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together, as engines report; 0 until one has connected."""
        return self.engines.max_model_len


@functools.lru_cache(maxsize=256)
def _dialect(base: ServedBase, response_template: str) -> Dialect:
    return base.dialect.of_adapter(base.tokenizer, stored_template(response_template))
