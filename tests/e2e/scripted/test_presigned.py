"""An adapter's bytes go straight to the bucket, by plain HTTP PUT, and are served from there."""

import hashlib
from pathlib import Path

import httpx

from tests.e2e.stack import FILES, Stack


def test_parts_put_to_their_urls_become_an_adapter_that_is_served(
    scripted: Stack, tiny_adapters: dict[str, Path]
) -> None:
    """The PUTs are curl's, without a key of ours or of the bucket."""
    tenant = scripted.tenant("presigned")
    files = {name: (tiny_adapters["alpha"] / name).read_bytes() for name in FILES}
    declared = {
        file: {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for file, data in files.items()
    }
    body = {"files": declared, "transfer": "presigned"}
    created = tenant.http.post("/v1/adapters/direct/uploads", json=body)
    assert created.status_code == 201, created.text
    shown = upload = created.json()
    for name in FILES:
        (part,) = shown["files"][name]["parts"]
        assert (part["number"], part["start"], part["size_bytes"]) == (1, 0, len(files[name]))
        assert httpx.put(part["url"], content=files[name] + b" ", trust_env=False).is_error
        assert httpx.put(part["url"], content=files[name], trust_env=False).is_success
        # The upload is read again, which is how an interrupted upload finds its missing parts.
        shown = tenant.http.get(f"/v1/uploads/{upload['id']}").json()
        assert shown["files"][name]["parts"] == []
        assert shown["files"][name]["received_bytes"] == len(files[name])
    answer = tenant.http.post(f"/v1/uploads/{upload['id']}/complete")
    assert answer.status_code == 200, answer.text
    digest = answer.json()["version"]["digest"]
    served = tenant.http.post(
        "/v1/completions", json={"model": "direct", "prompt": "ab", "max_tokens": 2}
    )
    assert served.status_code == 200, served.text
    assert served.headers["x-chorale-adapter-digest"] == digest
