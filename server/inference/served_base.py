"""A base model as a gateway serves it: what it is, its text, and the engines that have it."""

from dataclasses import dataclass

from registry.base_model import BaseModel
from server.pool.engines import Engines
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedBase:
    """Whatever has an engine belongs to one of these."""

    model: BaseModel
    tokenizer: Tokenizer
    engines: Engines

    @property
    def model_id(self) -> str:
        """The name that tenants ask for."""
        return self.model.model_id

    @property
    def vocabulary_size(self) -> int:
        """Token ids below it are served: those that both the tokenizer and the model have."""
        num_rows: int = self.model.config["vocab_size"]
        return min(len(self.tokenizer.vocabulary), num_rows)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together, as the engines say; 0 until one is there."""
        return self.engines.max_model_len
