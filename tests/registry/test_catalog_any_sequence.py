"""Compares random sequences of catalog operations with a model in plain dictionaries."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import StaticPool, create_engine, select

from registry.base.base_models import BaseModels
from registry.catalog.alias_rows import Canary, Target, bucket_of
from registry.catalog.catalog import Catalog
from registry.errors import NotFound
from registry.tables import adapter_versions, metadata
from tests.refusals import refused
from tests.registry.factories import Clock, sha256
from tests.registry.publishing import BASE, publish

ALIASES = ("latest", "prod", "next")
HOUR_S, RETENTION_H = 3600, 10

PIRATE = ("tenant-a", "pirate")

# Most steps hit one adapter, so that much happens to it; the others are another adapter of its
# tenant and an adapter of the same name of another tenant.
places = st.sampled_from([PIRATE] * 6 + [("tenant-a", "poet"), ("tenant-b", "pirate")])
aliases = st.sampled_from(ALIASES)
numbers = st.integers(1, 3)
canaries = st.none() | st.builds(Canary, numbers, st.sampled_from([1, 50, 50, 99, 100]))


@dataclass
class ModelVersion:
    """A version. deleted_h: None while ready.   deletion: shared by what it was deleted with."""

    digest: str
    deleted_h: int | None = None
    deletion: object = None
    is_purged: bool = False


@dataclass
class ModelAdapter:
    adapter_id: str
    versions: dict[int, ModelVersion] = field(default_factory=dict)
    aliases: dict[str, Target] = field(default_factory=dict)
    history: dict[str, list[Target | None]] = field(default_factory=dict)
    deleted_h: int | None = None
    deletion: object = None

    def is_ready(self, number: int) -> bool:
        return number in self.versions and self.versions[number].deleted_h is None

    def move(self, alias: str, target: Target | None) -> None:
        if self.aliases.get(alias) == target:
            return
        self.history.setdefault(alias, []).append(target)
        if target is None:
            del self.aliases[alias]
        else:
            self.aliases[alias] = target


class Both:
    """The catalog and its model. Each step derives the error to expect, if any, from the model."""

    def __init__(self):
        self.engine = create_engine("sqlite://", poolclass=StaticPool)
        metadata.create_all(self.engine)
        self.clock = Clock(1_000_000.0)
        self.catalog = Catalog(BaseModels(BASE), self.clock, retention_s=RETENTION_H * HOUR_S)
        self.hour = 0
        self.place = PIRATE
        self.adapters: dict[tuple[str, str], ModelAdapter] = {}
        self.inserted: dict[tuple[str, int], tuple] = {}

    def check(self):
        self.the_same_adapters_are_listed()
        self.the_same_names_mean_the_same_versions()
        self.the_same_versions_are_listed()
        self.a_version_is_what_it_was_when_it_was_inserted()

    @contextmanager
    def expecting(self, error, place):
        """A transaction on the adapter `place` that must raise a fault of the code `error`."""
        self.place = place
        if error is None:
            with self.engine.begin() as conn:
                yield conn
        else:
            with refused(error), self.engine.begin() as conn:
                yield conn

    def live(self, place):
        adapter = self.adapters.get(place)
        return adapter if adapter and adapter.deleted_h is None else None

    def is_over(self, deleted_h):
        return self.hour >= deleted_h + RETENTION_H

    def publish(self, place, content, alias):
        with self.expecting(None, place) as conn:
            version = publish(self.catalog, conn, *place, content=content, alias=alias)
        adapter = self.adapters.setdefault(place, ModelAdapter(version.adapter_id))
        if adapter.deleted_h is not None:
            adapter.deleted_h = None
            for old in list(adapter.aliases):
                adapter.move(old, None)
        digest = sha256(content.encode())
        same = [
            n for n, v in adapter.versions.items() if v.digest == digest and adapter.is_ready(n)
        ]
        number = max(same) if same else len(adapter.versions) + 1
        adapter.versions.setdefault(number, ModelVersion(digest))
        assert version.version == number
        for moved in {"latest", alias or "latest"}:
            adapter.move(moved, Target(number))

    def set_alias(self, place, alias, number, canary):
        adapter, error = self.live(place), None
        target = Target(number, canary)
        if canary and (canary.version == number or canary.percent == 100):
            error = "invalid_canary"
        elif not adapter or not all(adapter.is_ready(n) for n in target.versions):
            error = "model_not_found"
        with self.expecting(error, place) as conn:
            self.catalog.set_alias(conn, *place, alias, number, canary)
        if not error:
            adapter.move(alias, target)

    def roll_back(self, place, alias):
        adapter, error = self.live(place), None
        history = adapter.history.get(alias, []) if adapter else []
        before = history[-2] if len(history) > 1 else None
        if not history:
            error = "model_not_found"
        elif before is None:
            error = "nothing_to_roll_back"
        elif not all(adapter.is_ready(n) for n in before.versions):
            error = "version_deleted"
        with self.expecting(error, place) as conn:
            self.catalog.roll_back_alias(conn, *place, alias)
        if not error:
            adapter.move(alias, before)

    def remove_alias(self, place, alias):
        adapter, error = self.live(place), None
        if alias == "latest":
            error = "invalid_name"
        elif not adapter or alias not in adapter.aliases:
            error = "model_not_found"
        with self.expecting(error, place) as conn:
            self.catalog.remove_alias(conn, *place, alias)
        if not error:
            adapter.move(alias, None)

    def delete_version(self, place, number):
        adapter, error = self.live(place), None
        if not adapter or not adapter.is_ready(number):
            error = "model_not_found"
        elif any(number in target.versions for target in adapter.aliases.values()):
            error = "version_in_use"
        with self.expecting(error, place) as conn:
            self.catalog.delete_version(conn, *place, number)
        if not error:
            version = adapter.versions[number]
            version.deleted_h, version.deletion = self.hour, object()

    def restore_version(self, place, number):
        adapter, error = self.live(place), None
        version = adapter.versions.get(number) if adapter else None
        if not version:
            error = "model_not_found"
        elif version.deleted_h is None:
            error = "not_deleted"
        elif self.is_over(version.deleted_h):
            error = "retention_over"
        with self.expecting(error, place) as conn:
            self.catalog.restore_version(conn, *place, number)
        if not error:
            version.deleted_h = None

    def delete_adapter(self, place):
        adapter = self.live(place)
        with self.expecting(None if adapter else "model_not_found", place) as conn:
            self.catalog.delete_adapter(conn, *place)
        if adapter:
            adapter.deleted_h, adapter.deletion = self.hour, object()
            for version in adapter.versions.values():
                if version.deleted_h is None:
                    version.deleted_h, version.deletion = self.hour, adapter.deletion

    def restore_adapter(self, place):
        adapter, error = self.adapters.get(place), None
        if not adapter:
            error = "model_not_found"
        elif adapter.deleted_h is None:
            error = "not_deleted"
        elif self.is_over(adapter.deleted_h):
            error = "retention_over"
        with self.expecting(error, place) as conn:
            self.catalog.restore_adapter(conn, *place)
        if not error:
            adapter.deleted_h = None
            for version in adapter.versions.values():
                if version.deletion is adapter.deletion:
                    version.deleted_h = None

    def wait(self, hours):
        self.hour += hours
        # Deletions of one moment are dated some milliseconds apart; the extra second exceeds those.
        self.clock.now_s += hours * HOUR_S + 1

    def purge(self):
        with self.expecting(None, PIRATE) as conn:
            num_purged = self.catalog.purge_deleted(conn)
        over = [
            version
            for adapter in self.adapters.values()
            for version in adapter.versions.values()
            if version.deleted_h is not None
            and self.is_over(version.deleted_h)
            and not version.is_purged
        ]
        for version in over:
            version.is_purged = True
        assert num_purged == len(over)

    def the_same_adapters_are_listed(self):
        with self.engine.connect() as conn:
            for tenant_id in ("tenant-a", "tenant-b"):
                listed = self.catalog.list_adapters(conn, tenant_id)
                assert {a.name: a.aliases for a in listed} == {
                    name: adapter.aliases
                    for (owner, name), adapter in self.adapters.items()
                    if owner == tenant_id and adapter.deleted_h is None
                }
                for adapter in listed:
                    assert adapter.latest.version == adapter.aliases["latest"].version

    def the_same_names_mean_the_same_versions(self):
        with self.engine.connect() as conn:
            for (tenant_id, name), adapter in self.touched():
                is_live = adapter.deleted_h is None
                expected = {n: n if is_live and adapter.is_ready(n) else None for n in range(1, 4)}
                for alias in ALIASES:
                    target = adapter.aliases.get(alias) if is_live else None
                    bucket = bucket_of(adapter.adapter_id, alias, "key")
                    expected[alias] = target.version_in(bucket) if target else None
                for asked, number in expected.items():
                    assert self.resolved(conn, tenant_id, f"{name}@{asked}") == number
                assert self.resolved(conn, tenant_id, name) == expected["latest"]

    def the_same_versions_are_listed(self):
        with self.engine.connect() as conn:
            for place, adapter in self.touched():
                if adapter.deleted_h is not None:
                    continue
                ready = [n for n in adapter.versions if adapter.is_ready(n)]
                listed = self.catalog.list_versions(conn, *place)
                assert [v.version for v in listed] == sorted(ready, reverse=True)
                states = {
                    n: "ready" if v.deleted_h is None else "purged" if v.is_purged else "deleted"
                    for n, v in adapter.versions.items()
                }
                everything = self.catalog.list_versions(conn, *place, include_deleted=True)
                assert {v.version: v.state for v in everything} == states

    def a_version_is_what_it_was_when_it_was_inserted(self):
        columns = [
            column
            for column in adapter_versions.columns
            if column.name not in ("state", "deleted_at_ms")
        ]
        with self.engine.connect() as conn:
            rows = {(r.adapter_id, r.version): tuple(r) for r in conn.execute(select(*columns))}
        for identity, row in self.inserted.items():
            assert rows[identity] == row
        self.inserted = rows

    def touched(self):
        """The adapter of the last step, alone: checking all of them takes three times as long."""
        return [(self.place, self.adapters[self.place])] if self.place in self.adapters else []

    def resolved(self, conn, tenant_id, model):
        try:
            return self.catalog.resolve(conn, tenant_id, model, "key").version
        except NotFound:
            return None


move = st.tuples(st.just(Both.set_alias), places, aliases, numbers, canaries)
step = st.one_of(
    st.tuples(st.just(Both.publish), places, st.sampled_from("abc"), st.none() | aliases),
    *(move, move, move),  # weighted three times: most of them name a missing version
    st.tuples(st.just(Both.roll_back), places, aliases),
    st.tuples(st.just(Both.remove_alias), places, aliases),
    st.tuples(st.just(Both.delete_version), places, numbers),
    st.tuples(st.just(Both.restore_version), places, numbers),
    st.tuples(st.just(Both.delete_adapter), places),
    st.tuples(st.just(Both.restore_adapter), places),
    st.tuples(st.just(Both.wait), st.sampled_from([1, 7])),
    st.tuples(st.just(Both.purge)),
)


def run(steps):
    both = Both()
    try:
        for content in "abc":
            both.publish(PIRATE, content, None)
        for step, *arguments in steps:
            step(both, *arguments)
            both.check()
    finally:
        both.engine.dispose()


@settings(max_examples=12, deadline=None)
@given(steps=st.lists(step, min_size=15, max_size=25))
def test_any_sequence_gives_the_answers_of_the_model(steps):
    run(steps)


@pytest.mark.soak
@settings(max_examples=500, deadline=None)
@given(steps=st.lists(step, min_size=20, max_size=80))
def test_many_long_sequences_give_the_answers_of_the_model(steps):
    run(steps)
