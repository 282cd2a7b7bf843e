"""Downloads an export to a file; an interrupted download is resumed, also by a later command."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from server.billing.exports.formats import ExportFormat
from server.billing.exports.resuming import Whole, whole_part
from server.client.http import ApiRefused, Client, ClientError
from server.client.patience import Patience
from server.text.json_object import JsonObject

_THROUGH = "x-chorale-export-through"


def download_export(
    client: Client,
    path: str,
    params: Mapping[str, Any],
    format: ExportFormat,
    output: Path,
    *,
    patience: Patience,
    on_resume: Callable[[int], None],
) -> None:
    """Write the export to `output`, which appears when it is complete.

    params: those of the API without the format; an export without a start begins with the month in
    which it was first asked for.   on_resume: called with the id of the last entry that is there
    already. Raises ClientError, OSError; then a draft stays only if the next call can continue it.
    """
    draft = _Draft(output, {"server": client.base_url, "path": path, "format": format, **params})
    failures = 0
    try:
        while not draft.is_complete:
            size_bytes = draft.size_bytes()
            try:
                draft.fetch(client, on_resume)
            except ClientError as error:
                if isinstance(error, ApiRefused) and error.param == "after":
                    draft.discard()  # the server has another ledger now
                    continue
                failures = 1 if draft.size_bytes() > size_bytes else failures + 1
                patience.pause(error, failures)
    finally:
        draft.keep_if_resumable()


class _Draft:
    """The file of the rows so far; a note beside it names the only export that may continue it.

    is_complete: whether the file has its own name, since all rows are there.
    """

    def __init__(self, output: Path, asked: JsonObject) -> None:
        self._output = output
        self._asked = asked
        self._path = output.with_name(output.name + ".part")
        self._note = output.with_name(output.name + ".part.json")
        self.is_complete = False

    def size_bytes(self) -> int:
        return self._path.stat().st_size if self._path.exists() else 0

    def fetch(self, client: Client, on_resume: Callable[[int], None]) -> None:
        """Fetch everything after the whole rows that the draft has, and complete it."""
        note = self._read_note()
        asked = dict(self._asked)
        path = asked.pop("path")
        del asked["server"]
        with self._path.open("a+b") as file:
            whole = self._whole_part(file, note)
            file.truncate(whole.size_bytes)
            params = asked | {"start": note["start"]}
            if whole.entry_id is not None:
                params |= {"after": whole.entry_id, "through": note["through"]}
                on_resume(whole.entry_id)

            def note_headers(headers: Mapping[str, str]) -> None:
                self._write_note(note | {"through": headers.get(_THROUGH)})

            for chunk in client.download(path, params, note_headers):
                file.write(chunk)
        self._path.rename(self._output)
        self.is_complete = True

    def discard(self) -> None:
        self._path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def keep_if_resumable(self) -> None:
        """Delete the draft unless the next attempt can go on from it."""
        if self._path.exists():
            with self._path.open("rb") as file:
                if self._whole_part(file, self._read_note()).entry_id is not None:
                    return
        self.discard()

    def _whole_part(self, file: BinaryIO, note: JsonObject) -> Whole:
        file.seek(0)
        return whole_part(file, self._asked["format"]) if note["through"] else Whole()

    def _read_note(self) -> JsonObject:
        """The draft's note if it is of this export; otherwise discard the draft, and a new note."""
        try:
            note: JsonObject = json.loads(self._note.read_text())
            if note["asked"] == self._asked:
                return note
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            pass
        self.discard()
        start = self._asked.get("start")
        if start is None and self._asked.get("period") is None:
            start = f"{datetime.now(UTC):%Y-%m}-01"
        return {"asked": self._asked, "start": start, "through": None}

    def _write_note(self, note: JsonObject) -> None:
        draft = self._note.with_name(self._note.name + ".new")
        draft.write_text(json.dumps(note))
        draft.rename(self._note)
