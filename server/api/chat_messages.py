"""Chats as requests send them, in OpenAI's formats: messages with calls and results, and tools."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from registry.errors import Invalid
from server.api.request_objects import RequestObject, shown_key
from server.inference import generation_request
from server.text.json_object import JsonObject
from server.text.template_variables import TemplateVariable, check_variables
from server.tools.tool import MAX_BYTES, MAX_TOOLS, Tool, ToolUse, ordered

_MAX_MESSAGES = 2048
_MAX_PARTS = 64
_MAX_CALLS = 128
"""The most calls in one message."""
_MAX_KEY_CHARACTERS = 512
_MAX_TEXT_CHARACTERS = 4 << 20
"""No text is longer than the largest body that may be sent."""

Text = Annotated[str, Field(max_length=_MAX_TEXT_CHARACTERS)]
Key = Annotated[str | None, Field(max_length=_MAX_KEY_CHARACTERS)]
_Name = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
_KWARGS = "chat_template_kwargs"
_VariableName = Annotated[str, Field(pattern="^[A-Za-z][A-Za-z0-9_]{0,63}$")]
_CallId = Annotated[str, Field(min_length=1, max_length=_MAX_KEY_CHARACTERS)]


_CACHE_CONTROL = {"cache_control": "the prefix cache needs no marks"}
_ADDED_BY_SERVERS = _CACHE_CONTROL | {
    "annotations": "sources that another server named; they are no part of the text",
    "extra_content": "another server's note for itself",
    "provider_specific_fields": "another server's note for itself",
}


class _TextPart(RequestObject):
    """A part of a content.   type: always `text`.   text: its text; parts follow each other."""

    without_effect = _ADDED_BY_SERVERS | {"logprobs": "they are no part of the text"}
    type: Literal["text"]
    text: Text


_Content = Text | Annotated[list[_TextPart], Field(max_length=_MAX_PARTS)]


class Prediction(RequestObject):
    """OpenAI's field: text that an answer may turn out to be, in whole or in part.

    type: always `content`.   content: the text, or its parts.
    """

    type: Literal["content"]
    content: _Content

    @property
    def text(self) -> str:
        return _text(self.content)


class _CalledFunction(RequestObject):
    """A call's function.   name: the tool's name.   arguments: a JSON object, as text."""

    name: _Name
    arguments: Text


class _Call(RequestObject):
    """A call of a tool.

    id: the name by which the tool's message refers to the call.   type: always `function`.
    function: the function and its arguments.
    """

    without_effect = _ADDED_BY_SERVERS | {"index": "calls are in order"}
    id: _CallId
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Message(RequestObject):
    """A message of a chat.

    role: who says it; `developer` is the same as `system`.
    content: its text, or parts of it; null is no text, of the assistant or of a tool.
    name: the name of who says it, for the model's chat template.
    tool_calls: calls that the assistant made.
    tool_call_id: which call a tool's message answers; only a tool's message has it.
    reasoning_content: what the assistant thought before it answered.
    reasoning: the same by another name; reasoning_content counts where both are sent.
    """

    exact: ClassVar[frozenset[str]] = frozenset({"content"})
    not_served = {"audio": (), "function_call": (), "refusal": ()}
    without_effect = _ADDED_BY_SERVERS | {
        "id": "messages are in order",
        "reasoning_details": "reasoning in another server's form; its text is in `reasoning`",
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: Key = None
    tool_calls: list[_Call] = Field(default_factory=list, max_length=_MAX_CALLS)
    tool_call_id: _CallId | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @property
    def thought(self) -> str | None:
        """The assistant's reasoning before its answer, under either name; None if there is none."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def plain(self) -> JsonObject:
        """The message in the form that chat templates take."""
        plain: JsonObject = {"role": "system" if self.role == "developer" else self.role}
        if self.content is not None:
            plain["content"] = _text(self.content)
        elif not self.tool_calls:
            plain["content"] = ""
        if self.tool_calls:
            plain["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        others = {"name": self.name, "tool_call_id": self.tool_call_id}
        others["reasoning_content"] = self.thought
        return plain | {name: value for name, value in others.items() if value is not None}

    def fault(self) -> tuple[str, str] | None:
        """The field that does not go with the message's role, and why; or None."""
        if self.content is None and self.role not in ("assistant", "tool"):
            return "content", 'Field required; send "" for no text'
        if self.tool_calls and self.role != "assistant":
            return "tool_calls", "only the assistant's messages have calls"
        if self.thought is not None and self.role != "assistant":
            name = "reasoning" if self.reasoning_content is None else "reasoning_content"
            return name, "only the assistant's messages have reasoning"
        if (self.tool_call_id is None) == (self.role == "tool"):
            return "tool_call_id", "a tool's message needs it, and no other message takes it"
        return None


class _Function(RequestObject):
    """A function that an answer may call.

    name: the name that calls have.   description: what it does, for the model.
    parameters: a JSON schema of the object of its arguments; null for none.
    strict: whether a keyword of the schema that cannot be enforced is an error.
    """

    exact: ClassVar[frozenset[str]] = frozenset({"parameters"})
    without_effect = _CACHE_CONTROL
    name: _Name
    description: Text | None = None
    parameters: Annotated[dict[str, Any], Field(max_length=MAX_BYTES)] | None = None
    strict: bool = False


class _Tool(RequestObject):
    """A tool.   type: always `function`.   function: the function that may be called."""

    without_effect = _CACHE_CONTROL
    type: Literal["function"]
    function: _Function


class _FunctionName(RequestObject):
    """A function by its name.   name: the name of one of the tools."""

    without_effect = dict.fromkeys(
        ("description", "parameters", "strict"), "the tool of this name in `tools` says it"
    )
    name: _Name


class NamedTool(RequestObject):
    """The one tool that an answer has to call.   type: always `function`.   function: the tool."""

    type: Literal["function"]
    function: _FunctionName


class _AllowedTools(RequestObject):
    """The tools that may be called.

    mode: with `auto` an answer may call them, with `required` it has to.
    tools: the tools, by name.
    """

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedTools(RequestObject):
    """The tools that an answer may call, where all stay in the prompt.

    type: `allowed_tools`; a choice of one tool has `function`.
    allowed_tools: the tools, and whether one has to be called.
    """

    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedTools


class Chat(RequestObject):
    """Messages and tools; and whether an answer begins after them or continues the last one.

    messages: the chat so far, the oldest first.   tools: what an answer may call.
    add_generation_prompt: whether the prompt ends with the start of a new answer; null for true,
    unless continue_final_message is true.
    continue_final_message: whether the answer continues the last message, the assistant's.
    chat_template_kwargs: variables for the model's chat template, such as `enable_thinking`; the
    template has to read them.
    enable_thinking: the template's variable of this name.
    reasoning_effort: the template's variable of this name; a template with a switch alone, such as
    `enable_thinking`, gets false for `none` and true for all others.
    """

    exact: ClassVar[frozenset[str]] = frozenset({_KWARGS})
    messages: Annotated[list[_Message], Field(min_length=1, max_length=_MAX_MESSAGES)]
    tools: list[_Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[_VariableName, Any] = Field(default_factory=dict, max_length=64)
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )

    def for_template(self, use: ToolUse | None) -> generation_request.Chat:
        """The chat for the model's template."""
        return generation_request.Chat(
            messages=[message.plain() for message in self.messages],
            use=use,
            continues=self.continue_final_message,
            begins=self.add_generation_prompt is not False,
            variables=self._variables,
        )

    @property
    def _variables(self) -> list[TemplateVariable]:
        """The variables for the template; null is none."""
        own = {"enable_thinking": self.enable_thinking, "reasoning_effort": self.reasoning_effort}
        kwargs = self.chat_template_kwargs.items()
        given = [TemplateVariable(name, it, shown_key(_KWARGS, name)) for name, it in kwargs]
        given += [TemplateVariable(name, it, name) for name, it in own.items()]
        return [each for each in given if each.value is not None]

    def check_chat(self) -> None:
        """Check the messages, the variables, and whether the last message can be continued.
        Raises Invalid.
        """
        check_variables(self._variables)
        for place, message in enumerate(self.messages):
            if fault := message.fault():
                field, why = fault
                raise Invalid.at(f"messages[{place}].{field}", why)
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            why = "it cannot be true beside continue_final_message; send false, or leave it out"
            raise Invalid.at("add_generation_prompt", why)
        if self.messages[-1].role != "assistant" or self.messages[-1].tool_calls:
            why = "the last message must be the assistant's, without calls"
            raise Invalid.at("continue_final_message", why)

    def use_of_tools(self, choice: ToolChoice = "auto", *, is_parallel: bool) -> ToolUse | None:
        """The tools, and which may be called; None without tools. Raises Invalid."""
        tools = tuple(_tool(tool.function, place) for place, tool in enumerate(self.tools))
        names = [tool.name for tool in tools]
        for place, name in enumerate(names):
            if name in names[:place]:
                path = f"tools[{place}].function.name"
                raise Invalid.at(path, "another tool has this name")
        use = _use(tools, choice, is_parallel=is_parallel)
        if use.size_bytes > MAX_BYTES:
            raise Invalid.at("tools", f"they may have {MAX_BYTES} bytes in all at most")
        return use if tools else None


def _text(content: str | list[_TextPart]) -> str:
    """A content's text; parts follow each other without anything between them."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _use(tools: tuple[Tool, ...], choice: ToolChoice, *, is_parallel: bool) -> ToolUse:
    names = tuple(tool.name for tool in tools)
    path = "tool_choice"
    if isinstance(choice, str):
        if choice == "required" and not tools:
            raise Invalid.at(path, "there are no tools")
        return ToolUse(tools, choice, names, is_parallel)
    if isinstance(choice, NamedTool):
        path += ".function.name"
        use = ToolUse(tools, "required", (choice.function.name,), is_parallel=False)
    else:
        path += ".allowed_tools.tools"
        allowed = tuple(tool.function.name for tool in choice.allowed_tools.tools)
        use = ToolUse(tools, choice.allowed_tools.mode, allowed, is_parallel)
    if unknown := [name for name in use.allowed if name not in names]:
        raise Invalid.at(path, f"there is no tool {unknown[0]}")
    return use


def _tool(function: _Function, place: int) -> Tool:
    parameters = function.parameters
    path = f"tools[{place}]"
    if parameters and parameters.get("type", "object") != "object":
        raise Invalid.at(f"{path}.function.parameters.type", "arguments are an object")
    return Tool(
        name=function.name,
        description=function.description,
        parameters=ordered(parameters) if parameters else None,
        strict=function.strict,
        param=path,
    )
