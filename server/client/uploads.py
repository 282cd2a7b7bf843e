"""Uploads of adapters from this machine: they are declared, sent, completed, and waited for.

An interrupted upload is resumed where the server stands, also by a later run that remembers it.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from server.client.direct import DirectSender
from server.client.files import describe
from server.client.http import Answer, ApiRefused, Client, ClientError
from server.client.parts import PART_BYTES, PartSender
from server.client.paths import adapter_path
from server.client.patience import Patience
from server.client.progress import Watcher
from server.text.json_object import JsonObject

_DEFAULT_PAUSE_S = 1.0
# Statuses with which the server may say that an upload has failed; the upload then says why.
_VERDICT_STATUSES = (400, 409, 413)


class UploadFailed(ClientError):
    """The server has checked the files and will not serve them.   upload: the server's report."""

    def __init__(self, upload: JsonObject) -> None:
        fault = upload["error"] or {}
        self.code = fault.get("code")
        self.upload = upload
        super().__init__(f"The adapter is refused ({self.code}): {fault.get('message')}")


class NotProvedYet(ClientError):
    """No engine has proved the adapter in time; its files have arrived and passed their checks.

    upload: its present state.
    """

    def __init__(self, upload: JsonObject, waited_s: float) -> None:
        self.upload = upload
        super().__init__(
            f"The adapter has arrived, but no engine has proved it within {waited_s:.0f} s; "
            "the same command asks again."
        )


class DirectNotSupported(ClientError):
    is_common = True

    def __init__(self) -> None:
        super().__init__("This server's object store takes no parts by URL; leave out --direct.")


@dataclass(frozen=True, slots=True)
class Pushed:
    """A push that succeeded.

    upload: the complete upload, with its version.   is_known: whether the server had the bytes
    already, so that they were not sent.
    """

    upload: JsonObject
    is_known: bool


