"""A page of a list, in OpenAI's shape."""

from server.text.json_object import JsonObject


def list_page(items: list[JsonObject], key: str, limit: int) -> JsonObject:
    """A page of items. items: up to one more than `limit`; that one shows that there are more.

    key: the field by which an item is named.
    """
    data = items[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0][key] if data else None,
        "last_id": data[-1][key] if data else None,
        "has_more": len(items) > limit,
    }
