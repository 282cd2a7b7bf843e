"""`python -m bench.serve`: prints a JSON line with the figures of a server's clients per load.

--url URL --key KEY --model-names a,b   a server that runs already, Chorale or vLLM
--stack smollm2-135m|tiny|demo          a server of our own, made, filled and started for this run
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.measurement import describe, measure, warm_up, workloads
from bench.report import describe_machine, json_line, summarize
from bench.workload import POPULARITIES, Lengths


def main() -> None:
    # SIGTERM raises SystemExit, so that started processes are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parse_options(sys.argv[1:])
    if options.stack:
        # Imported here: it needs torch and transformers, which a load generator does not.
        from bench.stack import measure_stack

        rows = measure_stack(options)
    else:
        rows = measure_url(options)
    for setup, result in rows:
        line = json_line("serve", options.device_name, setup, result) + "\n"
        sys.stdout.write(line)
        if options.append:
            with options.append.open("a") as file:
                file.write(line)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.serve", description=__doc__)
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--url", help="URL of a running server")
    server.add_argument("--stack", help="start a server of: smollm2-135m, tiny or demo")
    parser.add_argument("--base-model", default="base", help="with --url: the base model's name")
    parser.add_argument(
        "--model-names", type=_words, default=(), help="with --url: names of adapters, a,b,c"
    )
    parser.add_argument(
        "--key", "--keys", dest="keys", type=_words,
        default=_words(os.environ.get("CHORALE_API_KEY", "")),
        help="with --url: one key, or one for each of --model-names: k1,k2",
    )  # fmt: skip
    parser.add_argument(
        "--vocab-size", type=int, default=256, help="with --url: prompts have ids below this"
    )

    parser.add_argument("--popularity", choices=POPULARITIES, default="uniform")
    parser.add_argument(
        "--rate", type=_rates, default=(float("inf"),), help="requests per second, as in: inf,0.5"
    )
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=Lengths.parse, default=Lengths(64, 256))
    parser.add_argument("--output-tokens", type=Lengths.parse, default=Lengths(64, 64))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--timeout-s", type=float, default=600.0, help="longest time between two tokens"
    )

    parser.add_argument("--adapters", type=int, default=16, help="with --stack: number of adapters")
    parser.add_argument(
        "--tenants", type=int, default=1, help="with --stack: tenants that share the adapters"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="with --stack: threads of either side"
    )
    parser.add_argument(
        "--set", dest="settings", type=_setting, action="append", default=[], metavar="NAME=VALUE",
        help="with --stack: a setting of chorale serve",
    )  # fmt: skip
    parser.add_argument(
        "--against-peft", action="store_true",
        help="with --stack: the same requests through transformers and PEFT",
    )  # fmt: skip
    parser.add_argument("--peer-batch", type=int, default=1 << 30, help="largest batch of the peer")
    parser.add_argument(
        "--device-name", default=describe_machine(), help="the server's device, for the row"
    )
    parser.add_argument("--append", type=Path, help="also write the rows to this file")
    options = parser.parse_args(arguments)
    if options.url and not options.keys:
        parser.error("--url needs --key, or CHORALE_API_KEY")
    if len(options.keys) not in (0, 1, len(options.model_names)):
        parser.error("give one key, or one for each of --model-names")
    return options


def measure_url(options: argparse.Namespace) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (setup, result) for every rate."""
    names = (options.base_model, *options.model_names)
    keys = options.keys if len(options.keys) > 1 else options.keys * len(options.model_names)
    by_model = dict(zip(names, (options.keys[0], *keys), strict=True))
    warm_up(options.url, by_model, names, options)
    rows = []
    for workload in workloads(options, options.base_model, options.model_names, options.vocab_size):
        outcomes = measure(options.url, by_model, workload, options)
        rows.append((describe(workload), summarize(outcomes, workload.base_model)))
    return rows


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(word) for word in text.split(","))
    if not all(rate > 0 for rate in rates):
        raise ValueError("every rate must be above 0")
    return rates


def _setting(text: str) -> tuple[str, str | int | float]:
    """Parse name=value, with the value's type as in chorale.toml."""
    name, _, value = text.partition("=")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


if __name__ == "__main__":
    main()
