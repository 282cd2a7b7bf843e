import threading

import httpx
import pytest

from server.client.direct import PARTS_AT_ONCE, StoreRefused, StoreUnreachable
from server.client.files import WEIGHTS_FILE, Unreadable
from server.client.progress import Watcher
from server.client.uploads import UploadMemory
from tests.server.fake_uploads import Clock, FakeUploads, break_off, make_adapter, make_uploader

NUM_PARTS = 5  # four parts of the weights, one of the config


@pytest.fixture
def server():
    return FakeUploads()


@pytest.fixture
def folder(tmp_path):
    return make_adapter(tmp_path / "adapter", bytes(range(37)))


def refuse(store, request):
    return httpx.Response(403, text="<Error><Code>SignatureDoesNotMatch</Code></Error>")


def forget(store, request):
    return httpx.Response(200)


def age_all_urls(store, request):
    store.epoch += 1


def test_parts_go_to_their_urls_and_nowhere_else(server, folder):
    pushed = make_uploader(server).push("mine", folder, direct=True)
    assert pushed.upload["state"] == "complete"
    assert server.num_calls("PUT", "") == 0
    assert len(server.store.seen) == NUM_PARTS
    assert not any("authorization" in headers for headers in server.store.seen), "the key stays"


def test_urls_that_are_too_old_are_asked_for_again(server, folder):
    server.store.faults = [None, None, age_all_urls]
    pushed = make_uploader(server).push("mine", folder, direct=True)
    assert pushed.upload["state"] == "complete"


@pytest.mark.parametrize("fault", [refuse, break_off, forget])
def test_what_failed_is_sent_in_the_next_round_and_nothing_else_twice(server, folder, fault):
    server.store.faults = [None, fault]
    make_uploader(server).push("mine", folder, direct=True)
    assert len(server.store.seen) == NUM_PARTS + 1


def test_a_later_push_sends_what_the_store_has_not(server, folder, tmp_path):
    memory = UploadMemory(tmp_path / "memory")
    server.store.faults = [None, None, None, *[break_off] * 100]
    with pytest.raises(StoreUnreachable):
        make_uploader(server).push("mine", folder, direct=True, memory=memory)
    arrived = 3
    server.store.faults, server.store.seen = [], []
    make_uploader(server).push("mine", folder, direct=True, memory=memory)
    assert len(server.uploads) == 1
    assert len(server.store.seen) == NUM_PARTS - arrived


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (refuse, r"store\.test refuses part 1 of .*: 403 SignatureDoesNotMatch\."),
        (forget, r"store\.test refuses part 1 of .*: it took it, and does not have it\."),
    ],
)
def test_rounds_that_bring_nothing_are_bounded(server, folder, fault, sentence):
    clock = Clock()
    server.store.faults = [fault] * 1000
    with pytest.raises(StoreRefused, match=sentence) as raised:
        make_uploader(server, clock).push("mine", folder, direct=True)
    assert clock.pauses == [1.0, 2.0, 4.0, 8.0, 10.0]
    assert "epoch" not in str(raised.value), "a presigned URL is a secret"


def test_as_long_as_every_round_brings_something_it_goes_on(server, folder):
    clock = Clock()

    def take_a_few_a_round(store, request):
        taken = len(server.uploads["up_0"]["content"][WEIGHTS_FILE])
        return refuse(store, request) if taken > server.num_calls("GET", "") else None

    make_adapter(folder, bytes(600))
    server.store.faults = [take_a_few_a_round] * 1000
    make_uploader(server, clock, max_failures=2).push("mine", folder, direct=True)
    assert len(clock.pauses) > 2


def test_a_file_that_cannot_be_read_is_not_the_stores_fault(server, folder):
    server.store.faults = [lambda *_: (folder / WEIGHTS_FILE).unlink()]
    # There are more parts than can be under way when the file is deleted.
    make_adapter(folder, bytes(200))
    with pytest.raises(Unreadable, match="No such file"):
        make_uploader(server).push("mine", folder, direct=True)


def test_a_few_parts_are_on_their_way_at_once(server, folder):
    together = threading.Barrier(PARTS_AT_ONCE, timeout=10)
    server.store.faults = [lambda *_: together.wait() and None] * PARTS_AT_ONCE
    pushed = make_uploader(server).push("mine", folder, direct=True)
    assert pushed.upload["state"] == "complete"
    assert not together.broken


def test_progress_counts_every_part_and_ends_at_the_whole(server, folder):
    class Diary(Watcher):
        seen = ()

        def sent(self, sent_bytes):
            self.seen += (sent_bytes,)

    diary = Diary()
    make_uploader(server).push("mine", folder, direct=True, watcher=diary)
    assert max(diary.seen) == diary.seen[-1] == 39
