"""The page's claim about routing to engines, on a modelled pool of a small size."""

from bench.pool.machine import MachineSpec
from bench.pool.modelled import Modelled, figures, ratios


def test_the_product_loads_a_third_of_what_chance_loads_and_nobody_waits_longer_for_it() -> None:
    machine = MachineSpec(engines=2, disk_bytes=12 << 30)
    times = {"warm_up_s": 20.0, "measured_s": 20.0}
    small = Modelled(sizes=((6, 400),), machine=machine, seeds=(0,), **times)
    (case,) = small.cases()
    outcomes = small.outcomes(case, seed=0)
    compared = ratios(outcomes)
    assert compared["random_copied"] <= 1 / 3
    assert compared["random_fetched"] <= 1 / 3
    assert compared["least_loaded_ttft_p99"] <= 1
    ours = figures(outcomes["product"], case.adapters)
    assert ours["replicas_hottest"] > 1.2
    assert ours["replicas_cold"] < 1.2
