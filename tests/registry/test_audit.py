"""The words of the audit log."""

from registry.catalog.audit import in_words


def test_a_line_says_none_and_dates_and_no_words_of_the_program() -> None:
    values = {"weight": 1.5, "max_adapters": None, "effective_at_ms": 1_798_761_600_123}
    words = in_words(values | {"until_ms": None, "scope_id": "", "is_pinned": True})
    assert words == (
        "weight=1.5 max_adapters=none effective_at=2027-01-01T00:00:00Z until=none scope_id=none "
        "is_pinned=true"
    )
