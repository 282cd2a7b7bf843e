"""Templates of tenants: the same prompts as in the gateway's own process, and nothing else."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from registry.errors import Unavailable
from registry.formats.chat_template import ChatTemplate, TemplateError
from server.text import template_process
from server.text.template_process import ConfinedTemplate, TemplateProcess

TEMPLATES = Path(__file__).parent / "chat_templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [{"role": "user", "content": "Hé 🙂\n"}, {"role": "assistant", "content": "ab"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def process() -> TemplateProcess:
    return TemplateProcess()


@pytest.mark.parametrize("name", ["llama3", "qwen3", "mistral3"])
def test_a_chat_is_rendered_as_without_the_process(process, name):
    source = (TEMPLATES / f"{name}.jinja").read_text()
    apart = ConfinedTemplate(source, SPECIAL, process)
    here = ChatTemplate({"default": source}, SPECIAL)
    for tools in (None, TOOLS):
        assert apart.render(CHAT[:1], tools) == here.render(CHAT[:1], tools)
    assert apart.render_open(CHAT) == here.render_open(CHAT)
    names = here.variables(for_tools=False)
    assert apart.variables(for_tools=False) == names
    values = dict.fromkeys(names, "x")
    assert apart.render(CHAT[:1], variables=values) == here.render(CHAT[:1], variables=values)
    assert apart.description == here.description


def test_what_a_template_refuses_is_told_in_its_words(process):
    source = "{{ raise_exception('Only lists, please: ' + messages[0].content) }}"
    with pytest.raises(TemplateError, match="Only lists, please: Hé"):
        ConfinedTemplate(source, {}, process).render(CHAT)
    with pytest.raises(TemplateError, match="line 1"):
        ConfinedTemplate("{% if %}", {}, process).render(CHAT)


@pytest.mark.parametrize(
    "source",
    ["{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
     "{{ 'a' * 10 ** 10 }}", "{{ 10 ** (10 ** 10) }}", "{{ '%999999999999d' % 1 }}",
     "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
     "{% endfor %}{{ ns.x|length }}"],
)  # fmt: skip
def test_a_template_that_takes_too_much_ends_alone(process, source):
    costly, cheap = ConfinedTemplate(source, {}, process), ConfinedTemplate("ok", {}, process)
    with pytest.raises(TemplateError):
        costly.render(CHAT)
    assert cheap.render(CHAT) == "ok"


def test_a_template_is_not_tried_again_if_its_first_chat_took_too_much(process):
    source = "{% if messages[0].content == 'hang' %}{{ 'a' * 10 ** 10 }}{% endif %}ok"
    hang, chats = [{"role": "user", "content": "hang"}], []

    class Counting(TemplateProcess):
        def render(self, job):
            chats.append(job["messages"])
            return process.render(job)

    good, broken = (ConfinedTemplate(source, {}, Counting()) for _ in range(2))
    assert good.render(CHAT) == "ok"
    for template, chat in ((good, hang), (broken, hang), (broken, CHAT)):
        with pytest.raises(TemplateError, match="too much time or memory"):
            template.render(chat)
    assert good.render(CHAT) == "ok", "a chat of one tenant takes it from no other"
    assert chats == [CHAT, hang, hang, CHAT]


def test_other_chats_are_rendered_while_one_takes_too_long(process):
    slow = ConfinedTemplate("{{ 10 ** (10 ** 10) }}", {}, process)
    quick = ConfinedTemplate("ok", {}, process)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(slow.render, CHAT)
        assert quick.render(CHAT) == "ok"
        assert isinstance(waiting.exception(), TemplateError)


def test_the_process_has_no_secrets_and_no_file_to_write(process, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    process = TemplateProcess()
    assert ConfinedTemplate("ok", {}, process).render(CHAT) == "ok"
    folder = Path(f"/proc/{process._process.pid}")
    assert b"secret" not in (folder / "environ").read_bytes()
    lines = (folder / "limits").read_text().splitlines()
    limits = {line[:25].strip(): line[26:].split()[0] for line in lines}
    assert limits["Max file size"] == "0"
    assert limits["Max address space"] == str(512 << 20)


def test_a_process_that_died_is_begun_again_and_one_that_stands_still_is_told(monkeypatch):
    process = TemplateProcess()
    template = ConfinedTemplate("ok", {}, process)
    assert template.render(CHAT) == "ok"
    process._process.kill()
    process._process.wait()
    assert template.render(CHAT) == "ok"
    monkeypatch.setattr(template_process, "_WAIT_S", 0.1)
    os.kill(process._process.pid, signal.SIGSTOP)
    with pytest.raises(Unavailable):
        template.render(CHAT)
    monkeypatch.undo()
    os.kill(process._process.pid, signal.SIGCONT)
    assert template.render(CHAT) == "ok", "which was not its fault"


def test_the_process_ends_with_its_owner():
    process = TemplateProcess()
    ConfinedTemplate("ok", {}, process).render(CHAT)
    child = process._process
    del process
    assert child.poll() is not None
