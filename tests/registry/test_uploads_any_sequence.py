"""Compares random sequences of parts, completions, verdicts, waits and sweeps with a model.

A step may be killed at any boundary: before, within and after a transaction, and before and after
each write of the store. It is then done again, by whoever repeats the request.
"""

from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from sqlalchemy import StaticPool, create_engine

from registry.base.base_models import BaseModels
from registry.catalog.catalog import Catalog
from registry.checks.validator import ValidatedAdapter
from registry.errors import InvalidAdapter, ObjectNotFound
from registry.formats.peft_config import CONFIG_FILE
from registry.formats.peft_format import WEIGHTS_FILE
from registry.storage.free_space import WorkDir
from registry.storage.storage import StoredObject
from registry.tables import metadata
from registry.uploads.proof import Proof
from registry.uploads.rules import RegistryLimits
from tests.refusals import refused
from tests.registry.factories import Clock, sha256
from tests.registry.publishing import BASE
from tests.registry.upload_world import Uploads

A, NAME = "tenant-a", "pirate"
HOUR_S, TTL_H, MAX_OPEN, PART_BYTES = 3600, 24, 3, 10

# Files by kind; the validator refuses the last kind.
CONTENTS = {
    kind: {CONFIG_FILE: kind.encode(), WEIGHTS_FILE: (kind * 7)[:25].encode().ljust(25, b".")}
    for kind in ("first", "second", "bad")
}

kinds = st.sampled_from(["first", "first", "second", "bad"])
# Mostly the newest: a version needs three steps of one upload.
indexes = st.sampled_from([0, 0, 0, 1, 2, 3])
verdicts = st.sampled_from(["passed", "passed", "mismatch", "unavailable"])
complete = st.tuples(st.just("complete"), indexes)
repeatable = st.one_of(
    st.tuples(
        st.just("send"),
        indexes,
        st.sampled_from([CONFIG_FILE, WEIGHTS_FILE]),
        st.integers(0, 2),
        st.booleans(),
    ),
    complete,
    complete,
    st.tuples(st.just("prove"), indexes, verdicts),
    st.tuples(st.just("sweep")),
)
steps = st.one_of(
    st.tuples(st.just("create"), kinds),
    st.tuples(st.just("send_all"), indexes),
    st.tuples(st.just("send_all"), indexes),
    repeatable,
    st.tuples(st.just("killed"), st.integers(1, 37), repeatable),
    st.tuples(st.just("wait"), st.sampled_from([1, 2, TTL_H])),
    st.tuples(st.just("delete")),
)


class Killed(BaseException):
    """The end of a process. After it, each boundary raises it again: no clean-up has an effect."""


class MemoryStore:
    """A store that keeps objects in memory and dates them by the test's clock.

    reach: called before and after each write.
    """

    def __init__(self, clock, reach):
        self.clock = clock
        self.reach = reach
        self.objects = {}

    def put(self, key, path):
        self.reach()
        self.objects[key] = (path.read_bytes(), self.clock())
        self.reach()

    def read(self, key):
        yield self._found(key)[0]

    def size(self, key):
        return len(self._found(key)[0])

    def delete(self, key):
        self.reach()
        self.objects.pop(key, None)
        self.reach()

    def list(self, prefix):
        found = sorted(key for key in self.objects if key.startswith(prefix))
        return (StoredObject(key, self.size(key), self.objects[key][1]) for key in found)

    def _found(self, key):
        if key not in self.objects:
            raise ObjectNotFound(key=key)
        return self.objects[key]


class PlainValidator:
    """A validator that takes the weights as the canonical object and refuses the config `bad`."""

    def check(self, bases, config, weights, target, tokenizer):
        if config.read_bytes() == b"bad":
            raise InvalidAdapter(code="bad", message="It is bad.")
        data = weights.read_bytes()
        target.write_bytes(data)
        return ValidatedAdapter(
            {"rank": 1}, sha256(data), len(data), bases[0].model_id, is_offline=True
        )


@dataclass
class ModelUpload:
    """The model of an upload. sent: the accepted parts by file name."""

    upload: object
    kind: str
    state: str
    until_h: int
    sent: dict[str, list[bytes]] = field(default_factory=dict)
    fault: str | None = None

    def received(self, filename):
        return sum(map(len, self.sent.get(filename, [])))


