"""The forms of a page that call the API, as `actions.js` reads them."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

_FIELDS = ("input", "select", "textarea")

Attributes = dict[str, str | None]


@dataclass
class Field:
    """A field of a form.   has_label: whether a reader of the page is told what it is."""

    attributes: Attributes
    has_label: bool

    @property
    def name(self) -> str:
        return self.attributes.get("name") or ""

    @property
    def is_shown(self) -> bool:
        return self.attributes.get("type") != "hidden"

    @property
    def kind(self) -> str:
        """The type that JSON has for the field: string, integer, boolean, array or any."""
        if self.attributes.get("type") == "checkbox":
            return "array" if "value" in self.attributes else "boolean"
        if "multiple" in self.attributes:
            return "array"
        kinds = {"number": "integer", "time": "integer", "json": "any", "lines": "array"}
        return kinds.get(self.attributes.get("data-type") or "", "string")


@dataclass
class Form:
    attributes: Attributes
    fields: list[Field] = field(default_factory=list)

    @property
    def path(self) -> str | None:
        return self.attributes.get("data-path")

    def __str__(self) -> str:
        return f"{self.attributes.get('data-method')} {self.path}"


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.forms: list[Form] = []
        self._is_in_form = False
        self._num_labels = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "form":
            self.forms.append(Form(attributes))
            self._is_in_form = True
        elif tag == "label":
            self._num_labels += 1
        elif tag in _FIELDS and self._is_in_form:
            has_label = self._num_labels > 0 or "aria-label" in attributes
            self.forms[-1].fields.append(Field(attributes, has_label))

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._is_in_form = False
        elif tag == "label":
            self._num_labels -= 1


def forms_of(html: str) -> list[Form]:
    """All forms of a page."""
    reader = _Reader()
    reader.feed(html)
    return reader.forms
