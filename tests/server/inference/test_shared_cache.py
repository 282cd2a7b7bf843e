"""A cache of which no owner can take the others' part."""

from server.inference.shared_cache import SharedCache


def test_an_owner_pushes_out_its_own_values_and_finds_no_others() -> None:
    cache: SharedCache[int, str] = SharedCache(most=6, most_of_one=4)
    cache.keep("small", 0, "a")
    for key in range(9):
        cache.keep("greedy", key, "b")
        cache.get("greedy", 0)
    cache.keep("third", 1, "c")
    cache.keep("fourth", 1, "d")
    assert [cache.get("small", key) for key in range(2)] == ["a", None]
    assert [key for key in range(9) if cache.get("greedy", key)] == [0, 7, 8]
    assert [cache.get(owner, 1) for owner in ("third", "fourth")] == ["c", "d"]
