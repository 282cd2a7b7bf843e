"""Fakes of the gateway and the store for uploads, in this process, with faults on demand."""

import hashlib
import json
import re
import threading

import httpx

from server.client.files import CONFIG_FILE, WEIGHTS_FILE
from server.client.http import Client
from server.client.patience import Patience
from server.client.uploads import Uploader

PART_BYTES = 10
PASSPORT = {
    "lora_format": "lora",
    "rank": 8,
    "ranks": {"4": 2, "8": 12},
    "scales": {"2": 14},
    "num_modules": 14,
    "targets": ["q_proj", "v_proj"],
    "dtype": "F16",
    "num_parameters": 35_840,
    "size_bytes": 2_540_000,
    "invocation_tokens": None,
    "vocab_size": None,
    "tokenizer": {"added_tokens": 2, "has_chat_template": True, "eos_token_ids": [9]},
    "warnings": ["rank_pattern has 'x', which matches no module."],
    "canary": {
        "passed": True,
        "max_effect": 2.31,
        "max_difference": 1.2e-5,
        "tolerance": 0.065,
        "num_prompts": 2,
        "num_tokens": 8,
        "device_bytes": 3_100_000,
        "cold_load_s": 0.0124,
        "warnings": ["It took long."],
    },
    "storage_nanousd_per_month": 254_000,
}


def version_of(number):
    return {
        "version": number,
        "state": "ready",
        "tier": "device",
        "is_servable": True,
        "digest": "d" * 64,
        "base_model": "base",
        "base_revision": "b" * 64,
        "rank": 8,
        "size_bytes": 2_540_000,
        "created_at": 1_750_000_000,
        "passport": PASSPORT,
    }


class FakeUploads:
    """A fake of the gateway.

    faults, completions, creations: functions called in turn, one with each PUT, completion or
    creation before it takes effect; a function's answer or error replaces the gateway's answer.
    known: adapters whose bytes the gateway has.   part_bytes: size of the largest part.
    store_url: address of the store for presigned parts.
    """

    def __init__(self, part_bytes=PART_BYTES):
        self.part_bytes = part_bytes
        self.store_url = "https://store.test"
        self.uploads = {}
        self.log = []
        self.faults = []
        self.completions = []
        self.creations = []
        self.known = set()
        self.store = FakeStore(self)

    def __call__(self, request):
        path, body = request.url.path, request.read()
        self.log.append((request.method, path))
        if match := re.fullmatch("/v1/adapters(?:/(.+)/uploads|:validate)", path):
            answer = self._fault(self.creations, request)
            return answer or self.create(match[1], json.loads(body))
        if match := re.fullmatch("/v1/adapters/(.+)/versions/.+/prove", path):
            return self.prove(match[1], json.loads(body))
        if match := re.fullmatch("/v1/uploads/([^/]+)", path):
            return self.show(match[1])
        if match := re.fullmatch("/v1/uploads/(.+)/files/(.+)", path):
            answer = self._fault(self.faults, request)
            return answer or self.put(*match.groups(), request.headers["content-range"], body)
        if match := re.fullmatch("/v1/uploads/(.+)/complete", path):
            return self._fault(self.completions, request) or self.complete(match[1])
        return refusal(404, "unknown_url", "There is no such endpoint.")

    def _fault(self, faults, request):
        fault = faults.pop(0) if faults else None
        return fault(self, request) if fault else None

    def create(self, name, asked):
        upload_id = f"up_{len(self.uploads)}"
        files = {n: {**file, "received_bytes": 0} for n, file in asked["files"].items()}
        is_known = name in self.known
        self.uploads[upload_id] = {
            "id": upload_id,
            "adapter": name,
            "alias": asked.get("alias"),
            "response_template": asked.get("response_template"),
            "base_model": asked.get("base_model"),
            "transfer": asked["transfer"],
            "state": "complete" if is_known else "open",
            "files": files,
            "error": None,
            "passport": PASSPORT,
            "version": version_of(1) if is_known else None,
            "content": {filename: {} for filename in files},
        }
        return self.show(upload_id)

    def prove(self, name, asked):
        created = self.create(name, {"files": {}, "transfer": "gateway", **asked})
        self.uploads[created.json()["id"]]["state"] = "proving"
        return created

    def show(self, upload_id):
        upload = self.uploads.get(upload_id)
        if upload is None:
            return refusal(404, "upload_not_found")
        shown = {key: value for key, value in upload.items() if key != "content"}
        if upload["state"] == "open" and upload["transfer"] == "presigned":
            shown["files"] = {
                name: {**file, "parts": self._missing(upload_id, name)}
                for name, file in upload["files"].items()
            }
        return httpx.Response(200, json=shown)

    def _missing(self, upload_id, filename):
        upload, epoch, step = self.uploads[upload_id], self.store.epoch, self.part_bytes
        size_bytes = upload["files"][filename]["size_bytes"]
        return [
            {
                "number": number,
                "start": start,
                "size_bytes": min(step, size_bytes - start),
                "url": f"{self.store_url}/{upload_id}/{filename}/{start}?epoch={epoch}",
            }
            for number, start in enumerate(range(0, size_bytes, step), 1)
            if start not in upload["content"][filename]
        ]

    def put(self, upload_id, filename, content_range, body):
        first, last, total = map(int, re.findall(r"\d+", content_range))
        file = self.uploads[upload_id]["files"][filename]
        assert last - first + 1 == len(body) <= self.part_bytes
        assert total == file["size_bytes"]
        if first != file["received_bytes"]:
            return refusal(409, "upload_offset_mismatch")
        return self.take(upload_id, filename, first, body)

    def take(self, upload_id, filename, start, body):
        upload = self.uploads[upload_id]
        content, file = upload["content"][filename], upload["files"][filename]
        content[start] = body
        file["received_bytes"] = sum(map(len, content.values()))
        return httpx.Response(200, json=file)

    def complete(self, upload_id):
        upload = self.uploads[upload_id]
        if upload["state"] == "open":
            for name, parts in upload["content"].items():
                content = b"".join(parts[start] for start in sorted(parts))
                assert hashlib.sha256(content).hexdigest() == upload["files"][name]["sha256"]
        upload |= {"state": "complete", "version": version_of(1)}
        upload["base_model"] = upload["base_model"] or "base"
        return self.show(upload_id)

    def num_calls(self, method, pattern):
        return sum(m == method and bool(re.search(pattern, path)) for m, path in self.log)


