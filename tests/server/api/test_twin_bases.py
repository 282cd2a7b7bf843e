"""Base models of the same weights: an adapter has the template and the precision of its own."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from registry.formats.chat_template import read_json
from registry.ref import BaseRef
from server.inference.base_maker import BaseMaker
from server.inference.served_base import ServedBase
from server.launch.settings import Settings
from server.pool.control_files import BaseEntry
from tests.registry.rows import add_version
from tests.server.bases import demo_entries
from tests.server.fake_engines import FakeEngines
from tests.server.in_process import DEMO, InProcess, User

MESSAGES = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}!{% endfor %}"


def make_base(product: InProcess, name: str, folder: Path = DEMO, **options: Any) -> ServedBase:
    """A base model as a gateway makes it, with engines of the test, that is not served yet."""
    gateway = product.gateway
    settings = Settings(model=str(folder), model_name=name, **options)
    data_dir = gateway.settings.data_dir
    (entry,) = demo_entries(settings)
    maker = BaseMaker(gateway.settings, gateway.database, "key", data_dir / "cache", lambda: None)
    made = maker.base(replace(entry, home=str(data_dir / name)))
    asyncio.run(made.engines.close())
    return replace(made, engines=FakeEngines())


def serve(product: InProcess, *bases: ServedBase) -> None:
    """Serve these base models and no others from now on."""
    served = product.gateway.bases
    served.follow([BaseEntry(name=base.model_id, home=base.home) for base in bases])
    for base in bases:
        served.add(base)


@pytest.fixture
def twin(product: InProcess, tmp_path: Path) -> ServedBase:
    """A base model with the weights of the product's and another chat template."""
    folder = tmp_path / "twin"
    shutil.copytree(DEMO, folder)
    config = read_json(DEMO / "tokenizer_config.json") | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return make_base(product, "twin", folder)


@pytest.fixture
def user(product: InProcess, twin: ServedBase) -> User:
    """A tenant with an adapter for the first base model and one for its twin."""
    first = product.gateway.bases.default
    serve(product, first, twin)
    user = product.user("acme")
    for model in (first.model, twin.model):
        ref = BaseRef(model.base_revision, model.model_id, model.variant)
        product.gateway.database.write_sync(
            lambda conn, ref=ref: add_version(conn, user.tenant_id, f"of-{ref.model_id}", base=ref)
        )
    return user


def tokens(user: User, model: str) -> list[int]:
    answer = user.call("POST", "/tokenize", {"model": model, "messages": MESSAGES})
    found: list[int] = answer.json()["tokens"]
    return found


def parents(user: User) -> dict[str, str | None]:
    return {it["id"]: it["parent"] for it in user.call("GET", "/v1/models").json()["data"]}


def test_a_grantee_is_served_on_it_too_and_sees_whether_it_can_be(
    user: User, product: InProcess
) -> None:
    globex = product.user("globex")
    assert user.call("PUT", "/v1/adapters/of-twin/grants/globex").status_code == 200
    assert globex.call("PUT", "/v1/offers/acme/of-twin").status_code == 200

    def is_servable() -> bool:
        (offer,) = globex.call("GET", "/v1/offers").json()["data"]
        return bool(offer["is_servable"])

    assert (parents(globex)["acme/of-twin"], is_servable()) == ("twin", True)
    serve(product, product.gateway.bases.default)
    assert ("acme/of-twin" in parents(globex), is_servable()) == (False, False)


def test_keeping_it_costs_what_its_own_base_model_costs(
    user: User, product: InProcess, twin: ServedBase
) -> None:
    gateway = product.gateway
    for base in (twin, gateway.bases.default):
        asyncio.run(gateway.follower._announce(base))
    body = {"base_model": "twin", "storage_nanousd": 10**9}
    assert product.operator.call("POST", "/admin/v1/prices", body).status_code == 201
    of_base, of_twin = (
        user.call("GET", f"/v1/adapters/{name}").json()["latest"]["passport"]
        for name in ("of-base", "of-twin")
    )
    monthly = "storage_nanousd_per_month"
    assert of_twin[monthly] > 1000 * of_base[monthly] > 0


def test_an_adapter_is_served_on_the_base_model_that_it_is_for(
    user: User, twin: ServedBase
) -> None:
    assert parents(user)["of-twin"] == "twin"
    assert parents(user)["of-base"] == "base"
    assert user.call("GET", "/v1/models/of-twin").json()["parent"] == "twin"
    assert user.call("GET", "/v1/adapters/of-twin").json()["latest"]["base_model"] == "twin"
    assert tokens(user, "of-base") == tokens(user, "base")
    assert tokens(user, "of-twin") == tokens(user, "twin") != tokens(user, "base")
    body = {"model": "of-twin", "messages": MESSAGES}
    assert user.call("POST", "/v1/chat/completions", body).status_code == 200
    (asked,) = twin.engines.asked  # type: ignore[attr-defined]
    assert asked.prompt_token_ids == tuple(tokens(user, "twin"))


def test_without_it_the_adapter_is_refused_with_what_to_do(
    user: User, product: InProcess, twin: ServedBase
) -> None:
    serve(product, product.gateway.bases.default)
    answer = user.complete("of-twin")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "model_not_servable")
    assert "for the base model twin that is not served" in error["message"]
    assert "chorale adapters prove of-twin 1 --base-model base" in error["message"]
    assert "of-twin" not in parents(user)
    assert user.call("GET", "/v1/models/of-base").status_code == 200


def test_a_renamed_base_model_keeps_its_adapters(
    user: User, product: InProcess, twin: ServedBase
) -> None:
    renamed = make_base(product, "renamed", twin.model.path)
    serve(product, product.gateway.bases.default, renamed)
    assert parents(user)["of-twin"] == "renamed"
    assert tokens(user, "of-twin") == tokens(user, "renamed")


def test_a_variant_is_of_the_template_and_the_precision(
    product: InProcess, twin: ServedBase
) -> None:
    first = product.gateway.bases.default.model
    assert make_base(product, "again").model.variant == first.variant
    int8 = make_base(product, "int8", quantization="int8").model
    assert {it.base_revision for it in (first, int8, twin.model)} == {first.base_revision}
    assert len({it.variant for it in (first, int8, twin.model)}) == 3
