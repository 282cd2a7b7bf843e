"""An engine's files and environment on a cluster node, and a node's requirements; without Ray."""

import dataclasses
import json
import shutil
import stat
from pathlib import Path

import pytest

import demo
from engine.config import EngineConfig
from engine.leaving import mark_settled
from engine.wire.encoding import read_vocabulary
from server.cluster.node import Node, prepare
from server.cluster.pool import Pool
from server.launch.engine_template import EngineTemplate
from server.launch.errors import ServeError
from server.launch.homes import Home
from server.launch.placed_engines import PlacedEngines, RayCluster
from server.launch.placer_config import PlacerConfig
from server.launch.prepare import prepare as prepare_all
from server.launch.prepare import resolve_settings
from server.launch.settings import Settings
from server.pool.control_files import Member, members_file, wanted_file
from server.pool.keys import InstallationKeys

MODEL = Path(demo.__file__).parent / "model"
KEYS = InstallationKeys.of("1" * 64)


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


@pytest.fixture
def settings(tmp_path, model):
    return resolve_settings(
        Settings(
            model=str(model), data_dir=tmp_path / "data", port=0, ray="local", threads=3,
            engines=2, max_engines=5, tensor_parallel_size=2, device="cpu",
        )
    )  # fmt: skip


@pytest.fixture
def config(settings, monkeypatch):
    """The placer's config, as `prepare_all` writes it."""
    monkeypatch.setattr("registry.extras.find_spec", lambda name: object())
    monkeypatch.setenv("CHORALE_PEPPER", "1" * 64)
    monkeypatch.setenv("CHORALE_RECEIPT_SIGNING_KEY", "2" * 64)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-token")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    placer, head, gateway = prepare_all(settings)()
    assert (placer.name, head.name, gateway.name) == ("placer", "head", "gateway")
    assert placer.environment["RAY_AUTH_TOKEN"] == "a-token"
    assert head.environment == placer.environment
    assert "CHORALE_PEPPER" not in placer.environment
    assert "RAY_AUTH_TOKEN" not in gateway.environment
    return PlacerConfig.read(settings.data_dir / "placer.json")


@pytest.fixture
def node(settings, config, tmp_path):
    """A node on which the placer has published the engine template."""
    config.template.publish(settings.data_dir)
    local = tmp_path / "chorale-1" / "engine-2"
    for folder in (local.parent, local, settings.data_dir / "engine-2"):
        folder.mkdir(mode=0o700)
    return Node(settings.data_dir, settings.data_dir / "engine-2", local, "engine", "10.0.0.7")


def template_of(node):
    return EngineTemplate.read(node.pool_dir)


