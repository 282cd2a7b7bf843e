"""`python -m tests.e2e.serve SETTINGS.json MODULE`: `chorale serve` with this module's engines."""

import sys
from pathlib import Path

from server.launch.prepare import prepare, resolve_settings
from server.launch.settings import Settings
from server.launch.supervisor import Supervisor


def main() -> None:
    settings = resolve_settings(Settings.model_validate_json(Path(sys.argv[1]).read_text()))
    plan = prepare(settings, engine_module=sys.argv[2])
    with Supervisor(plan, replace=plan.gateways.replace) as supervisor:
        supervisor.run()


if __name__ == "__main__":
    main()
