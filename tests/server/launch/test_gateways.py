import json
import os
import socket

import pytest

from server.launch.gateways import Gateways
from server.launch.settings import Settings
from server.pool.control_files import gateway_socket, wanted_file

SHARED = {"database_url": "postgresql://localhost/x", "redis_url": "redis://localhost"}


@pytest.fixture
def gateways(tmp_path):
    """Two gateways, none of which is a process yet."""
    made = make(tmp_path)
    yield made
    os.close(made()[0].descriptors[0])


def make(tmp_path):
    settings = Settings(model="m", data_dir=tmp_path, gateways=2, port=0, **SHARED)
    return Gateways(settings)


def names(gateways):
    return [spec.name for spec in gateways()]


def listen(tmp_path, number):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(gateway_socket(tmp_path, number)))
    listener.listen()
    return listener


def test_each_has_a_file_and_all_have_the_socket(gateways, tmp_path):
    first, second = gateways()
    assert (first.name, second.name) == ("gateway", "gateway-2")
    written = [json.loads((tmp_path / f"{spec.name}.json").read_text()) for spec in gateways()]
    assert [it["number"] for it in written] == [1, 2]
    assert first.descriptors == second.descriptors == (written[0]["listener"],)
    with socket.socket(fileno=os.dup(written[1]["listener"])) as bound:
        assert bound.getsockname()[1] > 0


def test_a_new_one_serves_before_an_old_one_goes_and_takes_its_name_after_it(gateways, tmp_path):
    gateways.replace()
    assert names(gateways) == ["gateway", "gateway-2", "gateway-3"]
    assert names(gateways) == ["gateway", "gateway-2", "gateway-3"], "it does not serve yet"
    with listen(tmp_path, 1), listen(tmp_path, 3):
        assert names(gateways) == ["gateway-3", "gateway-2"]
        assert names(gateways) == ["gateway-3", "gateway-2", "gateway"]
        assert names(gateways) == ["gateway-3", "gateway-2", "gateway"], "its socket is another's"
    with listen(tmp_path, 1):
        assert names(gateways) == ["gateway-3", "gateway"]
        assert names(gateways) == ["gateway-3", "gateway"], "all have been replaced"


def test_what_gateways_left_that_are_no_more_goes_to_the_first_one(tmp_path):
    (tmp_path / "unanswered").write_text("+a\n+cut")
    (tmp_path / "unanswered-3").write_text("+b\n+c\n-b\n+c")
    for number in (1, 3):
        wanted_file(tmp_path, number).write(2)
    os.close(make(tmp_path)()[0].descriptors[0])
    assert (tmp_path / "unanswered").read_text() == "+a\n+b\n+c\n-b\n"
    assert not (tmp_path / "unanswered-3").exists()
    assert wanted_file(tmp_path).path.exists()
    assert not wanted_file(tmp_path, 3).path.exists()
