"""A page of a list, in OpenAI's shape."""

from typing import Any


def list_page(items: list[dict[str, Any]], key: str, limit: int) -> dict[str, Any]:
    """items: up to one more than `limit`, which says that there is more.   key: what names one."""
    data = items[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0][key] if data else None,
        "last_id": data[-1][key] if data else None,
        "has_more": len(items) > limit,
    }
