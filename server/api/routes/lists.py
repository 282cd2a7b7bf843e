"""A page of a list, in OpenAI's shape."""

from server.text.json_object import JsonObject


def list_page(items: list[JsonObject], key: str, limit: int) -> JsonObject:
    """items: up to one more than `limit`, which says that there is more.   key: what names one."""
    data = items[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0][key] if data else None,
        "last_id": data[-1][key] if data else None,
        "has_more": len(items) > limit,
    }
