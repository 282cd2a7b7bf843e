"""Expected tokens of a tenant's requests, learned from requests that ended."""

from hypothesis import given
from hypothesis import strategies as st

from server.limits.learned import FIRST_GUESS, LearnedTokens


def test_nothing_is_known_of_a_new_tenant() -> None:
    assert LearnedTokens().expect("new") == FIRST_GUESS


@given(st.integers(0, 8192))
def test_answers_of_one_length_are_expected_to_have_it(tokens: int) -> None:
    learned = LearnedTokens()
    for _ in range(60):
        learned.learn("t", tokens)
    assert max(1, tokens) <= learned.expect("t") <= max(1, tokens) + 1


@given(st.lists(st.integers(0, 8192), min_size=1, max_size=50))
def test_what_is_expected_stays_between_one_and_three_times_the_longest(lengths: list[int]) -> None:
    learned = LearnedTokens()
    for tokens in lengths:
        learned.learn("t", tokens)
    assert 1 <= learned.expect("t") <= max(1, 3 * max(lengths) + 1)


def test_the_tenants_asked_for_longest_ago_are_forgotten() -> None:
    learned = LearnedTokens(max_tenants=2)
    for tenant in ("a", "b"):
        learned.learn(tenant, 1000)
    learned.expect("a")
    learned.learn("c", 1000)
    assert learned.expect("b") == FIRST_GUESS
    assert learned.expect("a") > FIRST_GUESS
