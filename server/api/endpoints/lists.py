"""Lists and their pages, in OpenAI's format."""

from collections.abc import Callable, Sequence
from typing import Generic, Literal, Self, TypeVar

from pydantic import Field

from server.api.answer import Answer

Item = TypeVar("Item")


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
