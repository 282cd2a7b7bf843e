"""The disk cache's quota, whatever happens to its files."""

import contextlib
import os
import shutil
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora.disk_cache import CacheInUse, DiskCache, packed_path
from lora.errors import AdapterError
from registry.storage.free_space import FreeSpace, Volume
from tests.registry.fake_disk import FakeDisk


@pytest.fixture
def make_cache(tmp_path):
    """Opens caches in `tmp_path`; those that are open at the end are closed."""
    opened = []

    def make(quota_bytes=1000):
        opened.append(DiskCache(tmp_path, quota_bytes))
        return opened[-1]

    yield make
    for cache in opened:
        cache.close()


def path_of(cache, name):
    return packed_path(cache.root, name, "f" * 64)


def store(cache, name, size_bytes, canonical_bytes=1):
    """Store an adapter as the fetcher does: a download, then a packed file."""
    with cache.drafts() as drafts:
        cache.allocate(drafts, canonical_bytes)
        draft = cache.allocate(drafts, size_bytes)
        assert bytes_on_disk(cache) <= cache.quota_bytes
        cache.keep(draft, path_of(cache, name))


def bytes_on_disk(cache):
    return sum(path.stat().st_size for path in cache.root.iterdir())


def names(cache):
    return {path.name.partition(".")[0] for path in cache.root.glob("*.packed")}


def use_at(cache, name, seconds):
    os.utime(path_of(cache, name), (seconds, seconds))


def test_what_the_engine_has_opened_stays(make_cache):
    cache = make_cache(350)
    for seconds, name in enumerate("abc", 1):
        store(cache, name, 100)
        use_at(cache, name, seconds)
    cache.close()
    again = make_cache(350)
    path_of(again, "a").touch()  # the loader touches files that it opens
    store(again, "d", 100)
    assert names(again) == {"a", "c", "d"}
    assert again.touch(path_of(again, "c"))
    store(again, "e", 100)
    assert names(again) == {"c", "d", "e"}


def test_room_is_reserved_before_the_first_byte(make_cache):
    cache = make_cache(300)
    store(cache, "a", 200)
    with cache.drafts() as drafts:
        draft = cache.allocate(drafts, 250)
        assert names(cache) == set()
        assert draft.stat().st_size == 250
        assert cache.used_bytes == 250
    assert cache.used_bytes == bytes_on_disk(cache) == 0


def test_what_is_larger_than_the_quota_is_too_large_and_evicts_nobody(make_cache):
    cache = make_cache(300)
    store(cache, "a", 200)
    with pytest.raises(AdapterError) as refused, cache.drafts() as drafts:
        cache.allocate(drafts, 301)
    assert refused.value.failure.kind == "too_large"
    assert names(cache) == {"a"}


def test_an_adapter_that_outgrows_the_quota_when_packed_is_too_large(make_cache):
    cache = make_cache(300)
    with pytest.raises(AdapterError) as refused:
        store(cache, "a", 260, canonical_bytes=60)
    assert refused.value.failure.kind == "too_large"
    assert cache.used_bytes == bytes_on_disk(cache) == 0


def test_room_that_others_have_reserved_is_not_taken_from_them(make_cache):
    cache = make_cache(300)
    store(cache, "a", 50)
    with cache.drafts() as drafts:
        cache.allocate(drafts, 200)
        with pytest.raises(AdapterError) as refused, cache.drafts() as others:
            cache.allocate(others, 101)
        assert refused.value.failure.kind == "unavailable", "there will be room when they are done"
        assert names(cache) == {"a"}, "nobody is evicted in vain"
        with cache.drafts() as others:
            cache.allocate(others, 100)
            assert names(cache) == set()


def test_a_draft_that_a_read_still_has_open_holds_no_room(make_cache):
    cache = make_cache()
    with cache.drafts() as drafts:
        hanging = cache.allocate(drafts, 100).open("r+b")
    with hanging:
        assert os.fstat(hanging.fileno()).st_blocks == 0


def test_a_smaller_quota_holds_from_the_start(make_cache):
    first = make_cache(1000)
    for seconds, name in enumerate("abcde", 1):
        store(first, name, 150)
        use_at(first, name, seconds)
    first.close()
    smaller = make_cache(400)
    assert names(smaller) == {"d", "e"}
    assert smaller.used_bytes == 300


def test_one_process_at_a_time_has_the_folder(make_cache, tmp_path):
    first = make_cache()
    with pytest.raises(CacheInUse, match="another fetcher"):
        DiskCache(tmp_path, 1000)
    first.close()
    make_cache()


# ---- a disk that others fill, and a folder that others delete ----


