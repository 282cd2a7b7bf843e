"""Base models of a gateway in tests: what a supervisor would tell of them, and changed parts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from server.api.gateway import Gateway
from server.launch.settings import Settings
from server.pool.control_files import BaseEntry
from server.pool.engines import EngineFigures
from server.pool.keeper import Keeper
from server.pool.pool_settings import PoolSettings


def demo_entries(settings: Settings) -> list[BaseEntry]:
    """The entry of the settings' model, which lies in a folder and lives in the data directory."""
    return [
        BaseEntry(
            name=settings.model_id,
            home=str(settings.data_dir),
            model_dir=settings.model,
            settings=settings.dump_base(),
        )
    ]


def change_base(gateway: Gateway, **changes: Any) -> None:
    """Change parts of the gateway's first base model, and what is made of them."""
    base = gateway.bases.default
    if "engines" in changes:
        home = Path(base.home)
        changes["keeper"] = Keeper(
            changes["engines"], base.running, home, PoolSettings(model="base")
        )
    gateway.bases.add(replace(base, **changes))


def figures_only(*figures: EngineFigures) -> Any:
    """Bases for the metrics: one base model, whose engines have these figures."""
    found = [("base", each) for each in figures]
    base = SimpleNamespace(model_id="base", running=[], keeper=SimpleNamespace(state="awake"))
    return SimpleNamespace(figures=lambda: found, num_deaths=0, current=[base])
