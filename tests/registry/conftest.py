import shutil

import pytest
from sqlalchemy import Engine, create_engine, delete, event

from registry.base_model import BaseModel
from registry.base_models import BaseModels
from registry.catalog import Catalog
from registry.storage import LocalStorage
from registry.storage_url import open_storage
from registry.tables import metadata
from registry.upload_rules import RegistryLimits
from registry.uploads import Uploads
from registry.work_dir import WorkDir
from tests.faulty_s3 import CREDENTIALS
from tests.registry.factories import (
    Clock,
    InProcessValidator,
    declare,
    make_base,
    send_all,
    sound_files,
)
from tests.registry.publishing import publish
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
def uploads(catalog, storage, clock, tmp_path):
    """Uploads in parts of 1000 bytes, with a separate work folder so that tests see leftovers."""
    (tmp_path / "work").mkdir()
    limits = RegistryLimits(part_bytes=1000, max_open_uploads=3)
    uploads = Uploads(catalog, storage, limits, clock, WorkDir(tmp_path / "work"))
    uploads.validator = InProcessValidator()
    return uploads


@pytest.fixture
def make_version(catalog, database):
    """A function that publishes a version without an upload, in a transaction of its own."""

    def make(tenant_id="tenant-a", name="pirate", *, at=catalog, **options):
        with database.begin() as conn:
            return publish(at, conn, tenant_id, name, **options)

    return make


@pytest.fixture
def open_upload(uploads, database, base, tmp_path):
    """A function that creates an upload and sends all its bytes.

    files: those of a sound adapter, whose weights have the seed, if none are given.
    create: makes another upload than one of an adapter, of a connection and the declared files.
    """

    def open_upload(files=None, *, seed=1, create=None, name="pirate", **options):
        files = files or sound_files(base, seed=seed)
        with database.begin() as conn:
            if create is not None:
                upload = create(conn, "tenant-a", "key-1", declare(files))
            else:
                upload = uploads.create_upload(
                    conn, "tenant-a", "key-1", name, declare(files), **options
                )
            send_all(uploads, conn, upload, files, tmp_path)
        return upload

    return open_upload
