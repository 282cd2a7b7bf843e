"""The operator's pages: who may open them, what they show, and which calls their forms make."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from engine.wire.messages import PROOF_TENANT, Residency
from registry.catalog.adapter_rows import object_key
from registry.catalog.audit import record_audit
from server.accounts.sessions import csrf_token
from server.billing import ledger
from server.billing.audit.report import CheckResult, Finding, Report
from server.billing.audit.run import audit_sums
from server.billing.incidents import record_incident
from server.billing.months import end_of, month_before, month_of
from server.billing.tables import monthly_spend
from server.console.operator.advice import CHECKS, INCIDENTS, advice_on
from server.console.operator.engines import _arena
from server.database.clock import now_ms
from server.pool.engines import EngineFigures
from server.pool.keeper import Decision
from server.pool.running import RunningRequest
from tests.server.api.test_metrics import make_stats
from tests.server.console.browsing import Visitor, path_of, serve, shown
from tests.server.console.page_forms import forms_of
from tests.server.factories import NOW_MS, SIGNER, insert_holds, make_end, make_hold, make_price
from tests.server.fake_engines import FakeEngines, make_suspects, make_welcome
from tests.server.in_process import InProcess, User

HOME = "/console/operator"
PAGES = [
    HOME,
    *(f"{HOME}/{name}" for name in ("tenants", "prices", "requests", "incidents", "audit")),
]


def forms(visitor: Visitor, path: str) -> list[tuple[str, str]]:
    """(method, path) of the calls that a page's forms make."""
    found = re.findall(r'<form data-method="(\w+)" data-path="([^"]*)"', visitor.get(path).text)
    return [(method, unescape(call)) for method, call in found]


@pytest.mark.parametrize("path", [*PAGES, f"{HOME}/tenants/acme"])
def test_a_tenants_session_opens_no_page_of_the_operator(
    acme: User, product: InProcess, path: str
) -> None:
    visitor = Visitor(product)
    assert visitor.get(path).status_code == 303
    visitor.sign_in(acme.api_key)
    answer = visitor.get(path)
    assert answer.status_code == 303
    assert path_of(answer.headers["location"]) == f"/console/sign-in?next={path}"


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_there_in_an_installation_where_nothing_has_happened(
    operator: Visitor, path: str
) -> None:
    answer = operator.get(path)
    assert answer.status_code == 200
    assert f'href="{path}" aria-current="page"' in answer.text


# ---- engines ----


def seen_engines() -> FakeEngines:
    """A pool with an engine that is at work, one that is away, and two adapters."""
    stats = make_stats(
        total_slabs=200, free_slabs=50, prefix_slabs=30, adapter_slabs=60, pinned_slabs=10,
        batch_requests=5, unsettled_records=4321,
    )  # fmt: skip
    figures = [
        EngineFigures("engine-1", "ready", make_welcome(epoch=3), stats, 2),
        EngineFigures("engine-2", "starting", None, None, 0),
    ]
    fits = _stay("a", tier="device", size_bytes=2_000_000)
    lost = _stay("b", tier="failed", size_bytes=0, error="is damaged <b>")
    residency = {"engine-1": [fits], "engine-2": [lost]}
    return FakeEngines(
        names=tuple(residency),
        seen=figures,
        residency=residency,
        num_deaths=7,
        suspects=make_suspects(),
    )


def _stay(letter: str, **fields: Any) -> Residency:
    return Residency(object_key=object_key("ten_1", letter * 64), digest=letter * 64, **fields)


def test_engines_are_shown_with_their_batch_memory_queue_and_adapters(
    product: InProcess, operator: Visitor, acme: User
) -> None:
    product.use(seen_engines())
    base = product.gateway.bases.default
    base.keeper.decisions.appendleft(Decision(1000, 4, "requests wait for a seat"))
    asked = RunningRequest("r-seen", acme.tenant_id, 2, 9, is_cold=False, engine="engine-1")
    base.running.add(asked)
    try:
        page, text = operator.get(HOME).text, shown(operator, HOME)
    finally:
        base.running.remove(asked)
        product.use(FakeEngines())
    assert "KV in use 60 of 200 slabs, prefix cache 30 of 200 slabs, adapters 50" in page
    assert page.count("<rect class=") == 2 * 5  # of the picture and of its legend
    assert "5 requests of 8" in text
    assert "4,321 records" in text
    assert f"{acme.name} base 0 2 0" in text
    assert "engine-2 starting" in text
    assert "deaths of engines 7" in text
    assert "ten_9 base suspect 2 2" in text
    assert 'data-path="/admin/v1/engines/suspects/1234567890"' in page
    assert f"largest {'a' * 12} ten_1 engine-1 device 2 MB" in text
    assert "last asked for: 1. One of them: is damaged <b> Look at the object store" in text
    assert "serving" in text
    assert "base 4 requests wait for a seat" in text
    assert 'hx-trigger="every 2s"' in page


