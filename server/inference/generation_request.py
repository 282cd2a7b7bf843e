"""The request that is admitted and generated, independent of the format that it came in.

A new endpoint parses its own format and makes a GenerationRequest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.wire.messages import Priority, SamplingParams
from server.constraints.constraint import Constraint
from server.text.template_variables import TemplateVariable
from server.tools.tool import ToolUse


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the model's template, with the keys that OpenAI's messages have.

    use: the tools that the answer may call; None without tools.
    continues: the answer goes on with the last message.
    begins: the prompt ends with the beginning of the assistant's turn.
    variables: for the template.
    """

    messages: Sequence[Mapping[str, Any]]
    use: ToolUse | None = None
    continues: bool = False
    begins: bool = True
    variables: Sequence[TemplateVariable] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Prompts, and how to answer them.

    prompts: a chat, or prompts that are each a text or its token ids.
    sampling: in the engine's form; max_tokens is not set yet, n counts answers to one prompt.
    max_tokens: completion tokens of each answer; None for all that the context leaves.
    truncate_prompt_tokens: how many of a prompt's tokens are kept, -1 for as many as the context
    has room for, None for all.   keeps_first_tokens: whether they are the first, not the last.
    request_key: requests with the same key get the same version of a weighted alias.
    named_token_ids: {parameter: token id} of every token id that the parameters name.
    constraint: what every answer must match; None if answers are free.
    bad_words: texts that an answer must not have.
    thinking_token_budget: tokens of reasoning after which an answer goes on; None for no limit.
    shows_special_tokens: whether special tokens are text, also where stop strings are looked for.
    prediction: text that the answers may turn out to be, in whole or in part.
    drafts, shares_drafts: as in the engine's AddRequest.
    """

    model: str
    prompts: Chat | Sequence[str | list[int]]
    sampling: SamplingParams
    max_tokens: int | None
    truncate_prompt_tokens: int | None = None
    keeps_first_tokens: bool = False
    priority: Priority = Priority.INTERACTIVE
    request_key: str | None = None
    named_token_ids: Mapping[str, int] = field(default_factory=dict)
    constraint: Constraint | None = None
    bad_words: Sequence[str] = ()
    thinking_token_budget: int | None = None
    shows_special_tokens: bool = False
    prediction: str = ""
    drafts: bool = True
    shares_drafts: bool = False

    @property
    def prompt_param(self) -> str:
        """The name of the parameter that has the prompts."""
        return "messages" if isinstance(self.prompts, Chat) else "prompt"

    @property
    def tool_use(self) -> ToolUse | None:
        return self.prompts.use if isinstance(self.prompts, Chat) else None

    @property
    def constraint_param(self) -> str | None:
        """The name of the parameter that a fault of the answers' grammar is told of."""
        if self.constraint:
            return self.constraint.param.partition(".")[0]
        return "tools" if self.tool_use else None

    @property
    def num_prompts(self) -> int:
        return 1 if isinstance(self.prompts, Chat) else len(self.prompts)

    @property
    def num_answers(self) -> int:
        """How many answers the request gets, to all its prompts together."""
        return self.sampling.n * self.num_prompts
