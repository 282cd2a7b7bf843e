"""A malformed upload gets a 4xx that names the fault, and nothing is left behind."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import TinyWorld

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A_NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def good_files(world: TinyWorld) -> dict[str, bytes]:
    folder = world.dirs["alpha"]
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def with_tensor(world: TinyWorld, folder: Path, change) -> bytes:
    tensors = load_file(world.dirs["alpha"] / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / "changed.safetensors")
    return (folder / "changed.safetensors").read_bytes()


def malformed(kind: str, world: TinyWorld, folder: Path) -> dict[str, bytes]:
    files = good_files(world)
    config = json.loads(files[CONFIG])

    def poison(tensors):
        tensors[A_NAME][0, 0] = float("nan")

    def widen(tensors):
        tensors[A_NAME] = torch.zeros(4, 65)

    def quantize(tensors):
        tensors[A_NAME] = tensors[A_NAME].to(torch.int8)

    def orphan(tensors):
        del tensors[A_NAME]

    match kind:
        case "truncated":
            files[WEIGHTS] = files[WEIGHTS][:-7]
        case "header of 1 GB":
            files[WEIGHTS] = (1 << 30).to_bytes(8, "little") + files[WEIGHTS][8:]
        case "pickle":
            files[WEIGHTS] = b"\x80\x04\x95" + files[WEIGHTS]
        case "nan":
            files[WEIGHTS] = with_tensor(world, folder, poison)
        case "wrong shape":
            files[WEIGHTS] = with_tensor(world, folder, widen)
        case "wrong dtype":
            files[WEIGHTS] = with_tensor(world, folder, quantize)
        case "unpaired":
            files[WEIGHTS] = with_tensor(world, folder, orphan)
        case "unknown key":
            files[CONFIG] = json.dumps(config | {"surprise": 1}).encode()
        case "dora":
            files[CONFIG] = json.dumps(config | {"use_dora": True}).encode()
        case "wrong rank":
            files[CONFIG] = json.dumps(config | {"r": 5}).encode()
    return files


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("truncated", "truncated_file"),
        ("header of 1 GB", "header_too_large"),
        ("pickle", "pickle_refused"),
        ("nan", "not_finite"),
        ("wrong shape", "wrong_shape"),
        ("wrong dtype", "unsupported_dtype"),
        ("unpaired", "unpaired_tensor"),
        ("unknown key", "unknown_config_key"),
        ("dora", "unsupported_feature"),
        ("wrong rank", "rank_mismatch"),
    ],
)
def test_a_malformed_adapter_is_refused_by_name_and_leaves_nothing(
    tiny: TinyWorld, tmp_path: Path, kind: str, code: str
) -> None:
    before = stored(tiny)
    answer = tiny.tenant.upload("broken", malformed(kind, tiny, tmp_path))
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["code"] == code
    assert stored(tiny) == before
    assert tiny.tenant.http.get("/v1/adapters/broken").status_code == 404


def stored(world: TinyWorld) -> set[str]:
    """Return every file of the object store."""
    root = world.stack.data_dir / "objects"
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_a_file_that_is_not_what_was_declared_is_refused(tiny: TinyWorld) -> None:
    before = stored(tiny)
    declared = {WEIGHTS: {"sha256": "0" * 64}}
    answer = tiny.tenant.upload("broken", good_files(tiny), **declared)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "digest_mismatch"
    assert stored(tiny) == before


@pytest.mark.parametrize("name", ["Upper", "-x", "a" * 65, "a@b", "ü"])
def test_a_name_outside_the_alphabet_is_refused(tiny: TinyWorld, name: str) -> None:
    assert tiny.tenant.upload(name, good_files(tiny)).status_code == 400


def test_a_third_file_is_refused(tiny: TinyWorld) -> None:
    files = good_files(tiny) | {"modeling.py": b"import os"}
    assert tiny.tenant.upload("extra", files).status_code == 400


def test_completing_again_gives_the_same_version_and_the_same_files_the_same_digest(
    tiny: TinyWorld,
) -> None:
    first = tiny.tenant.upload("twice", good_files(tiny))
    again = tiny.tenant.http.post(f"/v1/uploads/{first.json()['id']}/complete")
    assert again.json()["version"] == first.json()["version"]
    second = tiny.tenant.upload("twice", good_files(tiny))
    assert second.json()["version"]["version"] == first.json()["version"]["version"]


def test_a_broken_upload_goes_on_from_what_was_received(tiny: TinyWorld) -> None:
    """Parts come in order; a repeat is accepted, a gap is a 409 with the offset to go on from."""
    data = bytes(range(256)) * 1024 * 80  # 20 MiB: two parts
    http, part = tiny.tenant.http, 16 << 20
    files = {
        CONFIG: {"size_bytes": 10, "sha256": "0" * 64},
        WEIGHTS: {"size_bytes": len(data), "sha256": "0" * 64},
    }
    created = http.post("/v1/adapters/big/uploads", json={"files": files}).json()
    url = f"/v1/uploads/{created['id']}/files/{WEIGHTS}"

    def put(start: int, end: int):
        headers = {"content-range": f"bytes {start}-{end - 1}/{len(data)}"}
        return http.put(url, content=data[start:end], headers=headers)

    ahead = put(part, len(data))
    assert ahead.status_code == 409
    assert ahead.json()["error"]["code"] == "upload_offset_mismatch"
    assert ahead.json()["error"]["received_bytes"] == 0
    assert put(0, part).json()["received_bytes"] == part
    assert put(0, part).status_code == 200
    shown = http.get(f"/v1/uploads/{created['id']}").json()
    assert shown["files"][WEIGHTS]["received_bytes"] == part
    assert put(part, len(data)).json()["received_bytes"] == len(data)


def test_a_part_whose_range_and_body_differ_is_refused(tiny: TinyWorld) -> None:
    files = {n: {"size_bytes": 10, "sha256": "0" * 64} for n in (CONFIG, WEIGHTS)}
    created = tiny.tenant.http.post("/v1/adapters/odd/uploads", json={"files": files}).json()
    for value in ("bytes 0-9/10", "bytes 5-2/10", "garbage"):
        answer = tiny.tenant.http.put(
            f"/v1/uploads/{created['id']}/files/{CONFIG}",
            content=b"12345",
            headers={"content-range": value},
        )
        assert answer.status_code == 400, value