class Both:
    """Uploads and their model. Each step derives from the model which error it expects, if any.

    kill_in: number of boundaries until the process is killed; None: it lives.
    """

    def __init__(self, folder):
        self.engine = create_engine("sqlite://", poolclass=StaticPool)
        metadata.create_all(self.engine)
        self.clock = Clock(1_000_000.0)
        self.store = MemoryStore(self.clock, self.reach)
        self.kill_in = None
        limits = RegistryLimits(part_bytes=PART_BYTES, max_open_uploads=MAX_OPEN)
        self.catalog = Catalog(BaseModels(BASE), self.clock)
        self.uploads = Uploads(
            self.begin,
            self.catalog,
            self.store,
            self.clock,
            WorkDir(folder),
            limits,
            PlainValidator(),
        )
        self.hour = 0
        self.made = []
        self.versions = {}  # live versions: kind by number
        self.num_versions = 0
        self.latest = None
        self.published = set()

    def reach(self):
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in <= 0:
                raise Killed

    @contextmanager
    def begin(self):
        self.reach()
        with self.engine.begin() as conn:
            yield conn
            self.reach()
        self.reach()

    @contextmanager
    def expecting(self, error):
        if error is None:
            yield
        else:
            with refused(error):
                yield

    def state_of(self, model):
        is_over = model.state == "open" and model.until_h <= self.hour
        return "expired" if is_over else model.state

    def number_of(self, kind):
        return max((n for n, other in self.versions.items() if other == kind), default=None)

    def publish(self, model):
        number = self.number_of(model.kind)
        if number is None:
            self.num_versions += 1
            number = self.num_versions
        self.versions[number] = model.kind
        self.published.add(model.kind)
        self.latest = number
        model.state = "complete"
        model.sent = {name: [data] for name, data in CONTENTS[model.kind].items()}

    # ---- steps ----

    def create(self, kind):
        active = [m for m in self.made if self.state_of(m) in ("open", "proving")]
        is_known = self.number_of(kind) is not None
        is_full = len(active) >= MAX_OPEN and not is_known
        with self.expecting("quota_exceeded" if is_full else None):
            upload = self.uploads.open_known(CONTENTS[kind])
            model = ModelUpload(upload, kind, "open", self.hour + TTL_H)
            if is_known:
                self.publish(model)
            self.made.append(model)

    def send(self, model, filename, place, is_sound):
        whole = CONTENTS[model.kind][filename]
        start = place * PART_BYTES
        if start >= len(whole):
            return
        part = whole[start : start + PART_BYTES]
        part = part if is_sound else bytes(len(part))
        taken = model.sent.get(filename, [])
        error, is_next = None, start == model.received(filename)
        if self.state_of(model) not in ("open", "complete"):
            error = "upload_not_open"
        elif self.state_of(model) == "open":
            if not is_next and (place >= len(taken) or taken[place] != part):
                error = "upload_offset_mismatch"
            elif is_next:
                model.sent.setdefault(filename, []).append(part)
        with self.expecting(error):
            self.uploads.send(model.upload, filename, start, part)

    def send_all(self, model):
        for filename in CONTENTS[model.kind]:
            for place in range(3):
                if place * PART_BYTES >= model.received(filename):
                    self.send(model, filename, place, True)

    def complete(self, model):
        error, state = None, self.state_of(model)
        whole = {name: b"".join(parts) for name, parts in model.sent.items()}
        if state == "expired":
            error = "upload_not_open"
        elif state == "failed":
            error = model.fault
        elif state == "open":
            sizes = {name: len(data) for name, data in CONTENTS[model.kind].items()}
            if {name: len(data) for name, data in whole.items()} != sizes:
                error = "upload_not_complete"
            elif whole != CONTENTS[model.kind] or model.kind == "bad":
                model.state = "failed"
                error = model.fault = "bad" if whole == CONTENTS[model.kind] else "digest_mismatch"
            elif self.number_of(model.kind) is not None:
                self.publish(model)
            else:
                model.state, model.until_h = "proving", self.hour + TTL_H
        with self.expecting(error):
            self.uploads.build(model.upload)

    def prove(self, model, verdict):
        if model.state == "proving":
            if verdict == "passed":
                self.publish(model)
            elif verdict != "unavailable":
                model.state, model.fault = "failed", verdict
        self.uploads.finish(model.upload, Proof(verdict=verdict))

    def wait(self, hours):
        self.hour += hours
        self.clock.now_s += hours * HOUR_S

    def sweep(self):
        for model in self.made:
            model.state = self.state_of(model)
            if model.state == "proving" and model.until_h <= self.hour:
                model.state, model.fault = "failed", "unavailable"
        self.uploads.sweep_uploads()
        self.uploads.purge()
        self.uploads.sweep_objects()
        young = {k for k, (_, at) in self.store.objects.items() if at >= self.clock() - HOUR_S}
        left = set(self.store.objects) - young - self.needed() - self.restorable()
        # Parts that a killed gateway did not discard stay until their upload's proof has ended.
        proving = {m.upload.upload_id for m in self.made if m.state == "proving"}
        left = {key for key in left if key.split("/")[1] not in proving}
        assert left == set(), "the sweep left an orphan"

    def delete(self):
        error = None if self.versions else "model_not_found"
        with self.expecting(error), self.begin() as conn:
            self.catalog.delete_adapter(conn, A, NAME)
        self.versions, self.latest = {}, None

    # ---- invariants ----

    def needed(self):
        """Keys of the objects that versions, proofs and open uploads need."""
        meant = set(self.versions.values())
        meant |= {m.kind for m in self.made if m.state == "proving"}
        keys = {self.object_key(kind) for kind in meant}
        for model in self.made:
            if self.state_of(model) == "open":
                for name, parts in model.sent.items():
                    keys |= {
                        f"uploads/{model.upload.upload_id}/{name}/{i * PART_BYTES:016d}"
                        for i in range(len(parts))
                    }
        return keys

    def restorable(self):
        """Keys of objects that deleted versions may keep for a week, until they are purged."""
        return {self.object_key(kind) for kind in self.published}

    @staticmethod
    def object_key(kind):
        return f"tenants/{A}/{sha256(CONTENTS[kind][WEIGHTS_FILE])}"

    def check(self):
        assert self.needed() <= set(self.store.objects)
        for model in self.made:
            found = self.uploads.get(model.upload)
            assert found.state == self.state_of(model)
            assert found.error_code == model.fault
            received = {name: file.received_bytes for name, file in found.files.items()}
            assert received == {name: model.received(name) for name in received}
        claimed = self.uploads.claim(99, claim_ms=0)
        proving = {m.upload.upload_id for m in self.made if m.state == "proving"}
        assert {upload.upload_id for upload in claimed} == proving
        listed = []
        if self.versions:
            with self.begin() as conn:
                listed = self.catalog.list_versions(conn, A, NAME)
                assert self.catalog.resolve(conn, A, NAME).version == self.latest
        found = {version.version: version.object_key for version in listed}
        assert found == {n: self.object_key(kind) for n, kind in self.versions.items()}


