"""The bases of all JSON answers' models: what routes return and the OpenAPI document says.

Lists and their pages are in OpenAI's format.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from server.billing.rating import format_usd
from server.text.times import unix_seconds

Item = TypeVar("Item")


class Answer(BaseModel):
    """A JSON answer, or a part of one.

    Each text and number has an example (`Field(examples=[...])`), from which the OpenAPI document
    makes the answer's. A field without a value is null, never left out. Nothing is converted: a
    value of another type is a fault of ours.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        json_schema_serialization_defaults_required=True,
        defer_build=True,  # the first answer of a kind builds its model, no start builds all
    )

    @classmethod
    def of_record(cls, record: object, **others: Any) -> Self:
        """Show a record by its attributes of the fields' names; a time `x_ms` is `x` in seconds,
        and an amount `x_nanousd` also `x_usd` in dollars.

        others: fields that the record does not have, or has in another form.
        """
        for name in cls.model_fields.keys() - others.keys():
            if hasattr(record, f"{name}_ms"):
                others[name] = unix_seconds(getattr(record, f"{name}_ms"))
            elif hasattr(record, name):
                others[name] = getattr(record, name)
            elif name.endswith("_usd"):
                others[name] = format_usd(getattr(record, f"{name.removesuffix('usd')}nanousd"))
        return cls(**others)


class ListAnswer(Answer, Generic[Item]):
    """A list. has_more: whether there are items after these."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool = False


class Page(ListAnswer[Item], Generic[Item]):
    """A part of a list. first_id, last_id: of its items, null where there are none."""

    first_id: str | int | None = Field(examples=["first"])
    last_id: str | int | None = Field(examples=["last"])

    @classmethod
    def of(cls, items: Sequence[Item], key: Callable[[Item], str | int], limit: int) -> Self:
        """Make a page. items: up to one more than `limit`; that one shows that there are more.

        key: gives the name or the number of an item.
        """
        data = list(items[:limit])
        return cls(
            data=data,
            has_more=len(items) > limit,
            first_id=key(data[0]) if data else None,
            last_id=key(data[-1]) if data else None,
        )
