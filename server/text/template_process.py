"""Chat templates of adapters, rendered in a process of their own.

They come from tenants, and Jinja's sandbox bounds neither their time nor their memory. The process
has no network, no secrets and little memory. It forks for every chat, so that no chat is in reach
of another tenant's template, and a chat that takes too long ends alone.

    gateway ── socket of one chat ──▶ process ── fork ──▶ child: JSON in, _DONE or _REFUSED and text
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from registry.checks.confinement import confine, isolated, kept_variables
from registry.errors import Unavailable
from registry.formats.chat_template import MAX_PROMPT_CHARACTERS, ChatTemplate, TemplateError
from server.text.json_object import JsonObject

_CPU_S = 1
"""Processor time of a chat; a long template takes 20 ms."""
_WAIT_S = 5.0
_MEMORY_BYTES = 512 << 20
_MOST_BYTES = 4 * MAX_PROMPT_CHARACTERS + 1
_TOO_MUCH = "The adapter's chat template takes too much time or memory."
_DONE, _REFUSED = b"+", b"-"


class ConfinedTemplate(ChatTemplate):
    """An adapter's chat template, of which the gateway reads no line.

    A template that was ended in its first chat, which is the gateway's own, is not tried again.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], process: "TemplateProcess"
    ) -> None:
        self.sources = {"default": source}
        self.special_tokens = special_tokens
        self._process = process
        self._works: bool | None = None
        self._names: frozenset[str] | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt of a chat. Raises TemplateError; Unavailable if the process has died."""
        chat = {"messages": messages, "tools": tools, "variables": dict(variables)}
        return self._done({**chat, "add_generation_prompt": add_generation_prompt})

    def variables(self, *, for_tools: bool) -> frozenset[str]:
        """Names that the template reads, as the process finds them. Raises as `render` does."""
        if self._names is None:
            self._names = frozenset(self._done({}).split())
        return self._names

    def _done(self, asked: JsonObject) -> str:
        """The text that the process answers: a prompt, or without a chat names of variables."""
        answer = b""
        if self._works is not False:
            job = {"source": self.default, "special_tokens": self.special_tokens, **asked}
            answer = self._process.render(job)
            if self._works is None:
                self._works = bool(answer)
        text = answer[1:].decode("utf-8", "surrogatepass")
        if answer[:1] != _DONE:
            raise TemplateError(text or _TOO_MUCH)
        return text


class TemplateProcess:
    """The process, started when a chat needs it. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, job: JsonObject) -> bytes:
        """The child's answer; empty if it was ended by its limits. Raises Unavailable."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._send(theirs)
            try:
                answer = _exchange(ours, json.dumps(job).encode())
            except TimeoutError:
                raise _unavailable() from None
            except OSError:
                answer = b""
        if not answer and self._process is not None and self._process.poll() is not None:
            raise _unavailable()
        return answer

    def _send(self, theirs: socket.socket) -> None:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._begin()
            assert self._control is not None
            socket.send_fds(self._control, [b"x"], [theirs.fileno()])

    def _begin(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                isolated(sys.executable, "server.text.template_process", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env=kept_variables(),
                start_new_session=True,
            )
        weakref.finalize(self, _end, self._process, self._control)


def _unavailable() -> Unavailable:
    return Unavailable("The chat cannot be rendered at the moment.", retry_after_s=1)


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def _exchange(connection: socket.socket, sent: bytes) -> bytes:
    """Send all and read to the end. Raises OSError; TimeoutError after _WAIT_S."""
    ends_at, received = time.monotonic() + _WAIT_S, bytearray()
    connection.settimeout(_WAIT_S)
    connection.sendall(sent)
    connection.shutdown(socket.SHUT_WR)
    while piece := connection.recv(1 << 20):
        received += piece
        if len(received) > _MOST_BYTES:
            raise OSError("too many bytes")
        connection.settimeout(max(0.001, ends_at - time.monotonic()))
    return bytes(received)


# ---- in the process ----


def main() -> None:
    """Fork for each connection that comes, until the gateway is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    confine(_MEMORY_BYTES, file_bytes=0, cpu_s=1 << 30, open_files=16, niceness=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            try:
                control.close()
                _answer(socket.socket(fileno=descriptors[0]))
            finally:
                os._exit(0)
        os.close(descriptors[0])


def _answer(connection: socket.socket) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    with connection, connection.makefile("rb") as sent:
        job = json.load(sent)
        try:
            template = ChatTemplate({"default": job.pop("source")}, job.pop("special_tokens"))
            text = template.render(**job) if job else " ".join(template.variables(for_tools=False))
            connection.sendall(_DONE + text.encode("utf-8", "surrogatepass"))
        except TemplateError as error:
            connection.sendall(_REFUSED + str(error)[:1000].encode("utf-8", "surrogatepass"))
