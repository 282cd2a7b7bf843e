"""The page at `/`, in a real browser, against the demo's model and adapters."""

import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import combinations

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.stack import Stack

QUESTION = "Tell me about Japan."


@pytest.fixture
def page(visitor: Page) -> Page:
    return visitor


def open_with_keys(page: Page, stack: Stack) -> None:
    """Open the page with the keys of all tenants, and wait until every model has its card."""
    keys = ",".join(tenant.api_key for tenant in stack.tenants)
    page.goto(f"{stack.base_url}/#keys={keys}")
    expect(page.locator(".voice")).to_have_count(1 + len(all_adapters(stack)))


def ask(page: Page, prompt: str) -> None:
    page.get_by_role("textbox", name="Prompt").fill(prompt)
    page.keyboard.press("Enter")


def answers(page: Page, count: int) -> list[str]:
    """Return the answer in every card, once all are done."""
    done = page.locator(".answer[aria-busy=false]")
    expect(done).to_have_count(count)
    return done.all_text_contents()


def all_adapters(stack: Stack) -> list[str]:
    return [name for tenant in stack.tenants for name in tenant.adapters]


def facts(page: Page, name: str) -> list[str]:
    return page.locator(f"[data-field={name}]").all_text_contents()


def answer_through_api(stack: Stack, model: str) -> str:
    """Ask the same question through the API and return the answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 120,
    }
    answer = stack.tenants[0].http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_base_and_adapters_answer_one_prompt_each_in_its_own_words(
    page: Page, demo_stack: Stack
) -> None:
    """Nothing is asked of another host, and no width needs sideways scrolling."""
    urls, complaints = [], []
    page.on("request", lambda request: urls.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    open_with_keys(page, demo_stack)
    ask(page, QUESTION)
    texts = answers(page, 5)
    assert all(texts)
    assert all(one != other for one, other in combinations(texts, 2))
    assert texts[0] == answer_through_api(demo_stack, demo_stack.model)
    check_cards(page, demo_stack)
    check_the_batch(page)
    for width in (400, 800, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width
    assert complaints == []
    assert all(url.startswith((f"{demo_stack.base_url}/", "data:")) for url in urls)


def check_cards(page: Page, stack: Stack) -> None:
    """A card shows tier, cost and the digest that was applied."""
    for tenant in stack.tenants:
        for name in tenant.adapters:
            digest = tenant.http.get(f"/v1/adapters/{name}").json()["latest"]["digest"]
            card = page.locator(f".voice[data-model={name}]")
            expect(card.locator("[data-field=tier]")).to_have_text("device")
            expect(card.locator("[data-field=applied]")).to_have_text(f"{digest[:12]} ✓")
            expect(card.locator("[data-field=about]")).to_contain_text(tenant.name)
    base = page.locator(f".voice[data-model={stack.model}]")
    expect(base.locator("[data-field=applied]")).to_have_text("none ✓")
    costs = [Decimal(text.removeprefix("$")) for text in facts(page, "cost")]
    assert all(cost > 0 for cost in costs)
    assert page.locator("#cost").text_content() == f"${sum(costs)}"
    assert all(re.fullmatch(r"\d+ in, \d+ out", text) for text in facts(page, "tokens"))


def check_the_batch(page: Page) -> None:
    expect(page.locator("#summary")).to_have_text(
        re.compile(r"^5 answers, \d+ tokens in \d+ steps$")
    )
    expect(page.locator("#requests")).to_have_text("0")
    expect(page.locator("#total-slabs")).to_have_text(re.compile(r"^[\d,]+$"))


def test_a_plain_prompt_goes_to_completions(page: Page, demo_stack: Stack) -> None:
    open_with_keys(page, demo_stack)
    page.get_by_text("Plain", exact=True).click()
    with page.expect_request("**/v1/completions"):
        page.get_by_role("group", name="Examples").get_by_role("button").first.click()
    assert len(set(answers(page, 5))) == 5


def test_keys_leave_the_address_bar_and_survive_a_reload(page: Page, demo_stack: Stack) -> None:
    urls = []
    page.on("request", lambda request: urls.append(request.url))
    open_with_keys(page, demo_stack)
    assert page.url == f"{demo_stack.base_url}/"
    page.reload()
    expect(page.locator(".voice")).to_have_count(5)
    for tenant in demo_stack.tenants:
        assert not any(tenant.api_key in url.partition("#")[0] for url in urls)


@pytest.fixture
def shared(demo_stack: Stack) -> Iterator[str]:
    """The name of an adapter of acme that globex has accepted."""
    acme, globex = demo_stack.tenants
    assert acme.http.put(f"/v1/adapters/json/grants/{globex.name}").is_success
    assert globex.http.put(f"/v1/offers/{acme.name}/json").is_success
    yield f"{acme.name}/json"
    assert globex.http.delete(f"/v1/offers/{acme.name}/json").is_success


def test_only_the_chosen_models_are_asked(page: Page, demo_stack: Stack, shared: str) -> None:
    """Another tenant's adapter is asked only if it is chosen, since its answer costs the asker."""
    globex = demo_stack.tenants[1]
    asked = []
    page.on("request", lambda request: asked.append(request.post_data_json["model"])
            if request.method == "POST" else None)  # fmt: skip
    page.goto(f"{demo_stack.base_url}/#keys={globex.api_key}")
    models = [demo_stack.model, *sorted(globex.adapters), shared]
    expect(page.locator(".voice h3")).to_have_text(models)
    chosen = page.locator(".voice [type=checkbox]")
    assert [box.is_checked() for box in chosen.all()] == [True, True, True, False]
    ask(page, QUESTION)
    answers(page, 3)
    assert sorted(asked) == sorted(models[:3])
    for box, is_chosen in zip(chosen.all(), (False, False, False, True), strict=True):
        box.set_checked(is_chosen)
    ask(page, QUESTION)
    assert answers(page, 1) == [answer_through_api(demo_stack, "json")]
    assert asked[3:] == [shared]
    page.get_by_role("checkbox", name=f"Ask {shared}").uncheck()
    expect(page.get_by_role("button", name="Ask")).to_be_disabled()