def run(both, step):
    name, *arguments = step
    if name == "killed":
        both.kill_in, step = arguments
        with suppress(Killed):
            run(both, step)
        both.kill_in = None
        run(both, step)
        return
    if name in ("send", "send_all", "complete", "prove"):
        if not both.made:
            return
        # Steps act on the newest uploads, since older ones have mostly ended.
        index, *rest = arguments
        arguments = [both.made[-1 - index % len(both.made)], *rest]
    getattr(both, name)(*arguments)
    both.check()


ORPHAN_BESIDE_A_PROOF = [
    *(("send_all", 0), ("complete", 0), ("prove", 0, "mismatch"), ("wait", 2)),
    *(("create", "second"), ("send_all", 0), ("complete", 0), ("sweep",)),
]

A_PROOF_THAT_NOBODY_GIVES = [
    *(("send_all", 0), ("wait", TTL_H - 1), ("complete", 0)),
    *(("create", "second"), ("create", "second"), ("create", "second")),
    *(("wait", TTL_H - 1), ("sweep",), ("create", "second"), ("wait", 1), ("create", "second")),
    *(("sweep",), ("complete", 3)),
]
"""Steps in which a proof, whose time begins when it does, takes one of the places of uploads."""


@pytest.mark.parametrize("kill_in", range(1, 38))
def test_steps_that_are_killed_at_any_boundary_and_done_again_leave_what_the_model_says(
    tmp_path, kill_in
):
    """No step has more boundaries than 37."""
    both = Both(tmp_path)
    for kind in ("bad", "first", "second"):
        run(both, ("create", kind))
        run(both, ("killed", kill_in, ("send", 0, CONFIG_FILE, 0, True)))
        run(both, ("send_all", 0))
        run(both, ("killed", kill_in, ("complete", 0)))
        run(both, ("killed", kill_in, ("prove", 0, "passed" if kind == "first" else "mismatch")))
    run(both, ("create", "bad"))
    run(both, ("send_all", 0))
    for hours in (TTL_H, TTL_H + 2):
        run(both, ("wait", hours))
        run(both, ("killed", kill_in, ("sweep",)))
    both.engine.dispose()


@settings(max_examples=25, deadline=None)
@example(ORPHAN_BESIDE_A_PROOF)
@example(A_PROOF_THAT_NOBODY_GIVES)
@given(sequence=st.lists(steps, min_size=15, max_size=30))
def test_any_sequence_leaves_what_the_model_says(tmp_path_factory, sequence):
    note(str(sequence))
    both = Both(tmp_path_factory.mktemp("work"))
    run(both, ("create", "first"))
    for step in sequence:
        run(both, step)
    both.engine.dispose()
