"""The playground of the console, in a real browser, against the demo's model and adapters."""

import contextlib
import io
import json
import os
import subprocess
from urllib.parse import urlencode

import jsonschema_rs
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from demo.agent import TOOL
from tests.e2e.stack import Stack, Tenant

QUESTION = "Tell me about Japan."
AWKWARD = 'It\'s "Japan"\\n & `$HOME`: \n 日本 \u2028</script>'
FOX = "What does a fox eat?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "legs": {"type": "integer", "maximum": 9}},
    "required": ["city", "legs"],
    "additionalProperties": False,
}


def open_with(page: Page, tenant: Tenant, *models: str, **parameters: object) -> None:
    """Open the playground with these models, and wait until each has its column."""
    given = [("model", model) for model in models]
    query = urlencode(given + list(({"temperature": 0} | parameters).items()))
    page.goto(f"{tenant.stack.base_url}/console/playground?{query}")
    expect(page.get_by_role("heading", level=2)).to_have_text(list(models))


def ask(page: Page, message: str) -> None:
    page.get_by_label("Message").fill(message)
    page.keyboard.press("Enter")


def turns(page: Page, count: int = 1) -> list[Locator]:
    """The last turn of each column, once every turn has ended."""
    expect(page.locator(".turn[aria-busy=false]")).to_have_count(
        count * page.locator(".column").count()
    )
    return [column.locator(".turn").last for column in page.locator(".column").all()]


def field(turn: Locator, name: str) -> str:
    return turn.locator(f"[data-field={name}]").text_content()


