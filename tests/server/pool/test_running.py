"""Counts of the requests that are under way."""

from server.pool.running import Running, RunningRequest, TenantLoad


def test_what_tenants_have_under_way_is_told_by_what_it_waits_for():
    running = Running()
    begun = RunningRequest("r1", "calm", num_answers=3, wanted_tokens=9, is_cold=False)
    cold = RunningRequest("r2", "cold", num_answers=2, wanted_tokens=9, is_cold=True)
    queued = RunningRequest("r3", "cold", num_answers=1, wanted_tokens=9, is_cold=False)
    for request in (begun, cold, queued):
        running.add(request)
    running.begin(begun, 0)
    running.begin(begun, 1)
    assert running.by_tenant() == [TenantLoad("cold", 0, 1, 2), TenantLoad("calm", 2, 1, 0)]
    running.remove(cold)
    running.remove(queued)
    assert running.by_tenant() == [TenantLoad("calm", 2, 1, 0)]
    assert Running().by_tenant() == []
