"""How requests for one model become tokens and back: its tokenizer and its way with tools."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from server.adapters.names import NamedAdapter
from server.inference.encoders import LARGE_BYTES
from server.text.template_process import TemplateProcess
from server.text.tokenizer import Tokenizer
from server.tools.dialect import Dialect
from server.tools.proof import stored_template


@dataclass(frozen=True, slots=True)
class Text:
    """The text of a base model, or of a version of an adapter.

    vocabulary_size: token ids below this are served: both the tokenizer and the model have them.
    eos_token_ids: ends of answers beside the base model's.   words: bytes of token ids for which
    the base model's tokenizer has others.
    """

    tokenizer: Tokenizer
    dialect: Dialect
    vocabulary_size: int
    eos_token_ids: tuple[int, ...] = ()
    words: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def render_bytes(self) -> int:
        """Bytes that a chat counts for a thread apart from its texts: time to render it."""
        return LARGE_BYTES if self.tokenizer.is_confined else 0

    def of_version(self, version: NamedAdapter, templates: TemplateProcess) -> "Text":
        """The text of a version on the base model of this text. It may take a second."""
        own = json.loads(version.tokenizer or "{}")
        tokenizer, dialect = self.tokenizer.with_own(own, templates), self.dialect
        if "chat_template" in own:
            dialect = Dialect.of_base(tokenizer)
        template = dialect.template
        if version.response_template is not None:
            template = stored_template(version.response_template)
        ids = [token["id"] for token in own.get("added_tokens", ())]
        return Text(
            tokenizer,
            dialect.of_adapter(tokenizer, template),
            max([self.vocabulary_size, *(token_id + 1 for token_id in ids)]),
            tuple(own.get("eos_token_ids", ())),
            {token_id: tokenizer.vocabulary[token_id] for token_id in ids},
        )
