"""`python -m tests.e2e.serve_fake SETTINGS.json`: `chorale serve` around the fake engine."""

import sys
from pathlib import Path

from server.launch.plan import prepare, resolve_settings
from server.launch.settings import Settings
from server.launch.supervisor import Supervisor


def main() -> None:
    settings = resolve_settings(Settings.model_validate_json(Path(sys.argv[1]).read_text()))
    plan = prepare(settings, engine_module="tests.engine.fake_engine")
    with Supervisor(plan, replace=plan.replace_gateways) as supervisor:
        supervisor.run()


if __name__ == "__main__":
    main()
