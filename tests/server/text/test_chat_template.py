"""Chats become the same prompts as in transformers, and no template leaves the sandbox.

The templates in chat_templates/ use the features that the families' templates use.
"""

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from registry.formats import chat_template
from registry.formats.chat_template import ChatTemplate, TemplateError
from tests.tokenizer_families import make_tokenizer

TEMPLATES = Path(__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": 'Wie wird\'s in <Köln> & "Umgebung"?',
            "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}},
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "wetter", "arguments": {}}}

pieces = st.sampled_from(
    ["hi", " ", "\n", "\t", "{{ 7 * 7 }}", "{% raw %}", "{#", "}}", "<think>", "</think>", "<s>",
     "</s>", "[INST]", "<|im_end|>", "<tool_response>", "</tool_response>", "é", "🙂", "\u2028",
     "'", "<&>", '"', "\\", "stop", "skip"]
)  # fmt: skip
contents = st.lists(pieces | st.text(max_size=5), max_size=6).map("".join)
turns = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": contents})
others = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["tool", "system", "x"]), "content": contents}),
    st.just({"role": "assistant", "content": None, "tool_calls": [CALL]}),
    st.builds(
        lambda text: {"role": "assistant", "content": "", "reasoning_content": text}, contents
    ),
)


@st.composite
def conversations(draw):
    """A chat that most templates accept: alternating roles, maybe after a system message."""
    texts = draw(st.lists(contents, min_size=1, max_size=6))
    chat = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]
    if draw(st.booleans()):
        chat.insert(0, {"role": "system", "content": draw(contents)})
    return chat


@cache
def ours(name):
    return ChatTemplate({"default": (TEMPLATES / f"{name}.jinja").read_text()}, SPECIAL)


@cache
def theirs(name):
    return PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer("llama2"),
        chat_template=(TEMPLATES / f"{name}.jinja").read_text(),
        **SPECIAL,
    )


def rendered(render):
    """The rendered prompt, or None if the template refused the chat."""
    try:
        return render()
    except Exception:
        return None


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(
    chat=conversations() | st.lists(turns | others, min_size=1, max_size=5),
    tools=st.sampled_from([None, None, [], TOOLS]),
)
def test_a_prompt_is_what_transformers_makes_of_the_chat(name, chat, tools):
    def reference():
        return theirs(name).apply_chat_template(
            chat, tools=tools, tokenize=False, add_generation_prompt=True
        )

    assert rendered(lambda: ours(name).render(chat, tools)) == rendered(reference)


