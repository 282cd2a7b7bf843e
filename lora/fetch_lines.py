"""JSON lines between an engine and the fetcher; lora.fetch documents their meaning."""

from typing import Literal, TypedDict

from lora.errors import FailureKind


class HelloLine(TypedDict):
    """The first line of an engine. form: from PackedForm.to_json."""

    op: Literal["hello"]
    form: dict[str, object]


class FetchLine(TypedDict):
    op: Literal["fetch"]
    order: int
    object_key: str
    digest: str
    size_bytes: int
    timeout_s: float


class DropLine(TypedDict):
    op: Literal["drop"]
    order: int


class AnswerLine(TypedDict):
    order: int
    object_key: str
    kind: FailureKind | None
    error: str | None
    was_there: bool
    seconds: float
    size_bytes: int
    used_bytes: int
    slabs_bytes: int


EngineLine = HelloLine | FetchLine | DropLine
