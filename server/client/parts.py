"""Sends an upload's files to the gateway, part after part, beginning where the gateway stands."""

from pathlib import Path

from server.client.files import SENT_FILES, read_part
from server.client.http import Client, ClientError
from server.client.patience import Patience
from server.client.progress import Watcher
from server.text.json_object import JsonObject

PART_BYTES = 16 << 20


class PartSender:
    """Sends an upload to the gateway.   part_bytes: size of a part; the server takes no larger."""

    def __init__(self, client: Client, patience: Patience, part_bytes: int = PART_BYTES) -> None:
        self._client = client
        self._patience = patience
        self._part_bytes = part_bytes

    def send(self, upload: JsonObject, folder: Path, watcher: Watcher) -> None:
        """Send the bytes of the files that the server does not have. Raises ClientError."""
        received = {name: int(file["received_bytes"]) for name, file in upload["files"].items()}
        watcher.restart(received)
        for filename in (name for name in SENT_FILES if name in received):
            size_bytes = upload["files"][filename]["size_bytes"]
            path = folder / filename
            self._send_file(upload["id"], path, received[filename], size_bytes, watcher)

    def _send_file(
        self, upload_id: str, path: Path, start: int, size_bytes: int, watcher: Watcher
    ) -> None:
        failures = 0
        at: int | None = start
        while at != size_bytes:
            try:
                if at is None:
                    at = self._received_bytes(upload_id, path.name)
                else:
                    at = self._put_part(upload_id, path, at, size_bytes, watcher)
                    failures = 0
                watcher.count(path.name, at)
            except ClientError as error:
                failures += 1
                is_misplaced = getattr(error, "code", None) == "upload_offset_mismatch"
                if not is_misplaced or failures > self._patience.max_failures:
                    self._patience.pause(error, failures)
                at = None

    def _received_bytes(self, upload_id: str, filename: str) -> int:
        upload = self._client.request("GET", f"/v1/uploads/{upload_id}")
        return int(upload["files"][filename]["received_bytes"])

    def _put_part(
        self, upload_id: str, path: Path, start: int, size_bytes: int, watcher: Watcher
    ) -> int:
        """Send one part. Returns how many bytes of the file the server has then."""
        end = min(start + self._part_bytes, size_bytes)
        body = read_part(path, start, end, lambda sent: watcher.count(path.name, start + sent))
        headers = {
            "content-range": f"bytes {start}-{end - 1}/{size_bytes}",
            "content-length": str(end - start),
        }
        answer = self._client.put(f"/v1/uploads/{upload_id}/files/{path.name}", body, headers)
        return int(answer["received_bytes"])