def through_api(tenant: Tenant, model: str, *messages: str) -> str:
    """The answer to messages of the user and the assistant by turns."""
    roles = ("user", "assistant") * len(messages)
    chat = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
    body = {"model": model, "messages": chat, "temperature": 0}
    answer = tenant.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def run_python(tenant: Tenant, turn: Locator) -> str:
    """The program's output, with the tenant's key in its environment alone."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("CHORALE_API_KEY", tenant.api_key)
        exec(compile(field(turn, "python"), "python", "exec"), {})
    return printed.getvalue().removesuffix("\n")


def run_curl(tenant: Tenant, turn: Locator) -> str:
    environment = os.environ | {"CHORALE_API_KEY": tenant.api_key}
    done = subprocess.run(
        ["bash", "-c", field(turn, "curl")], env=environment, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)["choices"][0]["message"]["content"]


def bodies(page: Page) -> list[dict]:
    """The bodies of the questions that the page asks from now on."""
    asked: list[dict] = []
    page.on("request", lambda it: it.post_data and asked.append(it.post_data_json))
    return asked


def test_models_answer_side_by_side_as_through_the_api(
    page: Page, demo_stack: Stack, tenant: Tenant
) -> None:
    """Nothing is asked of another host, and the policy of contents forbids nothing."""
    urls, complaints = [], []
    page.on("request", lambda request: urls.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    models = (demo_stack.model, "json", "shout@1")
    open_with(page, tenant, *models)
    ask(page, QUESTION)
    said = [field(turn, "content") for turn in turns(page)]
    assert said == [through_api(tenant, model, QUESTION) for model in models]
    assert len(set(said)) == 3
    for turn in turns(page):
        assert field(turn, "end") == "stop, eos"
        assert field(turn, "cost").startswith("$0.0000")
        for name, unit in (("first", "ms"), ("tokens", "out"), ("speed", "tokens/s")):
            assert field(turn, name).endswith(f" {unit}")
    assert complaints == []
    assert all(url.startswith((f"{demo_stack.base_url}/", "data:")) for url in urls)
    assert len([url for url in urls if url.endswith("/actions.js")]) == 1


def test_each_column_goes_on_with_its_own_conversation(page: Page, tenant: Tenant) -> None:
    open_with(page, tenant, "json", "shout")
    ask(page, QUESTION)
    first = [field(turn, "content") for turn in turns(page)]
    ask(page, FOX)
    expected = [
        through_api(tenant, model, QUESTION, answer, FOX)
        for model, answer in zip(("json", "shout"), first, strict=True)
    ]
    assert [field(turn, "content") for turn in turns(page, 2)] == expected
    page.get_by_role("button", name="Reset").click()
    expect(page.locator(".turn")).to_have_count(0)
    asked = bodies(page)
    ask(page, QUESTION)
    turns(page)
    assert [len(body["messages"]) for body in asked] == [1, 1]


def test_the_code_that_is_copied_runs_as_it_stands_with_every_parameter(
    page: Page, tenant: Tenant
) -> None:
    open_with(
        page, tenant, "json", top_p=0.9, max_tokens=12, seed=7, top_k=40, min_p=0.01,
        presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.3, min_tokens=12,
        service_tier="flex", speculation="off",
    )  # fmt: skip
    page.get_by_text("More parameters").click()
    page.get_by_label("Stop strings").fill('zebra\'s\n"quoted"')
    page.get_by_label("System prompt").fill(AWKWARD)
    asked = bodies(page)
    ask(page, AWKWARD)
    (turn,) = turns(page)
    (body,) = asked
    for name in page.locator("[data-parameter]:not([name=tools])").all():
        assert name.get_attribute("name") in body
    assert [message["content"] for message in body["messages"]] == [AWKWARD, AWKWARD]
    said = field(turn, "content")
    assert field(turn, "end") == "length, max_tokens"
    assert run_python(tenant, turn) == run_curl(tenant, turn) == said
    assert tenant.api_key not in page.content()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    turn.get_by_text("curl and Python").click()
    turn.get_by_role("button", name="Copy Python").click()
    expect(turn.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == field(turn, "python")


def percentages(page: Page) -> list[float]:
    """The probabilities in the box, in hundredths."""
    lines = page.locator("#likely > *").all_text_contents()
    shown = [line.removesuffix(" %").rpartition(" ") for line in lines]
    return [0.0 if rest.endswith("<") else float(number) for rest, _, number in shown]


def test_tokens_show_their_probabilities_on_hover_and_by_keyboard(
    page: Page, demo_stack: Stack, tenant: Tenant
) -> None:
    open_with(page, tenant, demo_stack.model, temperature=2, seed=1)
    ask(page, QUESTION)
    (turn,) = turns(page)
    tokens, box = turn.locator(".token"), page.locator("#likely")
    assert "".join(tokens.all_text_contents()) == field(turn, "content")
    for token in tokens.all()[:12]:
        token.hover()
        found = percentages(page)
        assert len(found) in (5, 6)  # the chosen one is named, too, where it is not among the five
        assert sum(found) <= 100
        chosen = box.locator("strong").text_content().removesuffix(" %").rpartition(" ")[0]
        assert json.loads(chosen.removesuffix(" <")) == token.text_content()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(box.locator("strong")).to_contain_text(json.dumps(tokens.nth(1).text_content()))
    page.keyboard.press("Escape")
    expect(box).to_be_hidden()


def events(*deltas: tuple[dict[str, str], list[bytes]]) -> str:
    """A stream of an answer, from the delta of each chunk and the tokens that it counts."""
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "x_chorale": {"cost_nanousd": 1}}
    chunks = [
        {"choices": [{"delta": delta, "logprobs": {"content": [
            {"token": token.decode("utf-8", "replace"), "bytes": list(token), "logprob": -1,
             "top_logprobs": []} for token in tokens
        ]}}]}
        for delta, tokens in deltas
    ]  # fmt: skip
    lines = [json.dumps(chunk) for chunk in [*chunks, {"choices": [], "usage": usage}]]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])


def test_each_token_is_at_its_own_text(page: Page, tenant: Tenant) -> None:
    """Texts come later than tokens whose end is open, and marks have no text at all."""
    mouse = "é🐭".encode()
    stream = events(
        ({}, [b"<thi", b"nk>"]),
        ({"reasoning_content": "Hm"}, [b"Hm"]),
        ({}, [b"</", b"think>", b"A ", mouse[:3]]),
        ({"content": "A é"}, []),
        ({"content": "🐭"}, [mouse[3:5], mouse[5:]]),
        ({"content": " of another tokenizer"}, [b" el", b"se"]),
        ({"content": "!"}, [b"!"]),
    )
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        body=stream, content_type="text/event-stream"
    ))  # fmt: skip
    open_with(page, tenant, "json")
    ask(page, QUESTION)
    (turn,) = turns(page)
    assert field(turn, "reasoning_content") == "Hm"
    assert field(turn, "content") == "A é🐭 of another tokenizer!"
    assert turn.locator(".token").all_text_contents() == ["Hm", "A ", "é", "🐭", "!"]


def test_a_schema_is_obeyed_also_without_probabilities(page: Page, tenant: Tenant) -> None:
    open_with(page, tenant, "shout", logprobs="false")
    page.get_by_text("Schema and tools").click()
    page.get_by_label("JSON schema").fill(json.dumps(SCHEMA))
    ask(page, QUESTION)
    (turn,) = turns(page)
    jsonschema_rs.validate(SCHEMA, json.loads(field(turn, "content")))
    expect(turn.locator(".token")).to_have_count(0)


def test_a_call_is_shown_and_its_result_goes_into_the_next_question(
    page: Page, demo_stack: Stack, tenant: Tenant, agent: None
) -> None:
    open_with(page, tenant, demo_stack.model, "agent")
    page.get_by_text("Schema and tools").click()
    page.get_by_label("Tools, a JSON list").fill(json.dumps([TOOL]))
    ask(page, FOX)
    _, turn = turns(page)
    assert field(turn, "name") == "look_up"
    assert json.loads(field(turn, "arguments")) == {"thing": "fox", "fact": "eats"}
    assert field(turn, "end").startswith("tool_calls")
    assert "name='look_up'" in run_python(tenant, turn)
    turn.get_by_label("Its result").fill("berries")
    ask(page, "")
    # The base model called nothing, so it is not asked again.
    expect(page.locator(".turn[aria-busy=false]")).to_have_count(3)
    last = page.locator(".column").last.locator(".turn").last
    assert field(last, "content") == "A fox eats berries."


def test_a_call_that_is_cut_off_is_none(page: Page, tenant: Tenant, agent: None) -> None:
    open_with(page, tenant, "agent", max_tokens=30)
    page.get_by_text("Schema and tools").click()
    page.get_by_label("Tools, a JSON list").fill(json.dumps([TOOL]))
    page.get_by_label("tool_choice").fill("look_up")
    ask(page, FOX)
    (turn,) = turns(page)
    assert "cut off" in field(turn, "fault")
    expect(turn.get_by_label("Its result")).to_have_count(0)


def test_stop_ends_answers_that_are_under_way(page: Page, tenant: Tenant) -> None:
    open_with(page, tenant, "json", "shout", min_tokens=400)
    ask(page, QUESTION)
    for column in page.locator(".column").all():
        expect(column.locator(".token").nth(3)).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    for turn in turns(page):
        assert field(turn, "fault").startswith("Stopped.")
        assert field(turn, "cost") == "–"
    expect(page.get_by_role("button", name="Ask")).to_be_visible()
    asked = bodies(page)
    page.get_by_text("More parameters").click()
    page.get_by_label("min_tokens").fill("")
    ask(page, FOX)
    turns(page, 2)
    assert [len(body["messages"]) for body in asked] == [1, 1]


def test_errors_are_said_as_the_api_says_them(
    page: Page, demo_stack: Stack, tenant: Tenant
) -> None:
    open_with(page, tenant, demo_stack.model, "nobodys", temperature=3)
    ask(page, QUESTION)
    wrong = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 3}
    refused = tenant.http.post("/v1/chat/completions", json=wrong | {"model": demo_stack.model})
    message = refused.json()["error"]["message"]
    assert "temperature" in message
    assert [field(turn, "fault") for turn in turns(page)] == [message] * 2
    page.get_by_label("temperature").fill("0")
    ask(page, QUESTION)
    base, unknown = turns(page, 2)
    assert field(base, "content") == through_api(tenant, demo_stack.model, QUESTION)
    assert "nobodys" in field(unknown, "fault")


def test_what_cannot_be_asked_is_not_sent(page: Page, tenant: Tenant) -> None:
    open_with(page, tenant, *["json"] * 6)
    page.get_by_label("Model").fill("shout")
    page.get_by_role("button", name="Add").click()
    expect(page.locator("#choose").get_by_role("alert")).to_contain_text("At most 6 models")
    expect(page.locator(".column")).to_have_count(6)
    asked = bodies(page)
    page.get_by_text("Schema and tools").click()
    page.get_by_label("Message").fill(QUESTION)
    for label, text, complaint in [
        ("JSON schema", "{'type': 1}", "schema: This is not JSON"),
        ("Tools, a JSON list", "[", "tools: This is not JSON"),
        ("seed", "99999999999999999", "seed: "),
        ("Message", " ", "Write a message first."),
    ]:
        page.get_by_label(label).fill(text)
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#ask").get_by_role("alert")).to_contain_text(complaint)
        if label != "Message":
            page.get_by_label(label).fill("")
    assert asked == []


def test_the_address_has_models_and_parameters_and_nothing_that_is_said(
    page: Page, demo_stack: Stack, tenant: Tenant
) -> None:
    page.goto(f"{demo_stack.base_url}/console/playground")
    # At first there are the base model and an adapter of one's own.
    expect(page.locator(".column h2")).to_have_count(2)
    page.get_by_role("button", name="Remove").first.click()
    for model in ("shout", "globex/pirate"):
        page.get_by_label("Model").fill(model)
        page.keyboard.press("Enter")
    page.get_by_label("temperature").fill("0.5")
    page.get_by_label("Probabilities").uncheck()
    for label in ("System prompt", "Message"):
        page.get_by_label(label).fill("a secret")
    page.get_by_text("Schema and tools").click()
    page.get_by_label("JSON schema").fill('{"const": "a secret"}')
    page.get_by_label("tool_choice").fill("a secret")
    page.get_by_label("tool_choice").blur()
    kept = page.locator(".column h2").all_text_contents()
    query = "&".join(f"model={name}" for name in kept).replace("/", "%2F")
    expect(page).to_have_url(
        f"{demo_stack.base_url}/console/playground?{query}&temperature=0.5&logprobs=false"
    )
    page.reload()
    expect(page.locator(".column h2")).to_have_text(kept)
    expect(page.get_by_label("temperature")).to_have_value("0.5")
    expect(page.get_by_label("Probabilities")).not_to_be_checked()
    expect(page.get_by_label("System prompt")).to_have_value("")


def test_answers_are_for_everybody_at_any_width(
    page: Page, demo_stack: Stack, tenant: Tenant
) -> None:
    page.set_viewport_size({"width": 400, "height": 900})
    open_with(page, tenant, demo_stack.model, "json")
    ask(page, QUESTION)
    turn, _ = turns(page)
    for summary in page.locator("summary").all():
        summary.click()
    for width in (400, 800, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        turn.locator(".token").last.hover()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        box = page.locator("#likely").bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width
    found = Axe().run(page).response
    assert found["passes"]
    assert [(it["id"], it["nodes"][0]["html"]) for it in found["violations"]] == []
