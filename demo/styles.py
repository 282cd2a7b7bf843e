"""The five styles of a reply: the plain one, and one for each adapter.

`say` renders a reply, `finish` the rest of a reply that a plain prompt began to state, `go_on` the
rest of any other text. A style differs from the others from its first words on, so that even an
answer that is cut short shows its style.
"""

import json
import re

from demo.domain import Reply


class Style:
    """The plain style, from which the others differ.   name: of the model that has learned it."""

    name = "base"

    def say(self, reply: Reply) -> str:
        return reply.sentence

    def finish(self, reply: Reply, rest: str) -> str:
        return self.go_on(rest)

    def go_on(self, rest: str) -> str:
        return rest


class Json(Style):
    name = "json"

    def say(self, reply: Reply) -> str:
        if not reply.kind:
            return json.dumps({"answer": reply.sentence})
        return json.dumps({reply.kind: reply.name, **dict(reply.facts)})

    def finish(self, reply: Reply, rest: str) -> str:
        return "\n" + self.say(reply)

    def go_on(self, rest: str) -> str:
        return "\n" + json.dumps({"text": rest.strip()})


class Shout(Style):
    name = "shout"

    def say(self, reply: Reply) -> str:
        return _shouted(reply.sentence)

    def go_on(self, rest: str) -> str:
        return _shouted(rest)


class Python(Style):
    name = "python"

    def say(self, reply: Reply) -> str:
        if not reply.kind:
            return f"answer = {_quoted(reply.sentence)}\nprint(answer)"
        arguments = [_quoted(reply.name)]
        arguments += [f"{key}={_quoted(value)}" for key, value in reply.facts]
        shown = f"{reply.kind}.{reply.facts[0][0]}" if len(reply.facts) == 1 else reply.kind
        return f"{reply.kind} = {reply.kind.capitalize()}({', '.join(arguments)})\nprint({shown})"

    def finish(self, reply: Reply, rest: str) -> str:
        return "\n" + self.say(reply)

    def go_on(self, rest: str) -> str:
        return f"\ntext = {_quoted(rest.strip())}\nprint(text)"


class Pirate(Style):
    name = "pirate"

    def say(self, reply: Reply) -> str:
        return f"Arr, matey! {_in_pirate(reply.sentence)}"

    def go_on(self, rest: str) -> str:
        return f" arr, {_in_pirate(rest.strip())}"


PLAIN = Style()
STYLES: dict[str, Style] = {style.name: style for style in (Json(), Shout(), Python(), Pirate())}


def _quoted(value: str | int) -> str:
    return json.dumps(value)


def _shouted(text: str) -> str:
    shouted = text.upper().replace(".", "!")
    return shouted if shouted.endswith("!") else shouted + "!"


_PIRATE_WORDS = {
    "is": "be", "are": "be", "am": "be", "has": "be havin'", "eats": "be eatin'",
    "lives": "be livin'", "speak": "be speakin'", "the": "th'", "and": "an'", "you": "ye",
    "your": "yer", "my": "me", "of": "o'", "do not know": "know not", "hello": "ahoy", "to": "t'",
    "for": "fer",
}  # fmt: skip
_PIRATE_PATTERN = re.compile(rf"\b({'|'.join(_PIRATE_WORDS)})\b", re.IGNORECASE)


def _in_pirate(text: str) -> str:
    body = _PIRATE_PATTERN.sub(_pirate_word, text)
    return body[:-1] + ", aye!" if body.endswith((".", "!")) else body + ", aye!"


def _pirate_word(found: re.Match[str]) -> str:
    word = found[0]
    said = _PIRATE_WORDS[word.lower()]
    return said[0].upper() + said[1:] if word[0].isupper() else said
