"""An upload over HTTP: in parts, and refused by name with nothing left behind.

tests/registry has every fault of files and of parts.
"""

from pathlib import Path

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from tests.e2e.oracle import TinyWorld
from tests.e2e.stack import FILES

CONFIG, WEIGHTS = FILES
PART = 16 << 20


def stored(world: TinyWorld) -> set[Path]:
    """Return every file of the object store."""
    return {path for path in (world.stack.data_dir / "objects").rglob("*") if path.is_file()}


def test_a_malformed_adapter_is_refused_by_name_and_leaves_nothing(
    tiny: TinyWorld, tmp_path: Path
) -> None:
    before = stored(tiny)
    tensors = load_file(tiny.dirs["alpha"] / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, tmp_path / WEIGHTS)
    contents = {
        CONFIG: (tiny.dirs["alpha"] / CONFIG).read_bytes(),
        WEIGHTS: (tmp_path / WEIGHTS).read_bytes(),
    }
    answer = tiny.tenant.upload("broken", contents)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_finite")
    assert stored(tiny) == before
    assert tiny.tenant.http.get("/v1/adapters/broken").status_code == 404


def test_a_broken_upload_goes_on_from_what_was_received(tiny: TinyWorld) -> None:
    """Parts come in order; a repeat is accepted, a gap is a 409 with the offset to go on from."""
    data = bytes(PART + 4096)
    http = tiny.tenant.http
    files = {
        CONFIG: {"size_bytes": 10, "sha256": "0" * 64},
        WEIGHTS: {"size_bytes": len(data), "sha256": "0" * 64},
    }
    created = http.post("/v1/adapters/big/uploads", json={"files": files}).json()
    url = f"/v1/uploads/{created['id']}/files/{WEIGHTS}"

    def put(start: int, end: int) -> httpx.Response:
        headers = {"content-range": f"bytes {start}-{end - 1}/{len(data)}"}
        return http.put(url, content=data[start:end], headers=headers)

    ahead = put(PART, len(data))
    assert ahead.status_code == 409
    assert ahead.json()["error"]["code"] == "upload_offset_mismatch"
    assert ahead.json()["error"]["received_bytes"] == 0
    assert put(0, PART).json()["received_bytes"] == PART
    assert put(0, PART).status_code == 200
    shown = http.get(f"/v1/uploads/{created['id']}").json()
    assert shown["files"][WEIGHTS]["received_bytes"] == PART
    assert put(PART, len(data)).json()["received_bytes"] == len(data)


@pytest.mark.parametrize("value", ["bytes 0-9/10", "bytes 5-2/10", "bytes 6-10/10", "garbage"])
def test_a_part_whose_range_and_body_differ_is_refused(tiny: TinyWorld, value: str) -> None:
    files = {name: {"size_bytes": 10, "sha256": "0" * 64} for name in FILES}
    created = tiny.tenant.http.post("/v1/adapters/odd/uploads", json={"files": files}).json()
    url = f"/v1/uploads/{created['id']}/files/{CONFIG}"
    answer = tiny.tenant.http.put(url, content=b"12345", headers={"content-range": value})
    assert answer.status_code == 400