def test_a_gateway_that_is_well_is_said_to_have_no_problem(
    product: InProcess, operator: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product.gateway.space, "is_low", lambda folder: False)
    assert "Nothing that this gateway can see" in shown(operator, HOME)


def test_the_parts_of_an_arena_are_side_by_side_and_fill_it() -> None:
    answer: Any = make_stats(
        total_slabs=133, free_slabs=7, prefix_slabs=63, adapter_slabs=9, pinned_slabs=2
    )
    parts = _arena(answer)
    assert sum(num_slabs for _, num_slabs, _, _ in parts) == 133
    begins = [begin for *_, begin, _ in parts]
    ends = [begin + width for *_, begin, width in parts]
    assert [*begins, 100] == pytest.approx([0, *ends], abs=0.02)
    assert _arena(None) == []


# ---- tenants ----


def test_tenants_are_found_by_name_and_state_and_come_in_pages(
    product: InProcess, operator: Visitor, acme: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = [product.user(f"{acme.name}-{number}") for number in range(4)]
    monkeypatch.setattr("server.console.operator.tenants._PAGE_SIZE", 2)
    month = monthly_spend.insert().values(
        tenant_id=users[2].tenant_id, month=month_of(now_ms()), amount_nanousd=7_000_000_000
    )
    product.gateway.database.write_sync(lambda c: c.execute(month))
    assert product.operator.call("POST", f"/admin/v1/tenants/{users[1].name}/suspend").is_success

    def names(query: str) -> list[str]:
        page = operator.get(f"{HOME}/tenants?name={acme.name}-&{query}").text
        return re.findall(r"/console/operator/tenants/ten_[^>]*>([^<]*)</a>", page)

    assert names("") == [users[2].name, users[0].name]
    assert names("page=2") == [users[1].name, users[3].name]
    assert names("order=name") == [users[0].name, users[1].name]
    assert names("status=suspended") == [users[1].name]
    first = operator.get(f"{HOME}/tenants?name={acme.name}-").text
    assert unescape(re.search(r'class="button" href="([^"]*)"', first)[1]).endswith("page=2")
    assert "$7.00" in shown(operator, f"{HOME}/tenants?name={acme.name}-2")


def test_a_tenants_page_shows_its_figures_and_its_last_requests(
    product: InProcess, operator: Visitor, acme: User
) -> None:
    at_s = now_ms() / 1000
    serve(product, acme, f"of-{acme.name}", at=at_s, started_at=at_s - 3, first_token_at=at_s - 1)
    broken = {"finish_reason": "error", "stop_cause": "engine_failure"}
    serve(product, acme, f"failed-{acme.name}", at=at_s, **broken)
    text = shown(operator, f"{HOME}/tenants/{acme.name}")
    assert acme.tenant_id in text
    assert f"of-{acme.name}"[:12] in text
    assert "requests in 24 h 2" in text
    assert "failed in 24 h 1" in text
    assert "keys 1" in text


def test_an_empty_limit_is_said_to_be_what_holds_then(operator: Visitor, acme: User) -> None:
    page = operator.get(f"{HOME}/tenants/{acme.name}").text
    empty = dict(re.findall(r'name="(\w+)"[^>]* placeholder="([^"]*)"', unescape(page)))
    assert empty["requests_per_minute"] == empty["max_concurrency"] == "no limit"
    for name in ("max_queue_share", "max_adapters", "max_adapter_bytes_total"):
        assert empty[name] == "the server's default"


def test_a_tenant_a_key_a_price_and_a_payment_are_made_by_forms(
    product: InProcess, operator: Visitor, acme: User
) -> None:
    """Each form's call, with its fields, is on the page at once and in the audit log."""
    csrf = csrf_token(operator.token)
    (making,) = [it for it in forms_of(operator.get(f"{HOME}/tenants").text) if it.path]
    body = {"name": f"of-{acme.name}", "plan": "gold"}
    made = operator.call("POST", making.path, csrf, body).json()
    page = making.attributes["data-then"].format(**made)
    for form in forms_of(operator.get(page).text):
        if form.path and form.path.endswith("/keys"):
            key = operator.call("POST", form.path, csrf, {"name": "first"}).json()
        if form.path and form.path.endswith("/payments"):
            once = {"idempotency-key": form.attributes["data-once"]}
            for _ in range(2):
                operator.call("POST", form.path, csrf, {"amount_usd": "12.5"}, **once)
    text = shown(operator, page)
    assert f"{key['key_id']} first valid" in text
    assert "credit $12.50" in text
    price = {"scope": "tenant", "scope_id": body["name"], "prompt_nanousd": 250}
    assert operator.call("POST", "/admin/v1/prices", csrf, price).status_code == 201
    own = operator.get(f"{HOME}/prices?scope=tenant&scope_id={made['tenant_id']}").text
    assert own.count(">in effect<") == 1
    assert 'title="250 nano-dollars a prompt token">$0.25' in own
    log = shown(operator, f"{HOME}/audit?tenant={made['tenant_id']}")
    for action in ("tenant.create", "key.create", "ledger.payment", "price.add"):
        assert f"operator {action}" in log


def test_prices_say_which_of_them_are_in_effect(product: InProcess, operator: Visitor) -> None:
    later = now_ms() // 1000 + 9999
    for fields in ({}, {}, {"effective_at": later}):
        price = {"scope": "plan", "scope_id": "states", **fields}
        assert product.operator.call("POST", "/admin/v1/prices", price).status_code == 201

    def states(plan: str) -> list[str]:
        page = operator.get(f"{HOME}/prices?scope=plan&scope_id={plan}").text
        return re.findall(r'<span class="tag[^>]*>([^<]*)<', page)

    assert states("states") == ["to come", "in effect", "past"]
    assert states("none") == []


def test_a_tenants_page_has_a_form_for_each_change(operator: Visitor, acme: User) -> None:
    path = f"/admin/v1/tenants/{acme.tenant_id}"
    page = f"{HOME}/tenants/{acme.tenant_id}"
    csrf = csrf_token(operator.token)
    budget = f"{path}/budgets/monthly/hard"
    assert operator.call("PUT", budget, csrf, {"amount": "12.5"}).status_code == 200
    assert forms(operator, page) == [
        ("POST", f"{path}/suspend"),
        ("POST", f"{path}/payments"),
        ("PATCH", path),
        ("DELETE", budget),
        ("PUT", f"{path}/budgets/{{kind}}/{{enforcement}}"),
        ("POST", f"{path}/keys"),
    ]
    assert operator.call("POST", f"{path}/suspend", csrf).status_code == 200
    assert ("POST", f"{path}/resume") in forms(operator, page)


# ---- slow requests ----


def test_the_slowest_requests_of_all_tenants_come_first_with_their_waits(
    product: InProcess, operator: Visitor, acme: User
) -> None:
    other, at_s = product.user(f"{acme.name}-slow"), NOW_MS / 1000
    late = {"started_at": at_s, "first_token_at": at_s + 900, "at": at_s + 901}
    serve(product, acme, "late", **late, load_s=600.0, load_tier="store", queue_s=200.0)
    long = {"started_at": at_s, "first_token_at": at_s + 800, "at": at_s + 5000}
    serve(product, other, "long", **long)
    proof = make_end(23, "proof", tenant_id=PROOF_TENANT, started_at=0.0)
    product.gateway.database.write_sync(
        lambda c: ledger.post(c, SIGNER, "engine-7", [proof], now_ms())
    )
    text = shown(operator, f"{HOME}/requests")
    assert "15 min to the first token" in text
    assert text.index(f"{acme.name} , base") < text.index(f"{other.name} , base")
    assert "adapter from store 10 min" in text
    assert "queue 3 min" in text
    whole = shown(operator, f"{HOME}/requests?by=whole")
    assert PROOF_TENANT not in text + whole
    assert whole.index(f"{other.name} , base") < whole.index(f"{acme.name} , base")


# ---- incidents ----


def test_every_kind_of_incident_and_every_check_of_sums_has_its_own_advice(
    product: InProcess,
) -> None:
    billing = Path(ledger.__file__).parent
    source = (billing / "ledger.py").read_text() + (billing / "settler.py").read_text()
    kinds = re.findall(r'_incident\(\s*"(\w+)"', source)
    kinds += re.findall(r'"(\w+)": \(hold\.', source) + re.findall(r'kind="(journal_\w+)"', source)
    assert set(kinds) == set(INCIDENTS)
    report = product.gateway.database.read_sync(audit_sums)
    assert set(report.checks) <= set(CHECKS)
    sentences = [*INCIDENTS.values(), *CHECKS.values()]
    assert len(set(sentences)) == len(sentences)
    assert all(sentence.endswith(".") for sentence in sentences)
    assert advice_on("audit_accounts") == CHECKS["accounts"]
    assert "chorale audit" in advice_on("of a later release")


def test_incidents_are_listed_newest_first_in_pages_with_what_to_do(
    product: InProcess, operator: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.console.operator.incidents._PAGE_SIZE", 1)
    for kind in ("journal_lost", "amount_over_hold"):
        product.gateway.database.write_sync(
            lambda c, kind=kind: record_incident(c, at_ms=NOW_MS, kind=kind, detail="seen")
        )
    page = operator.get(f"{HOME}/incidents").text
    assert INCIDENTS["amount_over_hold"] in unescape(page)
    assert INCIDENTS["journal_lost"] not in unescape(page)
    older = unescape(re.search(r'class="button" href="([^"]*)"', page)[1])
    assert INCIDENTS["journal_lost"] in unescape(operator.get(older).text)


def test_findings_expired_holds_and_overdue_statements_are_shown_with_their_actions(
    product: InProcess, operator: Visitor, acme: User
) -> None:
    gateway = product.gateway
    finding = Finding(
        check="accounts", subject="tenant <b>", detail="balance_nanousd", expected=9, found=8
    )
    report = Report(NOW_MS)
    report.checks["accounts"] = CheckResult(3, 1, [finding])
    price = make_price(gateway.database)
    hold = make_hold(price, f"lost-{acme.name}", engine_id="gone", tenant_id=acme.tenant_id)
    insert_holds(gateway.database, hold)
    serve(product, acme, f"old-{acme.name}")
    before, gateway.auditor.last = gateway.auditor.last, report
    try:
        page, text = operator.get(f"{HOME}/incidents").text, shown(operator, f"{HOME}/incidents")
        calls = forms(operator, f"{HOME}/incidents")
    finally:
        gateway.auditor.last = before
    assert "Differences: 1 ," in text
    assert "accounts: 1 in 3 rows" in text
    assert "tenant &lt;b&gt;" in page
    assert CHECKS["accounts"] in text
    assert f'value="{finding.finding_id}"' in page
    form = re.search(r'data-path="/admin/v1/audit/acknowledgements".*?</form>', page, re.DOTALL)[0]
    assert set(re.findall(r'name="(\w+)"', form)) == {"finding_id", "reason"}
    assert "gone : 1 reservations" in text
    assert ("POST", "/admin/v1/audit/acknowledgements") in calls
    assert ("POST", "/admin/v1/engines/gone/lost") in calls


def test_a_statement_that_is_late_is_named_with_its_tenant(
    product: InProcess, operator: Visitor, acme: User
) -> None:
    last = end_of(month_before(month_before(month_of(now_ms() - 2 * 86_400_000)))) / 1000
    serve(product, acme, f"late-{acme.name}", at=last + 60, started_at=last)
    assert f"{acme.name}" in shown(operator, f"{HOME}/incidents").partition("Overdue")[2]


# ---- audit log ----


def test_the_audit_log_is_filtered_by_its_url_and_comes_in_pages(
    product: InProcess, operator: Visitor, acme: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.console.operator.audit_log._PAGE_SIZE", 2)

    def note(action: str, actor: str = "operator", at_ms: int | None = None) -> None:
        line = {"actor": actor, "action": action, "target": "it", "tenant_id": acme.tenant_id}
        product.gateway.database.write_sync(
            lambda c: record_audit(c, at_ms=at_ms or now_ms(), detail=f"by {actor}", **line)
        )

    for number in range(3):
        note(f"pages.{acme.name}", f"key:{number}")
    note(f"ages.{acme.name}", at_ms=NOW_MS)
    asked = f"{HOME}/audit?action=pages.{acme.name}"
    page = operator.get(asked).text
    assert "Lines are kept for good" in page
    assert re.findall(r"by key:\d", page) == ["by key:2", "by key:1"]
    older = unescape(re.search(r'class="button" href="([^"]*)"', page)[1])
    assert re.findall(r"by key:\d", operator.get(older).text) == ["by key:0"]
    assert re.findall(r"by key:\d", operator.get(f"{asked}&actor=key:1").text) == ["by key:1"]
    assert "by key" not in operator.get(f"{asked}&tenant={product.user('other').name}").text
    assert "by key:2" in operator.get(f"{asked}&tenant={acme.name}").text
    aged = f"{HOME}/audit?action=ages.{acme.name}"
    assert "by operator" in operator.get(aged).text
    assert "by operator" in operator.get(f"{aged}&start=2026-02-01&end=2026-02-03").text
    assert "by operator" not in operator.get(f"{aged}&start=2026-02-03&end=2026-02-04").text


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/audit?after=x", "after"),
        ("/audit?start=2026-99-99", "start"),
        ("/audit?tenant=nobody", "nobody"),
        ("/tenants/nobody", "There is no tenant"),
        ("/tenants?page=0", "page"),
        ("/tenants?name=a%25", "name"),
        ("/requests?by=age", "by"),
        ("/incidents?before=0", "before"),
    ],
)
def test_what_cannot_be_asked_is_named_and_leads_back_to_the_operators_own_pages(
    operator: Visitor, path: str, word: str
) -> None:
    answer = operator.get(HOME + path)
    assert answer.status_code == (404 if "nobody" in path else 400)
    assert word in answer.text.partition('role="alert"')[2]
    assert f'<a href="{HOME}">Back' in answer.text