@pytest.mark.parametrize("answer", ["dismiss", "accept"])
def test_a_link_replaces_no_keys_unasked(page: Page, demo_stack: Stack, answer: str) -> None:
    mine, theirs = demo_stack.tenants
    questions: list[str] = []
    page.on("dialog", lambda dialog: (questions.append(dialog.message), getattr(dialog, answer)()))
    for tenant in (mine, mine, theirs):
        assert questions == []
        page.goto("about:blank")
        page.goto(f"{demo_stack.base_url}/#keys={tenant.api_key}")
    shown = theirs if answer == "accept" else mine
    expect(page.locator(".voice h3")).to_have_text([demo_stack.model, *sorted(shown.adapters)])
    assert len(questions) == 1
    assert theirs.api_key[-4:] in questions[0]
    assert page.url == f"{demo_stack.base_url}/"


def test_one_tenants_key_shows_nothing_of_the_other_and_a_wrong_one_what_the_server_says(
    page: Page, demo_stack: Stack
) -> None:
    page.goto(demo_stack.base_url)
    tenant = demo_stack.tenants[0]
    page.get_by_label("Keys of one or several tenants").fill(f"sk-chorale-nobodys,{tenant.api_key}")
    page.get_by_role("button", name="Use keys").click()
    expect(page.locator(".voice h3")).to_have_text([demo_stack.model, *tenant.adapters])
    expect(page.get_by_role("alert")).to_have_text("Key …odys: Incorrect API key provided.")


def test_a_refused_prompt_says_why_in_every_card(page: Page, demo_stack: Stack) -> None:
    open_with_keys(page, demo_stack)
    ask(page, "owl " * 3000)
    expect(page.get_by_text("maximum context length")).to_have_count(5)


def test_stop_ends_every_answer(page: Page, demo_stack: Stack) -> None:
    open_with_keys(page, demo_stack)
    # Requests are held here, so that they are still under way when Stop is pressed.
    page.route("**/v1/chat/completions", lambda route: None)
    ask(page, QUESTION)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped.")).to_have_count(5)
    expect(page.get_by_role("button", name="Ask")).to_be_visible()