@pytest.mark.parametrize("variables", [{"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("begins", [False, True])
def test_a_prompt_with_variables_is_what_transformers_makes_of_it(variables, begins):
    chat = [{"role": "user", "content": "hi"}]
    assert ours("qwen3").render(chat, add_generation_prompt=begins, variables=variables) == theirs(
        "qwen3"
    ).apply_chat_template(chat, tokenize=False, add_generation_prompt=begins, **variables)


def test_a_template_reads_the_variables_that_it_is_not_given_here():
    source = (
        "{% if a is not defined %}{% set a = 1 %}{% endif %}{{ bos_token }}{{ range(b) }}"
        "{% for m in messages %}{{ m.c }}{{ loop.index }}{% endfor %}{{ raise_exception }}"
        "{% macro f(d) %}{{ d }}{{ e }}{% endmacro %}{{ tools }}{% set g = 2 %}{{ g }}"
    )
    template = ChatTemplate({"default": source, "tool_use": "{{ only_with_tools }}"}, SPECIAL)
    assert template.variables(for_tools=False) == {"a", "b", "e"}
    assert template.variables(for_tools=True) == {"only_with_tools"}
    # What the server gives wins.
    shown = ChatTemplate({"default": "{{ bos_token }}{{ tools }}"}, SPECIAL)
    assert shown.render([], variables={"bos_token": "x", "tools": "y"}) == "<s>None"


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(chat=conversations().filter(lambda chat: len(chat) > 1 and chat[-1]["role"] == "assistant"))
def test_a_prompt_of_a_message_to_be_continued_is_what_transformers_makes_of_it(name, chat):
    def reference():
        text = theirs(name).apply_chat_template(chat, tokenize=False, continue_final_message=True)
        # transformers leaves its mark in the text of a template that writes the message twice.
        return None if "CONTINUE_FINAL_MESSAGE_TAG" in text else text

    assert rendered(lambda: ours(name).render_open(chat)) == rendered(reference)


def test_what_a_template_refuses_is_an_error_in_its_words():
    chat = [{"role": "assistant", "content": "hi"}]
    with pytest.raises(TemplateError, match="refused these messages: Roles must go user"):
        ours("llama2").render(chat)


@pytest.mark.parametrize(
    "fault",
    ["{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ nothing.x }}", "{{ 'a'.index('b') }}", "{{ [][1].x }}",
     "{{ range(10 ** 9) | length }}", "{{ bos_token + 'x' }}",
     "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"],
)  # fmt: skip
def test_a_fault_of_a_template_is_an_error_too(fault):
    with pytest.raises(TemplateError, match="refused these messages"):
        of(fault).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "escape",
    ["{{ ''.__class__.__mro__[1].__subclasses__().pop }}", "{{ messages.append(1) }}",
     "{{ cycler.__init__.__globals__.os.system('true') }}", "{{ dict.__subclasses__()[0].x }}",
     "{{ raise_exception.__globals__.json }}", "{{ (messages|attr('__class__')).x }}",
     "{{ '{0.__class__.x}'.format(messages) }}", "{% set ns = namespace(__class__=1) %}",
     "{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "{% include '/etc/passwd' %}",
     "{% import 'os' as os %}", "{{ self.__init__.__globals__.x }}",
     "{{ messages[0].update(role='x') }}"],
)  # fmt: skip
def test_nothing_gets_out_of_the_sandbox(escape):
    with pytest.raises(TemplateError, match="refused these messages"):
        of(escape).render([{"role": "user", "content": "hi"}])


def test_a_prompt_has_a_limit(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_PROMPT_CHARACTERS", 1000)
    echo = of(
        "{% for m in messages %}{% for n in messages %}{{ m.content }}{% endfor %}{% endfor %}"
    )
    assert len(echo.render([{"role": "user", "content": "x" * 10}] * 10)) == 1000
    with pytest.raises(TemplateError, match="longer than 1000 characters"):
        echo.render([{"role": "user", "content": "x" * 10}] * 11)


def test_a_template_that_does_not_parse_says_where():
    with pytest.raises(TemplateError, match="line 2: "):
        of("{{ 1 }}\n{% if %}")


# ---- files that hold a model's template ----


@pytest.mark.parametrize(
    ("files", "prompt", "with_tools"),
    [
        ({"chat_template.jinja": "file", "tokenizer_config.json": "config"}, "file", "file"),
        ({"tokenizer_config.json": "config"}, "config", "config"),
        ({"tokenizer_config.json": {"tool_use": "t", "default": "d"}}, "d", "t"),
        ({"tokenizer_config.json": {"rag": "r", "default": "d"}}, "d", "d"),
        ({"tokenizer_config.json": {"tool_use": "t"}}, None, "t"),
        ({"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "t"}, "d", "t"),
        (
            {"additional_chat_templates/rag.jinja": "r", "tokenizer_config.json": "config"},
            None,
            None,
        ),
        ({}, None, None),
    ],
)
def test_a_template_is_found_where_transformers_finds_it(tmp_path, files, prompt, with_tools):
    config = write_model(tmp_path, files)
    chat = [{"role": "user", "content": "hi"}]
    template = ChatTemplate.load(tmp_path, config)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for tools, expected in ((None, prompt), ([], with_tools), (TOOLS, with_tools)):
        assert rendered(lambda tools=tools: template.render(chat, tools)) == expected
        assert expected == rendered(
            lambda tools=tools: reference.apply_chat_template(chat, tools=tools, tokenize=False)
        )


def test_older_models_have_it_in_a_file_of_json(tmp_path):
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert ChatTemplate.load(tmp_path, {}).render([{"role": "user", "content": "hi"}]) == "json"


@pytest.mark.parametrize("parts", ["m.content | selectattr('type', '==', 'text')", "m.content"])
def test_a_template_that_shows_texts_as_parts_alone_gets_them_so(parts):
    each = "{% for part in PARTS %}{{ part.text + ';' }}{% endfor %}".replace("PARTS", parts)
    source = "{% for m in messages %}{{ m.role }}:" + each + "{% endfor %}"
    template = ChatTemplate({"default": source}, {})
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Yes"}]
    assert template.render(chat) == "user:hi;assistant:Yes;"
    assert template.render_open(chat) == "user:hi;assistant:Yes"


def test_a_model_without_a_template_says_what_to_use():
    with pytest.raises(TemplateError, match="/v1/completions"):
        ChatTemplate({}, {}).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("in_a_map", [False, True])
def test_special_tokens_are_variables_as_in_transformers(tmp_path, in_a_map):
    named = {
        "bos_token": {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False,
                      "single_word": False, "__type": "AddedToken"},
        "eos_token": "</s>", "add_bos_token": True, "pad_token": None, "image_token": "<unk>",
    }  # fmt: skip
    source = (
        "{{ [bos_token, eos_token, pad_token is defined, add_bos_token is defined, image_token]}}"
    )
    write_model(tmp_path, {"chat_template.jinja": source})
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({} if in_a_map else named)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if in_a_map:
        named["bos_token"].pop("__type")
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    chat = [{"role": "user", "content": "hi"}]
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(chat, tokenize=False)
    assert ChatTemplate.load(tmp_path, config).render(chat) == expected
    assert "<s>" in expected


def of(source):
    return ChatTemplate({"default": source}, {})


def write_model(folder, files):
    """Write a model's tokenizer files; return the content of tokenizer_config.json.

    files: template by path; tokenizer_config.json may have several, by name.
    """
    make_tokenizer("llama2").save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, template in files.items():
        if name == "tokenizer_config.json":
            named = isinstance(template, dict)
            config["chat_template"] = (
                [{"name": k, "template": v} for k, v in template.items()] if named else template
            )
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("depth", [25, 5000])
def test_a_template_that_is_nested_too_deeply_does_not_parse(depth):
    source = "{% for x in y %}" * depth + "{% endfor %}" * depth
    with pytest.raises(TemplateError, match="nested too deeply"):
        ChatTemplate({"default": source}, {})