def test_what_holds_keys_is_its_owners_alone(settings, config, node):
    for path in (settings.data_dir / "placer.json", EngineTemplate.path(settings.data_dir)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KEYS.engine.secret in EngineTemplate.path(settings.data_dir).read_text()
    prepare(node, template_of(node))
    assert stat.S_IMODE((settings.data_dir / "engine-2.json").stat().st_mode) == 0o600


def test_engines_never_get_the_pepper_nor_the_gateways_key(settings, node):
    prepare(node, template_of(node))
    for name in ("placer.json", "engine-2.json", "pool/template.json"):
        written = (settings.data_dir / name).read_text()
        assert "1" * 64 not in written
        assert KEYS.gateway.secret not in written


def test_an_engine_listens_on_its_node_for_the_holders_of_the_pools_key(settings, node, model):
    fetcher, engine = prepare(node, template_of(node))
    written = EngineConfig(**json.loads((settings.data_dir / "engine-2.json").read_text()))
    assert written.listen == "tcp://10.0.0.7:0"
    assert (written.server_key, written.client_key) == (KEYS.engine.secret, KEYS.gateway.public)
    assert written.data_dir == str(settings.data_dir / "engine-2")
    assert written.model_dir == str(model)
    assert (written.threads, written.tensor_parallel_size) == (3, 2)
    assert read_vocabulary(Path(written.vocabulary_path))[-1]
    # Sockets and caches lie on the node, since they do not work in a shared folder.
    assert Path(written.fetcher_socket).parent == Path(written.adapter_cache_dir).parent
    assert Path(written.fetcher_socket).parent == node.local
    assert str(node.local / "fetch.sock") in fetcher.command
    assert engine.command[2:] == ("engine", str(settings.data_dir / "engine-2.json"))
    assert engine.stop_timeout_s > settings.leave_timeout_s
    assert engine.stage > fetcher.stage, "the engine stops before its fetcher"
    assert None not in (engine.first_beat_s, fetcher.first_beat_s), (
        "both are watched on a node, too"
    )
    assert "a-secret" in fetcher.environment.values()
    assert "a-secret" not in engine.environment.values()
    assert not {"a-token"} & {*engine.environment.values(), *fetcher.environment.values()}


def test_what_is_left_of_an_engine_needs_neither_model_nor_store(settings, node, model):
    prepare(node, template_of(node))
    shutil.rmtree(model)
    shutil.rmtree(settings.data_dir / "objects")
    of_another = dataclasses.replace(template_of(node), config={
        **template_of(node).config, "base_revision": "newer",
    })  # fmt: skip
    (retired,) = prepare(dataclasses.replace(node, kind="retired"), of_another)
    assert retired.command[2] == "engine.retired"
    written = json.loads((settings.data_dir / "engine-2.json").read_text())
    assert written["base_revision"] == template_of(node).config["base_revision"], (
        "the base that it ran on"
    )


def test_a_node_without_the_model_says_so(node, model):
    shutil.rmtree(model)
    with pytest.raises(ServeError, match="no such folder"):
        prepare(node, template_of(node))


def test_a_node_with_another_model_in_its_place_says_so(node, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rope_theta": 1.5}))
    with pytest.raises(ServeError, match="put the same files there"):
        prepare(node, template_of(node))


def test_a_node_that_does_not_see_the_object_store_says_so(settings, node):
    shutil.rmtree(settings.data_dir / "objects")
    with pytest.raises(ServeError, match="share it, or use one on S3"):
        prepare(node, template_of(node))


def test_a_folder_that_others_may_write_to_is_not_used(node):
    node.local.parent.chmod(0o777)
    with pytest.raises(ServeError, match="not this user's alone"):
        prepare(node, template_of(node))


def test_an_address_of_ip_6_is_written_as_one(settings, node):
    prepare(dataclasses.replace(node, ip="fd00::7"), template_of(node))
    written = json.loads((settings.data_dir / "engine-2.json").read_text())
    assert written["listen"] == "tcp://[fd00::7]:0"


def test_an_engine_takes_gpus_where_it_will_run_on_them(config):
    on_cpu = {"num_cpus": 6, "num_gpus": 0}
    on_gpu = {"num_cpus": 1, "num_gpus": 2}
    for device, has_gpus, expected in (
        ("cpu", True, on_cpu), ("auto", False, on_cpu), ("auto", True, on_gpu),
        ("cuda", False, on_gpu),
    ):  # fmt: skip
        pool = Pool.of_config(dataclasses.replace(config, device=device), has_gpus=has_gpus)
        assert {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus} == expected
    assert (config.least, config.most) == (2, 5)


def test_gateways_of_one_pool_keep_their_journals_in_one_place(config):
    pool = Pool.of_config(config, has_gpus=False)
    assert pool.refusal(Pool(**dataclasses.asdict(pool))) is None
    for change in ({"pool_dir": "/elsewhere"}, {"base_revision": "another"}):
        (name,) = change
        assert name in pool.refusal(dataclasses.replace(pool, **change))
    # The number of cores of an engine may change while its pool runs.
    assert pool.refusal(dataclasses.replace(pool, num_cpus=1)) is None


def test_the_pools_folder_is_the_gateways_own_where_no_other_is_named(settings, tmp_path):
    def pool_dir(settings):
        home = Home(settings.data_dir)
        return PlacerConfig.of(settings, KEYS, {"base_revision": "b"}, home).pool_dir

    assert pool_dir(settings) == str(settings.data_dir)
    shared = resolve_settings(settings.model_copy(update={"pool_dir": tmp_path / "a" / ".." / "b"}))
    assert pool_dir(shared) == str(tmp_path / "b")


def test_each_base_model_has_a_placer_and_a_pool_of_its_own(settings, config, tmp_path):
    model = shutil.copytree(MODEL, tmp_path / "other")
    tables = ({"model": settings.model}, {"model": str(model), "threads": 7, "max_engines": 9})
    several = settings.model_copy(update={"model": "", "models": tables, "pool_dir": tmp_path})
    first, second, head, _ = prepare_all(several)()
    assert head.name == "head"
    slug = second.name.removesuffix(".placer")
    assert (first.name, slug.startswith("other-")) == ("placer", True)
    home = settings.data_dir / "bases" / slug
    assert second.command[-1] == str(home / "placer.json")
    first, second = (PlacerConfig.read(Path(s.command[-1])) for s in (first, second))
    assert (first.pool_id, first.pool_dir, first.prefix) == (KEYS.pool_id, str(tmp_path), "")
    assert second.pool_id == f"{KEYS.pool_id}-{slug}"
    assert (second.pool_dir, second.prefix) == (str(tmp_path / "bases" / slug), f"{slug}.")
    assert second.data_dir == str(home)
    assert (first.num_cpus, second.num_cpus) == (6, 14)
    assert (first.most, second.most) == (5, 9)


def test_a_pool_is_at_rest_when_nothing_is_wanted_and_every_journal_is_settled(tmp_path):
    home = Home(tmp_path / "home", "slug")
    engines = PlacedEngines(home, tmp_path / "pool", {})
    home.folder.mkdir()
    assert not engines.is_at_rest
    wanted_file(home.folder).write(0)
    assert engines.is_at_rest
    members_file(home.folder).write([Member("slug.engine", "tcp://a:1")])
    assert not engines.is_at_rest
    members_file(home.folder).write([])
    (tmp_path / "pool" / "engine" / "journal").mkdir(parents=True)
    assert not engines.is_at_rest
    mark_settled(tmp_path / "pool" / "engine")
    assert engines.is_at_rest


def test_what_an_earlier_pool_left_is_settled_by_its_own_placer_on_the_cluster_of_now(
    settings, config
):
    moved = settings.model_copy(update={"ray": "10.0.0.1:6379"})
    home, place = Home(settings.data_dir), RayCluster(moved, KEYS)
    assert place.settle(home) is None, "there is no journal"
    (Path(config.pool_dir) / "engine" / "journal").mkdir()
    (placer,) = place.settle(home)()
    assert placer.command[-1] == str(settings.data_dir / "placer.json")
    assert wanted_file(settings.data_dir).read() == 0
    assert config.address_file
    now = PlacerConfig.read(settings.data_dir / "placer.json")
    assert now == dataclasses.replace(config, address="10.0.0.1:6379", address_file="")


def test_engines_that_are_started_otherwise_are_others(config):
    template = config.template
    for change in ({"stop_timeout_s": 9}, {"config": template.config | {"max_num_seqs": 3}}):
        assert dataclasses.replace(template, **change).template_id != template.template_id
