"""Schemas of numbers, patterns and formats at random, and answers that their grammars allow."""

import random

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.limits import parser_limits

FORMATS = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
CLASSES = (
    r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", ".", r"\p{L}", r"\P{L}", r"\P{Po}", r"[^\s]",
    r"\p{Script=Greek}", "[[:alpha:]]", "[a-z&&c]", "[!~~~]", "[+--]", "[a[b]]", r"[^\S\d]",
    r"[\x00-!]", r"[^\n\\]", r"[^\r\\]", r'[^\x00-\x1f"\\]', r"[^\W]",
    "(?i:[^k])", "(?i:ſ)", "(?i)K",
)  # fmt: skip
CHARACTERS = 'ab-&~[]^"\\/09.\n\t é\x85\ufeff\u2028😀kſ'
_EDGES = b'\\\\\\"""-..00bfnrtx-'
"""Bytes that an answer prefers, with weights."""
_LONGEST = 400


class RandomSchemas:
    """A maker of schemas, each with a value that it may allow."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._tokenizer = LLTokenizer("byte")

    def schema(self):
        kinds = (self._number, self._text, self._constant, self._format, self._names)
        first, second = self._random.choices(kinds, [9, 9, 2, 4, 2], k=2)
        schema, value = first()
        if self._is_likely(0.1):
            items = list(schema.items())
            schema = {"allOf": [dict(items[::2]), dict(items[1::2])]}
        elif self._is_likely(0.1):
            schema = {"allOf": [schema, second()[0]]}
        return schema, value

    def answer(self, grammar):
        """A text that the grammar allows; None if it becomes too long or too much work."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits(grammar))
        text, ends = bytearray(), self._random.choice([0.01, 0.3, 0.8])
        while len(text) < _LONGEST:
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:256]).tolist()
            if matcher.is_accepting() and (not allowed or self._is_likely(ends)):
                return text.decode()
            liked = [byte for byte in _EDGES if byte in allowed and byte != ord('"')]
            if ord('"') in allowed and (len(allowed) == 1 or self._is_likely(ends)):
                liked = [ord('"')]
            choices = liked if liked and self._is_likely(0.6) else allowed
            if not choices or not matcher.consume_token(byte := self._random.choice(choices)):
                return None
            text.append(byte)
        return None

    def _is_likely(self, share):
        return self._random.random() < share

    def _number(self):
        low = self._limit()
        # The validator compares large fractions as floats.
        kinds = ["integer"] if abs(low) > 1e14 else ["number", "number", "integer"]
        schema = {"type": self._random.choice(kinds)}
        width = self._random.choice([0.001, 0.1, 0.5, 0.999, 1, 1.5, 7, 1e4, 1e-9])
        # Fractions of more than 15 digits are refused; some are left to show it.
        high = low + width if self._is_likely(0.1) else float(f"{low + width:.15g}")
        high = int(high) if high == int(high) else high
        if self._is_likely(0.8):
            schema[self._random.choice(["minimum", "exclusiveMinimum"])] = low
        if self._is_likely(0.8):
            schema[self._random.choice(["maximum", "exclusiveMaximum"])] = high
        if self._is_likely(0.2):
            multiples = [0.01, 0.5, 1, 3, 2.5, 0.07, 0.001, 1e-6, 7, 1e-12]
            schema["multipleOf"] = self._random.choice(multiples)
        return schema, self._random.choice([low, high, round(low) + 1])

    def _limit(self):
        scale = self._random.choice([1, 10, 1000, 2**53 - 10**5])
        value = self._random.choice([-scale, 0, 0, scale, self._random.uniform(-scale, scale)])
        digits = self._random.choice([0, 1, 3, 14])
        return round(value, digits) if digits and scale < 2000 else round(value)

    def _constant(self):
        schema, value = self._number()
        other = self._random.choice([self._limit(), self._random.choice(CHARACTERS), 1e-7, 1e-30])
        forms = {"const": value}, {"enum": [other, value, 0.1 + 0.2]}, schema | {"enum": [value]}
        return self._random.choice(forms), value

    def _format(self):
        return {"type": "string", "format": self._random.choice(FORMATS)}, ""

    def _names(self):
        pattern, name = self._alternatives(1)
        rest = self._random.choice([False, {"type": "boolean"}])
        if "." in pattern.replace(r"\.", ""):
            rest = False  # the validator, unlike JavaScript, lets it match \r
        values = {pattern: {"type": "null"}}
        schema = {"type": "object", "patternProperties": values, "additionalProperties": rest}
        return schema, {name: None}

    def _text(self):
        pattern, text = self._alternatives(2)
        schema = {"type": "string", "pattern": pattern}
        if self._is_likely(0.2):
            schema["maxLength"] = self._random.randrange(12)
        return schema, text

    def _alternatives(self, depth):
        branches = [self._sequence(depth) for _ in range(self._random.choice([1, 1, 1, 2, 3]))]
        return "|".join(pattern for pattern, _ in branches), self._random.choice(branches)[1]

    def _sequence(self, depth):
        parts = [self._part(depth) for _ in range(self._random.randint(1, 4))]
        begins, ends = (sign if self._is_likely((0.1, 0.3, 0.7)[depth]) else "" for sign in "^$")
        return begins + "".join(part for part, _ in parts) + ends, "".join(t for _, t in parts)

    def _part(self, depth):
        if depth and self._is_likely(0.2):
            part, text = self._alternatives(depth - 1)
            name = self._random.choice(["", "?:", "?<a>", "?<stop>", "?P<stop>"])
            part = f"({name}{part})"
        else:
            part, text = self._class() if self._is_likely(0.5) else self._character()
        times = self._random.choice(["", "", "", "*", "+", "?", "{1,4}", "{2}", "{2,}", "+?", "++"])
        return part + times, text * (2 if "2" in times else 1)

    def _character(self):
        text = self._random.choice(CHARACTERS)
        is_sign = text.isascii() and not text.isalnum() and not text.isspace()
        return f"\\{text}" if is_sign else text, text

    def _class(self):
        if self._is_likely(0.4):
            return self._random.choice(CLASSES), "a"
        members = self._random.sample(CHARACTERS, self._random.randint(1, 4))
        items = "".join(f"\\{member}" if member in '[]^\\-"/.' else member for member in members)
        items += self._random.choice(["", "", "a-z", r"\w", r"\u0020-\u007e"])
        return self._random.choice([(f"[{items}]", members[0]), (f"[^{items}]", "a")])
