"""A cascade on a real engine: its mean logprob decides, and the bill has what was generated."""

from typing import Any

from tests.e2e.oracle import TinyWorld

BODY = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0}


def test_the_mean_logprob_of_the_first_model_decides_which_of_two_answers_is_sent(
    tiny: TinyWorld,
) -> None:
    http = tiny.tenant.http

    def ask(model: str, **changes: Any) -> Any:
        answer = http.post("/v1/completions", json=BODY | {"model": model} | changes)
        assert answer.status_code == 200, answer.text
        return answer

    alone = {model: ask(model, logprobs=0).json() for model in ("alpha", "beta")}
    logprobs = alone["alpha"]["choices"][0]["logprobs"]["token_logprobs"]
    mean = sum(logprobs) / len(logprobs)
    for least, ends, answering in (
        (mean - 0.01, "alpha;answered", "alpha"),
        (mean + 0.01, "alpha;weak, beta;answered", "beta"),
    ):
        models = [{"model": "alpha", "min_mean_logprob": least}, {"model": "beta"}]
        route = {"strategy": "cascade", "models": models}
        assert http.put("/v1/routes/tiered", json=route).status_code == 200
        whole = ask("tiered")
        assert whole.headers["x-chorale-attempts"] == ends
        said = whole.json()
        assert said["choices"][0]["text"] == alone[answering]["choices"][0]["text"]
        path = f"/v1/receipts/{said['id']}/attempts"
        tiny.stack.wait(lambda path=path: http.get(path).status_code == 200)
        receipts = [each["receipt"] for each in http.get(path).json()["data"]]
        assert [each["model"] for each in receipts] == [
            attempt.partition(";")[0] for attempt in ends.split(", ")
        ]
        assert {each["completion_tokens"] for each in receipts} == {6}
        cost = said["usage"]["x_chorale"]["cost_nanousd"]
        assert receipts[-1]["amount_nanousd"] == cost > 0
