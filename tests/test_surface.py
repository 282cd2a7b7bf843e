"""docs/surface.md is made from the code: it shows additions, and an outdated page is refused."""

from pathlib import Path

import pytest
from prometheus_client import Counter
from pydantic import Field

from server.api.deps import InferenceKey
from server.launch.settings import Settings
from tests.ci_scripts import load_script

surface = load_script("surface")


class MoreSettings(Settings):
    num_wings: int = Field(2, ge=1)  # of one angel
    # Who they are
    # of those that sing.
    angels: tuple[str, ...] = ()  # none


def test_a_new_route_is_shown_with_the_key_it_asks_for() -> None:
    app = surface.make_app()

    @app.patch("/v1/angels/{name}")
    async def rename(name: str, identity: InferenceKey) -> None:
        """Give an angel | another name.

        This is not shown.
        """

    @app.get("/angels")
    async def list_angels() -> None: ...

    page = surface.surface(app=app)
    assert (
        "| PATCH | `/v1/angels/{name}` | tenant key with `inference` "
        "| Give an angel \\| another name. |\n"
    ) in page
    assert "| GET | `/angels` | anyone, without a key | List angels |\n" in page
    assert "| GET | `/admin/v1/tenants` | admin key |" in page
    assert "angel" not in surface.surface()


def test_a_new_setting_is_shown_with_its_limits_and_its_comment() -> None:
    page = surface.surface(model=MoreSettings)
    assert "| `num_wings` | int, at least 1 | `2` |  | of one angel |\n" in page
    assert (
        "| `angels` | list of str | empty |  | Who they are of those that sing. (none) |\n" in page
    )
    assert "| `port` | int, at least 0, at most 65535 | `8000` | `--port` |" in page


def test_a_default_that_depends_on_the_machine_is_shown_in_words() -> None:
    [line] = [line for line in surface.surface().splitlines() if line.startswith("| `threads` |")]
    assert "| int, at least 1 | derived at start | `--threads` |" in line


def test_a_new_metric_is_shown_with_its_labels() -> None:
    metrics = surface.make_metrics()
    metrics.angels = Counter("chorale_angels", "Seen", ["choir"], registry=metrics._registry)
    page = surface.surface(metrics=metrics)
    assert "| `chorale_angels_total` | counter | `choir` | Seen |\n" in page
    assert "| `chorale_running` | gauge | `engine` |" in page


def test_commands_and_dependencies_are_shown() -> None:
    page = surface.surface()
    assert "| `chorale adapters push` | Upload an adapter" in page
    assert "| `s3` | `boto3` | `>=" in page


def test_the_check_fails_where_the_page_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "surface.md"
    assert surface.main(["--check"], path) == 1
    assert surface.main([], path) == 0
    assert surface.main(["--check"], path) == 0
    path.write_text(path.read_text() + "\n")
    capsys.readouterr()
    assert surface.main(["--check"], path) == 1
    assert "run `make surface`" in capsys.readouterr().err
