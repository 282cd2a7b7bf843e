"""The tables of docs/tenant/clients.md, made from the clients that were run."""

from tests.clients.clients import CLIENTS, ROOT

DOCUMENT = ROOT / "docs" / "tenant" / "clients.md"
_MARK = "<!-- From here on, make test-clients ARGS=--write-table writes this page. -->"
_WORKS = "\n\n| client | packages | set up by | what works |\n|---|---|---|---|\n"
_REFUSED = "\n\n| refused by design | status | `param` | message |\n|---|---|---|---|\n"


class Table:
    """Rows of the document, replaced by rows of the clients that were run."""

    def __init__(self) -> None:
        self._head, _, tables = DOCUMENT.read_text().partition(_MARK)
        works, _, refused = tables.removeprefix(_WORKS).partition(_REFUSED)
        self._works = {row.split(" | ")[0][2:]: row for row in works.split("\n")}
        self._refused = refused.strip().split("\n")

    def add(self, name: str, printed: list[str]) -> None:
        """Add a client that ran to its end. printed: lines `works: ...` and `refused: ...`."""
        said = {
            kind: [line.removeprefix(kind) for line in printed if line.startswith(kind)]
            for kind in ("works: ", "refused: ")
        }
        client = CLIENTS[name]
        pins = ", ".join(pin for pin in client.get("npm") or client["pip"] if pin[-1].isdigit())
        pins = pins.replace("==", " ")
        pins += " (recorded)" if "recorded" in client else ""
        self._works[name] = (
            f"| {name} | {pins} | {client['setup']} | {', '.join(said['works: '])} |"
        )
        self._refused = [f"| {cells} |" for cells in said["refused: "]] or self._refused

    def as_run(self) -> str:
        """Return the document with the rows of clients that were run; other rows stay."""
        works = [self._works[name] for name in CLIENTS if name in self._works]
        tables = _WORKS + "\n".join(works) + _REFUSED + "\n".join(self._refused)
        return f"{self._head}{_MARK}{tables}\n"
