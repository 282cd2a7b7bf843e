"""The loader of the first of several ranks: an adapter is placed when all ranks have it."""

import threading

import pytest
import torch

from lora.errors import Failure
from lora.layout import Layout
from lora.loader import ThreadLoader
from lora.loads import Placed
from lora.packed import PackedForm
from lora.shard import Shard
from tests.lora.factories import SHAPE, make_object, make_ref, wait_for
from tests.tiny_models import packed_adapter

NUM_SLABS = 64


class Others:
    """The other one of two ranks, which gives the test's answer. See lora.loader.OtherRanks."""

    size = 2

    def __init__(self):
        self.answer = None
        self.placings = []
        self.may_answer = threading.Event()

    def begin_placing(self, digest, slabs):
        self.placings.append((digest, slabs))
        return len(self.placings)

    def end_placing(self, number):
        assert number == len(self.placings)
        assert self.may_answer.wait(30)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Shared:
    """The loader of the first of two ranks, and an adapter on disk."""

    def __init__(self, folder):
        form = PackedForm(Layout.of(SHAPE, 4, num_shards=2), "float32", "base-1")
        self.arena = torch.zeros(NUM_SLABS, form.layout.slab_bytes, dtype=torch.uint8)
        self.others = Others()
        cache, socket_path = folder / "cache", folder / "nobody.sock"
        before = set(threading.enumerate())
        self.loader = ThreadLoader(cache, socket_path, form, self.arena, others=self.others)
        self.threads = set(threading.enumerate()) - before
        data = make_object(3)
        self.ref = make_ref(data)
        self.packed = packed_adapter(data, form, cache, Shard(0, 2))
        self.slabs = list(range(self.packed.num_slabs))

    def place(self):
        self.loader.place(self.ref, self.packed, self.slabs)


@pytest.fixture
def shared(tmp_path):
    return Shared(tmp_path)


def test_an_adapter_is_there_when_every_rank_has_its_shard(shared):
    shared.place()
    wait_for(lambda: shared.arena[shared.slabs].any())
    assert shared.loader.poll() == [], "this rank has its own; the other one does not"
    shared.others.may_answer.set()
    (placed,) = wait_for(shared.loader.poll)
    assert isinstance(placed, Placed)
    assert (placed.outcome.digest, placed.outcome.number) == (shared.ref.digest, 1)
    assert shared.others.placings == [(shared.ref.digest, shared.slabs)]
    assert torch.equal(shared.arena[shared.slabs], shared.packed.slabs)


@pytest.mark.parametrize("kind", ["evicted", "lost", "unavailable"])
def test_what_another_rank_could_not_read_is_this_adapters_failure(shared, kind):
    shared.others.answer = Failure(kind, "it was not there")
    shared.others.may_answer.set()
    shared.place()
    (placed,) = wait_for(shared.loader.poll)
    assert placed.outcome == shared.others.answer
    # An adapter that is damaged for one rank is fetched anew for all.
    assert shared.packed.path.exists() == (kind != "lost")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_without_one_of_the_ranks_nothing_goes_on(shared):
    shared.others.answer = RuntimeError("the rank is gone")
    shared.others.may_answer.set()
    shared.place()
    with pytest.raises(RuntimeError, match="is gone"):
        wait_for(shared.loader.poll)
    next(t for t in shared.threads if t.name == "adapter-loader").join()