class FakeStore:
    """A fake of the store. epoch: URLs that were signed in another epoch have expired.

    faults: functions called in turn with each PUT, as the gateway's.   seen: headers of the PUTs.
    """

    def __init__(self, server):
        self._server = server
        self._lock = threading.Lock()
        self.epoch = 0
        self.faults = []
        self.seen = []

    def __call__(self, request):
        body = request.read()
        _, upload_id, filename, start = request.url.path.split("/")
        with self._lock:
            self.seen.append(request.headers)
            fault = self.faults.pop(0) if self.faults else None
        if answer := fault(self, request) if fault else None:
            return answer
        if request.url.params["epoch"] != str(self.epoch):
            return httpx.Response(403, text="<Error><Code>AccessDenied</Code></Error>")
        assert request.headers["content-length"] == str(len(body))
        with self._lock:
            self._server.take(upload_id, filename, int(start), body)
        return httpx.Response(200)


def refusal(status, code="some_code", message="No.", **headers):
    error = {"message": message, "type": "t", "param": "p", "code": code}
    return httpx.Response(status, json={"error": error}, headers=headers)


def break_off(server, request):
    raise httpx.ReadError("reset", request=request)


def make_adapter(folder, weights=b"w" * 37):
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_bytes(b"{}")
    (folder / WEIGHTS_FILE).write_bytes(weights)
    return folder


class Clock:
    """A clock that moves only by the pauses of sleeps."""

    def __init__(self):
        self.pauses = []

    def __call__(self):
        return sum(self.pauses)


def make_uploader(server, clock=None, **patience):
    clock = clock or Clock()
    client = Client("http://chorale.test", "key", transport=httpx.MockTransport(server))
    return Uploader(
        client,
        Patience(sleep=clock.pauses.append, clock=clock, **patience),
        part_bytes=PART_BYTES,
        store_transport=httpx.MockTransport(server.store),
    )
