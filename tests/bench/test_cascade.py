"""The cascade's benchmark: how a threshold is chosen, and what its figures are made of."""

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cascade import Asked, choose, measure, prices, running
from bench.page import FOLDER, PAGE, read_rows
from demo.domain import held_out

ANSWERS = st.tuples(st.booleans(), st.booleans(), st.sampled_from([-3.0, -2.0, -1.5, -1.0, -0.2]))
QUESTIONS = held_out()[::40]


class Gateway:
    """Answers as the API does: small is wrong, and less sure, about every third question."""

    def __init__(self) -> None:
        self.prices = prices()
        self.least = {"small": -100.0, "large": -100.0}
        self.used: dict[str, list[str]] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.removesuffix("/attempts").rpartition("/")[2]
        if request.method == "GET":
            return self.receipts(name)
        body = json.loads(request.content)
        if request.method == "PUT":
            self.least[name] = body["models"][0]["min_mean_logprob"]
            return httpx.Response(200)
        return self.answer(body["model"], body["messages"][0]["content"])

    def receipts(self, answer_id: str) -> httpx.Response:
        costs = [10 * self.prices[model] for model in self.used[answer_id]]
        counted = {"prompt_tokens": 7, "completion_tokens": 3}
        data = [{"receipt": counted | {"amount_nanousd": cost}} for cost in costs]
        return httpx.Response(200, json={"data": data})

    def answer(self, model: str, text: str) -> httpx.Response:
        place = [question.text for question in QUESTIONS].index(text)
        mean = -0.5 if place % 3 else -2.0
        is_weak = mean < self.least[model]
        used = ["small", "large"] if is_weak else ["large" if model == "large" else "small"]
        self.used[f"{model}-{place}"] = used
        is_right = place % 3 or "large" in used
        said = QUESTIONS[place].reply.sentence if is_right else "no"
        logprobs = {"content": [{"logprob": mean - 0.1}, {"logprob": mean + 0.1}]}
        body = {
            "id": f"{model}-{place}",
            "choices": [{"message": {"content": said}, "logprobs": logprobs}],
        }
        headers = {"x-chorale-attempts": "small;weak, large;answered"} if is_weak else {}
        return httpx.Response(200, json=body, headers=headers)


@given(st.lists(ANSWERS, min_size=1, max_size=7), st.sampled_from([0.0, 0.01, 0.3]))
def test_no_lower_threshold_is_right_often_enough(
    answers: list[tuple[bool, bool, float]], loss: float
) -> None:
    small = [Asked(is_right, mean) for is_right, _, mean in answers]
    large = [Asked(is_right, -1.0) for _, is_right, _ in answers]

    def loses(least: float) -> float:
        taken = [s if mean >= least else b for s, b, mean in answers]
        return (sum(b for _, b, _ in answers) - sum(taken)) / len(answers)

    least = choose(small, large, loss)
    assert loses(least) <= loss
    assert all(loses(mean) > loss for _, _, mean in answers if mean < least)


def test_a_cascade_pays_for_both_answers_where_it_goes_on() -> None:
    transport = httpx.MockTransport(Gateway())
    with httpx.Client(base_url="http://chorale", transport=transport) as client:
        rows = {setup["model"]: (setup, result) for setup, result in measure(client, QUESTIONS)}
    small, large = prices()["small"], prices()["large"]
    setup, result = rows["equal"]
    assert -2.0 < setup["min_mean_logprob"] < -0.5
    assert 0 < result["went_on"] < 1
    assert (result["accuracy"], rows["large"][1]["accuracy"]) == (1.0, 1.0)
    assert rows["small"][1]["accuracy_below_large"] == result["went_on"]
    assert result["price_to_large"] == pytest.approx(small / large + result["went_on"], rel=1e-3)
    assert rows["small"][1]["price_to_large"] == pytest.approx(small / large, rel=1e-3)
    assert result["requests"] + result["choosing"]["requests"] == len(QUESTIONS)


def test_the_committed_cascade_keeps_the_accuracy_within_1_percent_for_half_the_price() -> None:
    rows = [row for row in read_rows(FOLDER / "results") if row["bench"] == "cascade"]
    results = {row["setup"]["model"]: row["result"] for row in rows}
    assert list(results) == ["small", "large", "cheap", "equal"]
    for half in (results, {name: result["choosing"] for name, result in results.items()}):
        assert half["small"]["accuracy_below_large"] > 0.01 >= half["cheap"]["accuracy_below_large"]
    assert results["cheap"]["price_to_large"] <= 0.5
    assert results["equal"]["choosing"]["accuracy_below_large"] <= 0
    cheap, small = results["cheap"], results["small"]
    words = (
        f"right in {cheap['accuracy']:.0%} for {cheap['price_to_large']:.0%} of",
        f"with {cheap['went_on']:.0%} of the requests",
        f"right in {small['accuracy']:.1%} for {small['price_to_large']:.0%}",
    )
    said = (PAGE.parents[1] / "tenant" / "routes.md").read_text().replace(" %", "%")
    assert [each for each in words if each not in said] == []


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_on_a_real_server_the_prices_are_those_of_the_tenants_bill() -> None:
    with running() as client:
        rows = measure(client, held_out()[::20])
        (line,) = client.get("/v1/usage").json()["data"]
    results = [half for _, result in rows for half in (result, result["choosing"])]
    assert line["num_requests"] == sum(each["attempts"] for each in results)
    assert line["amount_nanousd"] == round(sum(each["price_usd"] for each in results) * 1e9)
    by_name = {setup["model"]: result for setup, result in rows}
    assert by_name["equal"]["choosing"]["accuracy_below_large"] <= 0
