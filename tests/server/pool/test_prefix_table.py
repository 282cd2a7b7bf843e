"""The gateway's memory of the prompts that it sent to each engine."""

from hypothesis import given
from hypothesis import strategies as st

from server.pool.prefix_table import CHUNK_TOKENS, PrefixTable, marks_of
from tests.engine.fakes import make_adapter, make_message

PROMPT = tuple(range(3 * CHUNK_TOKENS + 5))


def marks(tokens=PROMPT, **changes):
    return marks_of(make_message(prompt=tokens, **changes))


def test_a_prompt_is_found_where_one_with_the_same_beginning_went():
    table = PrefixTable()
    table.note("a", marks(PROMPT[: 2 * CHUNK_TOKENS]))
    table.note("b", marks(PROMPT[:CHUNK_TOKENS]))
    assert table.cached_tokens(marks()) == {"a": 2 * CHUNK_TOKENS, "b": CHUNK_TOKENS}


def test_another_adapter_another_tenant_and_another_beginning_are_other_prompts():
    table = PrefixTable()
    table.note("a", marks())
    assert table.cached_tokens(marks(adapter=make_adapter())) == {}
    assert table.cached_tokens(marks(cache_salt="another")) == {}
    assert table.cached_tokens(marks((7, *PROMPT[1:]))) == {}


def test_what_an_engine_had_before_it_died_is_forgotten():
    table = PrefixTable()
    for engine in ("a", "b"):
        table.note(engine, marks())
    table.forget_engine("a")
    assert table.cached_tokens(marks()) == {"b": 3 * CHUNK_TOKENS}


def test_the_oldest_prompts_make_room():
    table = PrefixTable(max_chunks=4)
    for first in range(9):
        table.note("a", marks([first] * 2 * CHUNK_TOKENS))
    remembered = [bool(table.cached_tokens(marks([n] * 2 * CHUNK_TOKENS))) for n in range(9)]
    assert remembered == [False] * 7 + [True] * 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 300))))
def test_no_engine_is_said_to_have_more_than_it_was_sent(sent):
    table = PrefixTable()
    for engine, first, length in sent:
        table.note(engine, marks([first] * length))
    for first in range(4):
        for engine, cached in table.cached_tokens(marks([first] * 256)).items():
            assert cached <= max(n for e, f, n in sent if (e, f) == (engine, first))
