"""The measured product: `chorale serve` on a random model, started as a user starts it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from bench.checkpoint import save_adapter
from bench.in_process import DEVICE, THREADS, EngineFactory
from bench.process_tree import find_children
from bench.product import Product, serving

_GATEWAY = "-m server "
_PAST_DEFAULTS = {"max_model_len": 1024, "max_num_seqs": 16}


@contextmanager
def serve(
    factory: EngineFactory,
    name: str,
    environment: Mapping[str, str] = MappingProxyType({}),
    **settings: str | int | float,
) -> Iterator[Product]:
    """Run `chorale serve`. name: name of its folder in the factory's, which is not removed here."""
    folder = factory.folder / name
    folder.mkdir()
    given = {
        "model": str(factory.model_dir),
        "device": DEVICE,
        "dtype": "float32",
        "threads": THREADS,
        **_PAST_DEFAULTS,
        **settings,
    }
    with serving(given, folder, environment) as product:
        yield product


def gateway_pid(product: Product) -> int:
    (pid,) = find_children(product.process.pid, _GATEWAY)
    return pid


def make_adapter(factory: EngineFactory, rank: int, seed: int) -> Path:
    """Make an adapter's folder as PEFT writes it. The same seed gives the same bytes."""
    folder = factory.folder / f"rank-{rank}-seed-{seed}"
    if not folder.exists():
        save_adapter(factory.stack, folder, rank, seed)
    return folder


def size_bytes(adapter: Path) -> int:
    return sum(path.stat().st_size for path in adapter.iterdir() if path.suffix != ".md")
