"""The engines that should run on one machine, and the members file for gateways."""

from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.leaving import forget_settled, is_settled, mark_settled
from server.launch.engine_folders import engine_folders, engine_name
from server.launch.homes import Home
from server.launch.local_engines import LocalEngines
from server.launch.settings import Settings
from server.pool.control_files import members_file, wanted_file

CONFIG = {"fetcher_socket": "f", "adapter_cache_dir": "c", "disk_cache_bytes": 1, "max_fetches": 1}
CONFIG |= {"threads": 1, "base_revision": "b"}


def make_pool(data_dir, least=1, most=None, slug=""):
    data_dir.mkdir(exist_ok=True)
    settings = Settings(model="m", engines=least, max_engines=most, data_dir=data_dir)
    return LocalEngines(Home(data_dir, slug), CONFIG, settings)


def leave_journal(data_dir, number):
    (data_dir / engine_name(number) / "journal").mkdir(parents=True)


def wanted_of(pool):
    """Return the processes that should run beside the fetcher."""
    return [f"{spec.name} {spec.command[2].removeprefix('engine.')}" for spec in pool()[1:]]


def members(data_dir):
    return [member.name for member in members_file(data_dir).read()]


def test_members_of_another_home_have_its_prefix_and_their_folders_have_not(tmp_path):
    pool = make_pool(tmp_path, least=2, slug="slug")
    pool()
    assert members(tmp_path) == ["slug.engine", "slug.engine-2"]
    found = members_file(tmp_path).read()
    assert found[1].address == f"ipc://{tmp_path}/engine-2/engine.sock"


def test_what_an_earlier_start_left_is_settled_whatever_its_number(tmp_path):
    for number in (1, 2, 10, 99):
        leave_journal(tmp_path, number)
    for name in ("engine-1", "engine-02", "engine-x", "engine-3.json", "engines"):
        (tmp_path / name / "journal").mkdir(parents=True)
    assert wanted_of(make_pool(tmp_path)) == [
        "engine engine", "engine-2 retired", "engine-10 retired", "engine-99 retired",
    ]  # fmt: skip


@example(2, 4, [("want", 3), ("run", 3), ("want", 2), ("settle", 3), ("want", 0), ("want", None)])
@hypothesis_settings(max_examples=25, deadline=None)
@given(
    least=st.integers(1, 3),
    most=st.integers(1, 6),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("want"), st.integers(0, 8) | st.none()),
            st.tuples(st.just("run"), st.integers(1, 6)),
            st.tuples(st.just("settle"), st.integers(1, 6)),
        ),
        max_size=20,
    ),
)
def test_whoever_has_something_to_settle_is_planned_and_known(tmp_path_factory, least, most, steps):
    """Members, children and journals agree after any sequence of steps."""
    data_dir = tmp_path_factory.mktemp("data")
    most = max(least, most)
    pool, wanted = make_pool(data_dir, least=least, most=most), least
    for what, number in steps:
        folder = data_dir / engine_name(number or 1)
        if what == "want":
            if number is None:
                wanted_file(data_dir).path.unlink(missing_ok=True)
            else:
                wanted_file(data_dir).write(number)
            wanted = least if number is None else number
        elif what == "run" and f"{folder.name} engine" in wanted_of(pool):
            (folder / "journal").mkdir(parents=True, exist_ok=True)
            forget_settled(folder)
        elif what == "settle" and f"{folder.name} retired" in wanted_of(pool):
            mark_settled(folder)
        specs = wanted_of(pool)
        names = [spec.split()[0] for spec in specs]
        assert names == members(data_dir)
        assert len(set(names)) == len(names)
        running = [
            name for name, spec in zip(names, specs, strict=True) if spec.endswith(" engine")
        ]
        assert running == [engine_name(k + 1) for k in range(len(running))]
        assert len(running) == (min(max(wanted, least), most) if wanted else 0)
        assert pool.is_at_rest == (not specs)
        for k in range(1, 7):
            if not is_settled(data_dir / engine_name(k)):
                assert engine_name(k) in names


def test_the_folders_of_all_engines_are_found_by_number(tmp_path):
    assert engine_folders(tmp_path / "nowhere") == []
    for name in ("engine-10", "engine", "engine-2", "engines", "engine-03", "engine-4"):
        (tmp_path / name).mkdir()
        if name != "engine-4":  # no engine has run in engine-4 yet
            (tmp_path / name / "identity").touch()
    for home in ("slug-2", "slug-1"):
        (tmp_path / "bases" / home / "engine").mkdir(parents=True)
        (tmp_path / "bases" / home / "engine" / "identity").touch()
    names = [str(path.relative_to(tmp_path)) for path in engine_folders(tmp_path)]
    assert names == [
        "engine", "engine-2", "engine-10", "bases/slug-1/engine", "bases/slug-2/engine",
    ]  # fmt: skip
