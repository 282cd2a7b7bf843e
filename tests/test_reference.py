"""docs/reference is made from the code: it shows additions, and an outdated page is refused."""

from pathlib import Path

import pytest
from pydantic import Field

from server.api.deps import InferenceKey
from server.launch.settings import Settings
from tests.ci_scripts import load_script

reference = load_script("reference")


class MoreSettings(Settings):
    num_wings: int = Field(2, ge=1)  # of one angel
    # Who they are
    # of those that sing.
    angels: tuple[str, ...] = ()  # none


def test_a_new_route_is_shown_with_the_key_it_asks_for() -> None:
    app = reference.make_app()

    @app.patch("/v1/angels/{name}")
    async def rename(name: str, identity: InferenceKey) -> None:
        """Give an angel | another name.

        This is not shown.
        """

    @app.get("/angels")
    async def list_angels() -> None: ...

    page = reference.pages(app=app)["api.md"]
    assert (
        "| PATCH | `/v1/angels/{name}` | tenant key with `inference` "
        "| Give an angel \\| another name. |\n"
    ) in page
    assert "| GET | `/angels` | anyone, without a key | List angels |\n" in page
    assert "| GET | `/admin/v1/tenants` | admin key |" in page
    assert "angel" not in reference.pages()["api.md"]


def test_a_field_is_shown_with_what_happens_to_it_at_each_endpoint() -> None:
    rows = reference.pages()["request-fields.md"].splitlines()
    shown = {row.split("`")[1]: [cell.strip() for cell in row.split("|")[2:4]] for row in rows[8:]}
    assert shown["temperature"] == ["served", "served"]
    assert shown["echo"][1] == "served"
    assert shown["messages[].content[].cache_control"] == ["accepted", ""]
    assert shown["response_format.json_schema.schema"] == ["served", "served"]
    assert shown["web_search_options"] == ["refused", "refused"]
    assert shown["enable_thinking"] == ["served", "refused"]
    both = " In `/v1/completions`: "
    assert any(f"the assistant's.{both}Whether each answer" in row for row in rows)
    assert any(f"only as `false`, which asks for nothing.{both}Accepted" in row for row in rows)


def test_a_new_setting_is_shown_with_its_limits_and_its_comment() -> None:
    page = reference.pages(model=MoreSettings)["settings.md"]
    assert "| `num_wings` | int, at least 1 | `2` |  | of one angel |\n" in page
    assert (
        "| `angels` | list of str | empty |  | Who they are of those that sing. (none) |\n" in page
    )
    assert "| `port` | int, at least 0, at most 65535 | `8000` | `--port` |" in page


def test_the_check_fails_where_a_page_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reference.main(["--check"], tmp_path) == 1
    assert reference.main([], tmp_path) == 0
    assert reference.main(["--check"], tmp_path) == 0
    path = tmp_path / "settings.md"
    path.write_text(path.read_text() + "\n")
    capsys.readouterr()
    assert reference.main(["--check"], tmp_path) == 1
    told = capsys.readouterr().err
    assert "docs/reference/settings.md" in told
    assert "run `make reference`" in told
