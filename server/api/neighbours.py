"""The gateways of one machine, as one of them: each answers a scrape with the figures of all.

Each tells its own figures to whoever connects to its Unix socket in the data directory.
"""

import asyncio
import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from server.api.metrics import Metrics
from server.pool.control_files import gateway_socket, numbered

_ANSWER_S = 1.0
"""Longest wait for a neighbour's figures; then they are left out."""
_MAX_BYTES = 16 << 20
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{?)")


class Neighbours:
    """One gateway's view of all `count` of them.   number: its own."""

    def __init__(self, data_dir: Path, number: int, count: int, metrics: Metrics) -> None:
        self._data_dir = data_dir
        self._path = gateway_socket(data_dir, number)
        self._own_name = numbered("gateway", number)
        self._count = count
        self._metrics = metrics
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen; from then on the supervisor knows that this gateway serves. Raises OSError."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._tell, self._path)

    async def close(self) -> None:
        """Tell nothing more. The socket's file stays: another gateway may have it by now."""
        if self._server:
            self._server.close()

    async def render(self) -> bytes:
        """The figures of this gateway's engines, and those that each gateway has of its own."""
        paths = sorted(set(self._data_dir.glob("gateway*.sock")) - {self._path})
        answers = await asyncio.gather(*map(_ask, paths))
        texts = {path.stem: text for path, text in zip(paths, answers, strict=True) if text}
        self._metrics.note({"gateways_missing": max(0, self._count - 1 - len(texts))})
        texts[self._own_name] = await asyncio.to_thread(self._metrics.render_own)
        engines = await asyncio.to_thread(self._metrics.render_engines)
        return engines + merge({name: text.decode() for name, text in texts.items()}).encode()

    async def _tell(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(await asyncio.to_thread(self._metrics.render_own))
            await writer.drain()
        writer.close()


async def _ask(path: Path) -> bytes:
    """A neighbour's figures; empty if it is away or late."""
    writer = None
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path, limit=_MAX_BYTES)
            return await reader.read(-1)
    except (OSError, TimeoutError):
        return b""
    finally:
        if writer:
            writer.close()


def merge(texts: Mapping[str, str]) -> str:
    """One text of the figures of several gateways, each with the label `gateway`.

    texts: in Prometheus's format, by the gateway's name.
    """
    families: dict[str, list[str]] = {}
    lines: list[str] = []
    for gateway, text in texts.items():
        for line in text.splitlines():
            if line.startswith("# HELP "):
                lines = families.setdefault(line, [])
            elif line.startswith("#"):
                lines += [] if line in lines else [line]
            else:
                lines.append(_labelled(line, gateway))
    return "".join(f"{line}\n" for head, lines in families.items() for line in (head, *lines))


def _labelled(sample: str, gateway: str) -> str:
    label = f'gateway="{gateway}"'
    return _SAMPLE.sub(
        lambda found: found[1] + (f"{{{label}," if found[2] else f"{{{label}}}"),
        sample,
        count=1,
    )
