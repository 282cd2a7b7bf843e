"""A missing package is named, with the extra that brings it, wherever something needs it."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from registry.extras import EXTRAS, ExtraMissing, require
from registry.storage.url import open_storage
from server.database.database import Database

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


@pytest.mark.parametrize("package", EXTRAS)
def test_every_package_is_in_the_extra_that_is_said_to_bring_it(package: str) -> None:
    wanted = PYPROJECT["project"]["optional-dependencies"][EXTRAS[package]]
    names = [re.split(r"[^\w-]", requirement)[0] for requirement in wanted]
    assert package.replace(".", "-") in names


def test_the_package_the_use_and_both_ways_to_install_it_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require("Flying", "boto3")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ExtraMissing) as raised:
        require("Flying", "boto3")
    assert str(raised.value).startswith("Flying needs boto3, which is not installed.")
    assert "pip install -e '.[s3]'" in raised.value.remedy
    assert "pip install './WHEEL[s3]'" in raised.value.remedy


def test_a_part_of_what_is_not_installed_is_not_installed() -> None:
    EXTRAS["no_such.part"] = "s3"
    try:
        with pytest.raises(ExtraMissing, match="no_such.part"):
            require("Flying", "no_such.part")
    finally:
        del EXTRAS["no_such.part"]


def test_who_opens_a_bucket_or_postgresql_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for package in ("boto3", "psycopg"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExtraMissing, match=r"bucket needs boto3"):
        open_storage("s3://bucket/prefix")
    with pytest.raises(ExtraMissing, match=r"PostgreSQL database needs psycopg"):
        Database("postgresql://localhost/x", data_dir=tmp_path)