def test_the_disks_reserve_is_left_to_others_and_old_files_make_room(tmp_path):
    others_bytes = 0

    def look(folder):
        cached_bytes = sum(path.stat().st_size for path in folder.iterdir())
        return Volume(1, 2000, 2000 - cached_bytes - others_bytes)

    with closing(DiskCache(tmp_path, 10_000, FreeSpace(1000, look))) as cache:
        for seconds, name in enumerate("abcd", 1):
            store(cache, name, 100)
            use_at(cache, name, seconds)
        others_bytes = 500
        store(cache, "e", 200)
        assert names(cache) == {"c", "d", "e"}
        assert look(tmp_path).free_bytes >= 1000


def test_nothing_is_evicted_where_that_would_not_bring_the_reserve_back(tmp_path):
    disk = FakeDisk(free_bytes=10_000)
    with closing(DiskCache(tmp_path, 10_000, FreeSpace(1000, disk))) as cache:
        store(cache, "a", 100)
        disk.free_bytes = 900
        with pytest.raises(AdapterError) as refused:
            store(cache, "b", 100)
        assert (refused.value.failure.kind, refused.value.failure.error) == (
            "unavailable",
            "the disk is full",
        )
        assert names(cache) == {"a"}
        assert cache.used_bytes == bytes_on_disk(cache) == 100


def test_a_folder_that_was_deleted_is_made_again_locked_and_counted_anew(make_cache, tmp_path):
    cache = make_cache()
    store(cache, "a", 300)
    shutil.rmtree(tmp_path)
    assert not cache.touch(path_of(cache, "a"))
    store(cache, "b", 100)
    assert names(cache) == {"b"}
    assert cache.used_bytes == bytes_on_disk(cache) == 100
    with pytest.raises(CacheInUse):
        DiskCache(tmp_path, 1000)


def test_a_folder_that_another_fetcher_made_and_locked_is_not_taken(make_cache, tmp_path):
    cache = make_cache()
    shutil.rmtree(tmp_path)
    other = make_cache()
    for _ in range(2):
        with pytest.raises(CacheInUse):
            store(cache, "a", 100)
    other.close()
    store(cache, "a", 100)


NAMES = st.sampled_from("abcdef")
STEPS = st.one_of(
    st.tuples(st.just("store"), NAMES, st.integers(1, 700), st.integers(1, 500)),
    st.tuples(st.just("begin"), st.integers(1, 700)),
    st.tuples(st.just("end"), st.booleans(), NAMES),
    st.tuples(st.just("vanish"), NAMES),
    st.tuples(st.just("use"), NAMES, st.integers(0, 100)),
    st.tuples(st.just("look"), NAMES),
    st.tuples(st.just("half")),
    st.tuples(st.just("restart")),
)


class Fetches:
    """A cache and the events that may happen to it; fetches that have begun are `under_way`."""

    def __init__(self, folder):
        self.cache = DiskCache(folder, 1000)
        self.under_way = []
        self.killed = []

    def store(self, name, size_bytes, canonical_bytes):
        store(self.cache, name, size_bytes, canonical_bytes)

    def begin(self, size_bytes):
        with contextlib.ExitStack() as stack:
            drafts = stack.enter_context(self.cache.drafts())
            draft = self.cache.allocate(drafts, size_bytes)
            self.under_way.append((draft, stack.pop_all()))

    def end(self, is_kept, name):
        if self.under_way:
            draft, stack = self.under_way.pop()
            with stack:
                if is_kept:
                    self.cache.keep(draft, path_of(self.cache, name))

    def vanish(self, name):
        path_of(self.cache, name).unlink(missing_ok=True)

    def use(self, name, seconds):
        if path_of(self.cache, name).exists():
            use_at(self.cache, name, seconds)

    def look(self, name):
        path = path_of(self.cache, name)
        assert self.cache.touch(path) == path.exists()

    def half(self):
        self.cache.evict_half()

    def restart(self):
        self.killed += self.under_way  # fetches of a killed process are not cleaned up
        self.under_way = []
        self.cache.close()
        self.cache = DiskCache(self.cache.root, 1000)
        assert self.cache.used_bytes == bytes_on_disk(self.cache)


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(STEPS, max_size=40))
def test_the_quota_holds_after_any_sequence(tmp_path_factory, steps):
    """The cache may count files that have vanished, but it counts all files that exist."""
    fetches = Fetches(tmp_path_factory.mktemp("cache"))
    for step, *arguments in steps:
        with contextlib.suppress(AdapterError):
            getattr(fetches, step)(*arguments)
        cache = fetches.cache
        assert bytes_on_disk(cache) <= cache.used_bytes <= cache.quota_bytes
    while fetches.under_way:
        fetches.end(False, "a")
    for name in "abcdef":
        fetches.look(name)
    assert fetches.cache.used_bytes == bytes_on_disk(fetches.cache)
    fetches.cache.close()
