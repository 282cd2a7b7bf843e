"""`python -m bench.gateway.serve SETTINGS.json`: `chorale serve` around the paced engine."""

import sys
from pathlib import Path

from server.launch.plan import prepare, resolve_settings
from server.launch.settings import Settings
from server.launch.supervisor import Supervisor


def main() -> None:
    settings = resolve_settings(Settings.model_validate_json(Path(sys.argv[1]).read_text()))
    children = prepare(settings, engine_module="bench.gateway.paced_engine")
    with Supervisor(children) as supervisor:
        supervisor.run()


if __name__ == "__main__":
    main()
