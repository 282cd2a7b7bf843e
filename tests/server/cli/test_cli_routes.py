import json

import pytest

MODEL = {"first_token_timeout_s": None, "weight": None, "min_mean_logprob": None}
ROUTE = {
    "id": "cheap",
    "strategy": "cascade",
    "models": [MODEL | {"model": "small", "min_mean_logprob": -0.2}, MODEL | {"model": "large"}],
}
ANSWERS = {
    (method, f"{prefix}/routes{path}"): (200, answer)
    for prefix in ("/v1", "/admin/v1")
    for method, path, answer in (
        ("GET", "", {"object": "list", "data": [ROUTE], "has_more": False}),
        ("GET", "/cheap", ROUTE),
        ("PUT", "/cheap", ROUTE),
        ("DELETE", "/cheap", {"id": "cheap", "deleted": True}),
    )
}


@pytest.mark.parametrize(
    ("options", "body"),
    [
        (
            ("--fallback", "small:5,large"),
            {
                "strategy": "fallback",
                "models": [{"model": "small", "first_token_timeout_s": 5.0}, {"model": "large"}],
            },
        ),
        (
            ("--weights", "a=90,acme/b@2=10"),
            {
                "strategy": "weights",
                "models": [{"model": "a", "weight": 90}, {"model": "acme/b@2", "weight": 10}],
            },
        ),
        (
            ("--cascade", "small:-0.2,large"),
            {
                "strategy": "cascade",
                "models": [{"model": "small", "min_mean_logprob": -0.2}, {"model": "large"}],
            },
        ),
    ],
)
def test_a_route_is_written_in_one_option(run, api, options, body):
    assert run("routes", "set", "cheap", *options).exit_code == 0
    assert api.asked() == [("PUT", "/v1/routes/cheap", body)]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--fallback", "a", "--weights", "a=1"),
        ("--weights", "a=much"),
        ("--cascade", "small:,large"),
    ],
)
def test_what_is_no_route_is_not_sent(run, api, options):
    failed = run("routes", "set", "cheap", *options)
    assert failed.exit_code == 2
    assert failed.stderr.startswith("Error:")
    assert api.asked() == []


@pytest.mark.parametrize(
    ("admin", "prefix", "key"),
    [((), "/v1", "tenant-key"), (("--admin",), "/admin/v1", "admin-key")],
)
def test_tenants_and_the_operator_have_the_same_commands(run, api, admin, prefix, key):
    assert "small, large" in run("routes", "list", *admin).stdout
    assert json.loads(run("routes", "show", "cheap", "--json", *admin).stdout) == ROUTE
    assert "-0.2" in run("routes", "show", "cheap", *admin).stdout
    assert run("routes", "rm", "cheap", *admin).exit_code == 0
    paths = [(method, path) for method, path, _ in api.asked()]
    assert paths == [
        ("GET", f"{prefix}/routes"),
        ("GET", f"{prefix}/routes/cheap"),
        ("GET", f"{prefix}/routes/cheap"),
        ("DELETE", f"{prefix}/routes/cheap"),
    ]
    assert {request.headers["authorization"] for request in api.requests} == {f"Bearer {key}"}
