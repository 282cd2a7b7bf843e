"""A base model that has been read from its folder, and what its engines are told of it."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

from engine.config import EngineSettings
from engine.wire.encoding import write_vocabulary
from registry.base.base_model import BaseModel, UnsupportedBaseModel
from server.launch.errors import ServeError
from server.launch.homes import Home
from server.launch.model_folder import find_model
from server.launch.settings import Settings
from server.text.json_object import JsonObject
from server.text.tokenizer import TemplateError, Tokenizer, UnsupportedTokenizer


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """A base model and its tokenizer, with the settings of this model alone."""

    settings: Settings
    base: BaseModel
    tokenizer: Tokenizer

    @classmethod
    def load(cls, settings: Settings) -> "LoadedBase":
        """Find the model, or download it, and hash it, which takes minutes for a large one.

        settings: of one model, with an absolute data directory. Raises ServeError.
        """
        folder = find_model(settings.model)
        try:
            base = BaseModel.load(folder, settings.model_id, settings.data_dir / "cache")
            tokenizer = Tokenizer(folder)
        except (UnsupportedBaseModel, UnsupportedTokenizer, ValueError) as error:
            raise ServeError(str(error)) from error
        longest = base.config.get("max_position_embeddings")
        if settings.max_model_len and longest and settings.max_model_len > longest:
            raise ServeError(
                f"max_model_len is {settings.max_model_len}; {base.model_id} was made for "
                f"{longest}."
            )
        return cls(settings, base, tokenizer)

    def write_engine_config(self, home: Home) -> JsonObject:
        """Write the vocabulary into the home, and return the configuration of its engines.

        They are the fields of engine.config.EngineConfig by name, since the engine reads them from
        a file. data_dir is missing, since each engine has one of its own.
        """
        vocabulary = home.folder / "engine" / "vocabulary"
        vocabulary.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_vocabulary(vocabulary, self.tokenizer.vocabulary)
        one = self.settings
        unquantized, drafts = one.unquantized_model, one.draft_model
        return {
            "model_dir": str(self.base.path),
            "base_revision": self.base.base_revision,
            "unquantized_model_dir": unquantized and str(unquantized.resolve()),
            "draft_model_dir": drafts and str(drafts.resolve()),
            "vocabulary_path": str(vocabulary),
            "eos_token_ids": list(self.tokenizer.eos_token_ids),
            "public_prefixes": _public_prefixes(one.public_prompts, self.tokenizer),
            "adapter_cache_dir": str(home.folder / "cache" / "adapters"),
            "fetcher_socket": str(home.fetcher_socket),
            "threads": one.threads,
            "hold_lifetime_s": one.hold_lifetime_s,
            **{each.name: getattr(one, each.name) for each in fields(EngineSettings)},
        }


def _public_prefixes(prompts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each text as the prefix of a prompt, and as a chat's system message."""
    prefixes = [tokenizer.encode(prompt) for prompt in prompts]
    for prompt in prompts:
        # Two chats with the same system message have the same tokens up to its end.
        with contextlib.suppress(TemplateError):
            one, other = (
                tokenizer.encode(
                    tokenizer.chat_template.render(_chat(prompt, user)), add_special_tokens=False
                )
                for user in ("a", "1")
            )
            prefixes.append(list(os.path.commonprefix([one, other])))
    return prefixes


def _chat(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]
