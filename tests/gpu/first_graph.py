"""One graph is captured and replayed; steps of decodes are made of such graphs."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch

from kernels.gpu import ops
from tests.gpu.setting import Check, Setting
from tests.gpu.trials.lora import case_at, make_slots, sites
from tests.gpu.trials.trial import describe_difference, randn

_REPLAYS = 3


def first_graph_checks() -> dict[str, Check]:
    return {"graphs.first": _check}


def _check(setting: Setting) -> None:
    """An adapter is shrunk beside a product and expanded after it, as in a layer. Replays read new
    numbers from the same memory, and give the same bits as a launch without a graph. Meanwhile
    another thread pins memory, copies and waits, as loaders may while a graph is captured.
    """
    rng, device, there = setting.rng("first graph"), setting.device, setting.there
    site, tokens = sites(setting.kernels)["o"], setting.kernels.tokens
    slots = make_slots(tokens, rng)
    # The case owns the tables whose addresses are in its work, so it must stay alive.
    case = case_at(site, slots, setting.dtype, 16, setting.seed_of("first")).placed(there)
    x = torch.zeros(tokens, site.in_features, dtype=setting.dtype, device=there)
    scale = site.in_features**-0.5
    weight = (scale * randn(site.out_features[0], site.in_features, rng=rng)).to(x).to(there)
    out = torch.zeros(tokens, site.out_features[0], dtype=setting.dtype, device=there)

    loaded, stream = torch.empty(9, dtype=torch.uint8, device=there), device.stream()

    is_captured = Event()

    def load() -> None:
        while not is_captured.is_set():
            source = device.pinned(9, dtype=torch.uint8)  # lives until the copy is done
            device.copy(stream, loaded, source.fill_(7))
            device.synchronize(device.record(stream))

    def layer() -> None:
        deltas = []
        join = device.beside(lambda: deltas.append(ops.shrink(x, case.work, site)))
        y = x @ weight.T
        join()
        ops.expand(y, deltas.pop())
        out.copy_(y)

    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(load)
        try:
            replay = device.capture(layer)
        finally:
            is_captured.set()
    loading.result()
    for _ in range(_REPLAYS):
        x.copy_(randn(*x.shape, rng=rng, dtype=setting.dtype))
        device.submit(device.compute, replay)
        setting.finish()
        found = out.cpu()
        device.submit(device.compute, layer)
        setting.finish()
        assert torch.equal(found, out.cpu()), describe_difference(found, out.cpu())
