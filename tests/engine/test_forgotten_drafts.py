"""A gateway's word that drafts are to be forgotten reaches what makes drafts."""

from types import SimpleNamespace

import pytest

from engine.messages import ForgetDrafts
from tests.engine.fakes import make_core


@pytest.mark.parametrize("digest", ["d" * 64, None])
def test_drafts_are_forgotten_for_a_tenant_and_an_adapter_or_all_of_them(tmp_path, digest):
    core, forgotten = make_core(tmp_path), []
    core.scheduler.speculation = SimpleNamespace(forget_drafts=lambda *of: forgotten.append(of))
    message = ForgetDrafts(tenant_id="acme", adapter_digest=digest)
    assert core.handle("gw", message) == []
    assert forgotten == [("acme", digest)]


def test_an_engine_without_drafts_has_none_to_forget(tmp_path):
    core = make_core(tmp_path)
    assert core.scheduler.speculation is None
    assert core.handle("gw", ForgetDrafts(tenant_id="acme")) == []