class Uploader:
    """Uploads adapters.

    part_bytes: size of the parts that go through the gateway.   store_transport: for tests.
    """

    def __init__(
        self,
        client: Client,
        patience: Patience | None = None,
        *,
        part_bytes: int = PART_BYTES,
        store_transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._client = client
        self._patience = patience or Patience()
        self._senders: dict[str, PartSender | DirectSender] = {
            "gateway": PartSender(client, self._patience, part_bytes),
            "presigned": DirectSender(client, self._patience, store_transport),
        }

    def push(
        self,
        name: str,
        folder: Path,
        *,
        alias: str | None = None,
        response_template: str | JsonObject | None = None,
        base_model: str | None = None,
        direct: bool = False,
        memory: "UploadMemory | None" = None,
        watcher: Watcher | None = None,
    ) -> Pushed:
        """Make a folder the next version of `name`.   direct: send it straight to the object store.

        response_template: the format of its tool calls, or a built-in format's name.
        base_model: the name of its base model; None if its config says it.

        Raises ClientError: UploadFailed for an adapter that the server will not serve.
        """
        watcher = watcher or Watcher()
        watcher.enter("reading")
        body: JsonObject = {
            "files": describe(folder),
            "alias": alias,
            "transfer": "presigned" if direct else "gateway",
            "response_template": response_template,
            "base_model": base_model,
        }
        wanted = {"base_url": self._client.base_url, "name": name, **body}
        upload = self._recall(memory, wanted)
        is_known = False
        if upload is None:
            upload = self._create(adapter_path(name, "uploads"), body, watcher)
            is_known = upload["state"] == "complete"
            if memory:
                memory.remember(wanted, upload["id"])
        upload = self._finish(upload, folder, watcher)
        if memory:
            memory.forget()
        return Pushed(upload, is_known)

    def validate(
        self, folder: Path, watcher: Watcher | None = None, *, base_model: str | None = None
    ) -> JsonObject:
        """Check a folder. Returns the upload with its passport; the server keeps nothing of it."""
        watcher = watcher or Watcher()
        watcher.enter("reading")
        body = {"files": describe(folder), "transfer": "gateway", "base_model": base_model}
        upload = self._create("/v1/adapters:validate", body, watcher)
        return self._finish(upload, folder, watcher)

    def prove_again(
        self, name: str, version: int, alias: str | None, *, base_model: str | None = None
    ) -> JsonObject:
        """Prove a version on another base model than its own. Returns the complete upload."""
        path = adapter_path(name, "versions", str(version), "prove")
        body = {"alias": alias, "base_model": base_model}
        upload = self._client.request("POST", path, body=body)
        return self._wait_ended(upload, Watcher())

    def _recall(self, memory: "UploadMemory | None", wanted: JsonObject) -> JsonObject | None:
        """The upload that an earlier run left unfinished, if it can still succeed."""
        upload_id = memory.recall(wanted) if memory else None
        if upload_id is None:
            return None
        try:
            upload = self._client.request("GET", f"/v1/uploads/{upload_id}")
        except ApiRefused as error:
            if error.status != 404:
                raise
            return None
        return upload if upload["state"] in ("open", "proving", "complete") else None

    def _create(self, path: str, body: JsonObject, watcher: Watcher) -> JsonObject:
        """Make an upload, after a wait if a quota says how long.

        Other errors are raised, not retried: a request whose answer is lost may have made an
        upload.
        """
        waited_s = 0.0
        while True:
            try:
                return self._client.request("POST", path, body=body)
            except ApiRefused as error:
                if error.code == "presigned_not_supported":
                    raise DirectNotSupported from error
                if error.status != 429 or error.retry_after_s is None:
                    raise
                pause_s = max(error.retry_after_s, _DEFAULT_PAUSE_S)
                waited_s += pause_s
                if waited_s > self._patience.turn_wait_s:
                    raise
            watcher.enter("waiting")
            self._patience.sleep(pause_s)

    def _finish(self, upload: JsonObject, folder: Path, watcher: Watcher) -> JsonObject:
        """Send the missing bytes and wait for the end. Returns the complete upload."""
        if upload["state"] == "open":
            watcher.enter("sending")
            self._senders[upload["transfer"]].send(upload, folder, watcher)
        return self._wait_ended(upload, watcher)

    def _wait_ended(self, upload: JsonObject, watcher: Watcher) -> JsonObject:
        """Wait for the end. Returns the complete upload. Raises UploadFailed, NotProvedYet."""
        watcher.enter("proving" if upload["state"] == "proving" else "checking")
        started_at = self._patience.clock()
        while True:
            answer = self._complete(upload["id"])
            if answer.body["state"] != "proving":
                return answer.body
            waited_s = self._patience.clock() - started_at
            if waited_s >= self._patience.proof_wait_s:
                raise NotProvedYet(answer.body, waited_s)
            watcher.enter("proving")
            pause_s = answer.retry_after_s or _DEFAULT_PAUSE_S
            self._patience.sleep(min(pause_s, self._patience.max_pause_s))

    def _complete(self, upload_id: str) -> Answer:
        """Ask the server to complete the upload, with retries. Raises UploadFailed if it failed."""
        path = f"/v1/uploads/{upload_id}"
        try:
            return self._patience.insist(lambda: self._client.ask("POST", f"{path}/complete"))
        except ApiRefused as error:
            if error.status not in _VERDICT_STATUSES:
                raise
            upload = self._client.request("GET", path)
            if upload["state"] != "failed":
                raise
            raise UploadFailed(upload) from error


class UploadMemory:
    """The upload of an unfinished push, kept in a file between two runs of the command."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def recall(self, wanted: JsonObject) -> str | None:
        """Id of the upload of exactly these bytes under this name on this server, or None."""
        try:
            kept = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None
        return kept["upload_id"] if kept.get("wanted") == wanted else None

    def remember(self, wanted: JsonObject, upload_id: str) -> None:
        # An upload succeeds even if it cannot be remembered.
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"wanted": wanted, "upload_id": upload_id}))

    def forget(self) -> None:
        with suppress(OSError):
            self._path.unlink()
