"""Answers as models of each family write them, and what they are.

The texts follow the models' own chat templates; marks that are special tokens are written out.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Transcript:
    """An answer.   calls: name and arguments of each, as they stand in the text.

    is_plain: transformers' parser gives the same: it keeps the last part of the content only, and
    takes no second call without a mark between them.
    """

    family: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    is_plain: bool = field(default=True, kw_only=True)


ODD = '{"ort": "Köln \\"Süd\\" \\\\ {[", "ja": [true, null], "n": {"a": -1.5e3}, "z": 12}'
NAMES = ("wetter", "now", "get_2-x")


def _hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


TWO = (("wetter", ODD), ("now", "{}"))
ONE = (("get_2-x", '{"x": 1234567890}'),)

TRANSCRIPTS = [
    Transcript("hermes", "Hello! 🙂", "Hello! 🙂"),
    Transcript("hermes", _hermes(*ONE), calls=ONE),
    Transcript("hermes", _hermes(*TWO), calls=TWO),
    Transcript("hermes", f"Let me see.\n{_hermes(*ONE)}", "Let me see.", calls=ONE),
    Transcript(
        "hermes",
        f"First.\n{_hermes(*ONE)}\nThen:\n\n{_hermes(*TWO)}\nDone. ",
        "First.\nThen:\nDone. ",
        calls=(*ONE, *TWO),
        is_plain=False,
    ),
    Transcript("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
               calls=(("now", "{}"),)),
    Transcript(
        "hermes",
        f"<think>\nThe user asks, so a <tool_call> is due.\n</think>\n\n{_hermes(*ONE)}",
        reasoning="The user asks, so a <tool_call> is due.",
        calls=ONE,
    ),
    Transcript("hermes", "<think>\n\n</think>\n\nHi 12", "Hi 12"),
    Transcript("hermes", "a < b, <tool> and <tool_ca", "a < b, <tool> and <tool_ca"),
    Transcript("llama3_json", "It is 3 {degrees}.", "It is 3 {degrees}."),
    Transcript("llama3_json", '{"name": "wetter", "parameters": ' + ODD + "}",
               calls=(("wetter", ODD),)),
    Transcript("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}',
               calls=(("now", "{}"),)),
    Transcript("llama3_json", '{"nam": 1}', '{"nam": 1}'),
    Transcript("llama3_json", 'See {"name": "now", "parameters": {}}',
               'See {"name": "now", "parameters": {}}'),
    Transcript("mistral", "Bonjour [TOOL", "Bonjour [TOOL"),
    Transcript("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
               calls=(("now", "{}"),), is_plain=False),
    Transcript(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "wetter", "arguments": {ODD}, "id": "abcdefghi"}}, '
        '{"name": "now", "arguments": {}, "id": "123456789"}]',
        calls=TWO,
    ),
    Transcript(
        "mistral",
        'Un instant.[TOOL_CALLS][{"name": "get_2-x", "arguments": {"x": 1234567890}, "id": "a"}]',
        "Un instant.",
        calls=ONE,
    ),
    Transcript("mistral_v11", f"[TOOL_CALLS]wetter[ARGS]{ODD}", calls=(("wetter", ODD),)),
    Transcript(
        "mistral_v11",
        f"[THINK]Hm.[/THINK]Voilà[TOOL_CALLS]wetter[ARGS]{ODD}[TOOL_CALLS]now[ARGS]{{}}",
        "Voilà",
        "Hm.",
        TWO,
        is_plain=False,
    ),
    Transcript("mistral_v11", "2 + 2 = 4", "2 + 2 = 4"),
]  # fmt: skip
