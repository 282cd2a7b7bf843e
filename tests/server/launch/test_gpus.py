from server.launch.gpus import visible_gpus


def test_the_gpus_are_those_that_the_variable_shows():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 1,GPU-8f"}) == ["3", "1", "GPU-8f"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_without_the_variable_they_are_the_devices_of_this_machine(tmp_path):
    for name in ("nvidia0", "nvidia5", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({}, tmp_path / "none") == []
