from server.billing.months import end_of, month_before, month_of, next_month


def test_a_month_is_of_utc_and_ends_when_the_next_one_begins():
    assert month_of(0) == "1970-01"
    assert (next_month("2026-11"), next_month("2026-12")) == ("2026-12", "2027-01")
    assert (month_before("2027-01"), month_before("2026-12")) == ("2026-12", "2026-11")
    assert month_of(end_of("2026-12")) == "2027-01"
    assert month_of(end_of("2026-12") - 1) == "2026-12"
