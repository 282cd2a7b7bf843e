"""Uploads for tests: the parts that they need, and the calls that the gateway makes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from sqlalchemy import Connection

from registry.catalog.adapter_rows import Version, find_version_row
from registry.catalog.catalog import Catalog
from registry.storage.free_space import WorkDir
from registry.uploads import opening as upload_opening
from registry.uploads import rows as upload_rows
from registry.uploads import sweep
from registry.uploads.build import UploadBuilder
from registry.uploads.ends import check_fault, finish_proof
from registry.uploads.parts import put_part
from registry.uploads.proof import Proof
from registry.uploads.proving import claim_proofs
from registry.uploads.rows import Begin, Upload, UploadFile, UploadPart
from registry.uploads.rules import RegistryLimits
from tests.registry.factories import Clock, InProcessValidator, declare, sha256


@dataclass
class Uploads:
    """Fields may be exchanged between calls."""

    begin: Begin
    catalog: Catalog
    storage: Any
    clock: Clock
    work: WorkDir
    limits: RegistryLimits = field(default_factory=RegistryLimits)
    validator: Any = field(default_factory=InProcessValidator)

    def now_ms(self) -> int:
        return int(self.clock() * 1000)

    # ---- opening ----

    def open(
        self,
        files: Mapping[str, bytes] | Mapping[str, UploadFile],
        conn: Connection | None = None,
        *,
        limits: RegistryLimits | None = None,
        known: Version | None = None,
        **fields: Any,
    ) -> Upload:
        """Open an upload of pirate, or what `fields` says, in a transaction of its own."""
        if conn is None:
            with self.begin() as conn:
                return self.open(files, conn, limits=limits, known=known, **fields)
        return upload_opening.open_upload(
            conn,
            self._new(files, **fields),
            self.catalog,
            self.storage,
            limits or self.limits,
            known,
        )

    def find_known(self, conn: Connection, files: Any, **fields: Any) -> Version | None:
        return upload_opening.find_known(conn, self._new(files, **fields), self.catalog.bases)

    def open_known(self, files: Mapping[str, bytes], **fields: Any) -> Upload:
        """Open an upload with the files that are known already, as the gateway does."""
        of_name = {name: it for name, it in fields.items() if name not in ("alias", "limits")}
        with self.begin() as conn:
            known = self.find_known(conn, files, **of_name)
            return self.open(files, conn, known=known, **fields)

    def prove_again(self, conn: Connection, number: int, **fields: Any) -> Upload:
        new = self._new({}, **fields)
        return upload_opening.prove_again(conn, new, number, self.catalog, self.limits)

    def _new(
        self,
        files: Mapping[str, Any],
        name: str | None = "pirate",
        tenant_id: str = "tenant-a",
        **fields: Any,
    ) -> Upload:
        """files: contents, or what is declared of them."""
        specs = {
            filename: it if isinstance(it, UploadFile) else declare({filename: it})[filename]
            for filename, it in files.items()
        }
        return upload_opening.new_upload(tenant_id, "key-1", name, specs, self.now_ms(), **fields)

    def get(self, upload: Upload) -> Upload:
        with self.begin() as conn:
            return upload_rows.get_upload(conn, upload.tenant_id, upload.upload_id, self.now_ms())

    # ---- parts ----

    def send(
        self, upload: Upload, filename: str, start: int, data: bytes, *, total: int | None = None
    ) -> int:
        """Send one part; return received_bytes."""
        total = upload.files[filename].size_bytes if total is None else total
        with NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            return put_part(
                self.begin,
                self.storage,
                upload.tenant_id,
                upload.upload_id,
                UploadPart(filename, start, len(data), sha256(data)),
                Path(file.name),
                total,
                self.limits.part_bytes,
                self.now_ms(),
            ).received_bytes

    def send_all(self, upload: Upload, files: Mapping[str, bytes]) -> Upload:
        """Send every file in parts of the registry's size."""
        for filename, data in files.items():
            for start in range(0, len(data), self.limits.part_bytes):
                part = data[start : start + self.limits.part_bytes]
                self.send(upload, filename, start, part)
        return upload

    # ---- build and proof ----

    @property
    def builder(self) -> UploadBuilder:
        return UploadBuilder(
            begin=self.begin,
            catalog=self.catalog,
            storage=self.storage,
            limits=self.limits,
            validator=self.validator,
            work=self.work,
            now_ms=self.now_ms,
        )

    def build(self, upload: Upload) -> Upload:
        return check_fault(self.builder.build(upload.tenant_id, upload.upload_id))

    def claim(self, limit: int = 9, *, claim_ms: int = 10_000) -> list[Upload]:
        with self.begin() as conn:
            return claim_proofs(conn, self.now_ms(), limit=limit, claim_ms=claim_ms)

    def finish(
        self, upload: Upload, proof: Proof = Proof(verdict="passed"), *, retry_ms: int = 0
    ) -> Upload:
        with self.begin() as conn:
            return finish_proof(conn, self.catalog, upload, proof, self.now_ms(), retry_ms=retry_ms)

    def version_of(self, upload: Upload) -> Version | None:
        if upload.adapter_id is None or upload.version is None:
            return None
        with self.begin() as conn:
            return find_version_row(conn, upload.tenant_id, upload.adapter_id, upload.version)

    def complete(self, upload: Upload) -> Version:
        """Build the upload, pass its proof without an engine, and return its version."""
        version = self.version_of(self.finish(self.build(upload)))
        assert version is not None
        return version

    def publish(self, files: Mapping[str, bytes], **fields: Any) -> Version:
        """Open, send and complete an upload."""
        return self.complete(self.send_all(self.open(files, **fields), files))

    # ---- sweeps ----

    def sweep_uploads(self) -> int:
        return sweep.sweep_uploads(self.begin, self.storage, self.limits, self.now_ms())

    def sweep_objects(self) -> int:
        return sweep.sweep_objects(self.begin, self.storage, self.limits, self.now_ms())

    def purge(self) -> None:
        sweep.purge(self.begin, self.catalog, self.now_ms())
