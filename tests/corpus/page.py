"""The table of docs/tenant/your-adapter.md, made from the corpus.

`python -m tests.corpus.page` writes it.
"""

from collections.abc import Iterator

from tests.ci_scripts import ROOT
from tests.corpus.cases import CASES, Case, Refused

DOCUMENT = ROOT / "docs" / "tenant" / "your-adapter.md"
_BEGIN = "<!-- `python -m tests.corpus.page` writes this table from the adapters of the tests. -->"
_END = "<!-- The end of the table. -->"
_HEAD = "| trainer | adapter | known from | what happens |\n|---|---|---|---|\n"


def written(page: str) -> str:
    """The page with the table of the corpus in place of the one that it has."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    assert after, f"{DOCUMENT} has lost a mark"
    return f"{before}{_BEGIN}\n\n{_HEAD}{''.join(_rows())}\n{_END}{after}"


def _rows() -> Iterator[str]:
    for case in CASES:
        yield f"| {case.trainer} | {case.what} | {case.known_from} | {_happens(case)} |\n"


def _happens(case: Case) -> str:
    outcome = case.outcome
    if isinstance(outcome, Refused):
        return f"refused with [`{outcome.code}`](errors.md#{outcome.code}): “{outcome.advice}”"
    told = "; ".join(f"“{warning}”" for warning in dict.fromkeys(outcome.told))
    return f"served, with a warning: {told}" if told else "served"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
