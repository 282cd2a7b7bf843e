"""Keys that the gateways of one installation derive without communicating."""

import zmq
from hypothesis import given
from hypothesis import strategies as st

from server.pool.keys import InstallationKeys

peppers = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(peppers)
def test_public_keys_are_those_that_libzmq_gives_for_the_secret_ones(pepper):
    keys = InstallationKeys.of(pepper)
    for pair in (keys.engine, keys.gateway):
        assert len(pair.secret) == 40
        assert zmq.curve_public(pair.secret.encode()).decode() == pair.public


@given(st.sets(peppers, min_size=2, max_size=2))
def test_one_pepper_gives_one_pool_and_another_shares_nothing_with_it(two):
    ours, theirs = (InstallationKeys.of(pepper) for pepper in sorted(two))
    assert InstallationKeys.of(sorted(two)[0]) == ours

    def parts(keys):
        return {
            keys.engine.secret, keys.engine.public, keys.gateway.secret, keys.gateway.public,
            keys.pool_id,
        }  # fmt: skip

    assert len(parts(ours)) == 5
    assert not parts(ours) & parts(theirs)


def test_keys_stay_the_same_from_release_to_release():
    """Gateways and engines of two releases run side by side while one replaces the other."""
    keys = InstallationKeys.of("1" * 64)
    assert keys.pool_id == "cbf11db3ba971a8a"
    assert keys.engine.public == "[O)X5508!^}tj@p94/VA6bn6LU+hKwJ%1c<dWsjp"
    assert keys.gateway.public == "U}?]((EVfrQ(}?z424J#x?PC:8oC.y!nhHkYbL-!"


def test_secret_keys_are_not_shown():
    keys = InstallationKeys.of("1" * 64)
    assert keys.engine.secret not in repr(keys)
    assert keys.gateway.secret not in repr(keys)
