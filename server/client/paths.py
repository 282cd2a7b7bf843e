"""Paths of the API, with names quoted, whatever they hold."""

from urllib.parse import quote


def adapter_path(*names: str | int) -> str:
    """The path of an adapter and what is below it."""
    return "/v1/adapters/" + "/".join(quote(str(name), safe="") for name in names)
