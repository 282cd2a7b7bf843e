import shutil

import pytest
from sqlalchemy import Engine, create_engine, delete, event

from registry.base.base_model import BaseModel
from registry.base.base_models import BaseModels
from registry.catalog.catalog import Catalog
from registry.storage.free_space import WorkDir
from registry.storage.storage import LocalStorage
from registry.storage.url import open_storage
from registry.tables import metadata
from registry.uploads.rules import RegistryLimits
from tests.faulty_s3 import CREDENTIALS
from tests.registry.factories import Clock, make_base, sound_files
from tests.registry.publishing import publish
from tests.registry.upload_world import Uploads
from tests.signed_s3 import signed_s3


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    """Two layers, GQA: q and o are [16, 16], k and v [8, 16], gate and up [24, 16]."""
    return make_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, tmp_path):
    """An empty database with the registry's tables; every test that needs SQL uses it."""
    if request.param == "postgresql":
        engine = request.getfixturevalue("registry_postgres")
        with engine.begin() as conn:
            for table in reversed(metadata.sorted_tables):
                conn.execute(delete(table))
        yield engine
        return
    path = tmp_path / "registry.db"
    shutil.copy(request.getfixturevalue("registry_sqlite"), path)
    engine = create_engine(f"sqlite:///{path}")
    event.listen(engine, "connect", _check_foreign_keys)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def registry_sqlite(tmp_path_factory):
    """A SQLite file with the tables: copying it takes 1 ms, creating the tables 20 ms."""
    path = tmp_path_factory.mktemp("registry") / "registry.db"
    engine = create_engine(f"sqlite:///{path}")
    metadata.create_all(engine)
    engine.dispose()
    return path


@pytest.fixture(scope="session")
def registry_postgres(make_postgres):
    """One database for all tests: emptying its tables takes 2 ms, creating them again 60 ms."""
    engine = create_engine(make_postgres("template1"))
    metadata.create_all(engine)
    yield engine
    engine.dispose()


def _check_foreign_keys(connection, _record):
    connection.execute("PRAGMA foreign_keys = ON")


@pytest.fixture
def connection(database: Engine):
    with database.connect() as conn:
        yield conn


@pytest.fixture
def clock():
    return Clock(1_000_000.0)


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "store")


@pytest.fixture(scope="module")
def signed():
    """An S3 server and its signature checker. The server's keys are in the environment."""
    with signed_s3() as (s3, signatures), pytest.MonkeyPatch.context() as environment:
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        yield s3, signatures


@pytest.fixture
def s3(signed):
    yield signed[0]
    signed[0].clear()


@pytest.fixture
def signatures(signed):
    yield signed[1]
    signed[1].ahead_s = 0.0


@pytest.fixture(scope="module")
def bucket(signed):
    """A store on the whole bucket; tests share its client, which takes half a second to make."""
    return open_storage(f"s3://bucket?endpoint_url={signed[0].url}", attempts=1)


@pytest.fixture
def catalog(base, clock):
    return Catalog(BaseModels(base), clock)


@pytest.fixture
def uploads(database, catalog, storage, clock, tmp_path):
    """Uploads in parts of 1000 bytes, with a separate work folder so that tests see leftovers."""
    work = WorkDir(tmp_path / "work")
    work.path.mkdir()
    limits = RegistryLimits(part_bytes=1000, max_open_uploads=3)
    return Uploads(database.begin, catalog, storage, clock, work, limits)


@pytest.fixture
def make_version(catalog, database):
    """A function that publishes a version without an upload, in a transaction of its own."""

    def make(tenant_id="tenant-a", name="pirate", *, at=catalog, **options):
        with database.begin() as conn:
            return publish(at, conn, tenant_id, name, **options)

    return make


@pytest.fixture
def open_upload(uploads, base):
    """A function that opens an upload and sends all its bytes.

    files: those of a sound adapter, whose weights have the seed, if none are given.
    """

    def open_upload(files=None, *, seed=1, **fields):
        files = files or sound_files(base, seed=seed)
        return uploads.send_all(uploads.open(files, **fields), files)

    return open_upload


@pytest.fixture
def publish_upload(uploads, open_upload):
    """A function that makes a version of an upload."""

    def publish_upload(files=None, **fields):
        return uploads.complete(open_upload(files, **fields))

    return publish_upload
