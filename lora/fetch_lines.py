"""JSON lines from an engine to the fetcher; lora.fetch documents their meaning."""

from typing import Literal, TypedDict


class HelloLine(TypedDict):
    """The first line of an engine. form: the fields of a PackedForm."""

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


EngineLine = HelloLine | FetchLine | DropLine
