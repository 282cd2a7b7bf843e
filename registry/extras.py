"""The packages that only some uses need, and the extras of pyproject.toml that bring them."""

from importlib.util import find_spec

EXTRAS = {
    "boto3": "s3",
    "opentelemetry.exporter.otlp.proto.http": "otel",
    "peft": "convert",
    "psycopg": "postgres",
    "pyarrow": "parquet",
    "ray": "ray",
    "triton": "gpu",
}


class ExtraMissing(Exception):
    """A use needs a package that is not installed.   remedy: what installs it."""

    def __init__(self, use: str, package: str) -> None:
        of = f"[{EXTRAS[package]}]'"
        self.remedy = f"In a clone: pip install -e '.{of}. With a wheel: pip install './WHEEL{of}."
        super().__init__(f"{use} needs {package}, which is not installed. {self.remedy}")


def require(use: str, package: str) -> None:
    """Raise ExtraMissing if a package is not installed.   use: what needs it."""
    try:
        found = find_spec(package)
    except ModuleNotFoundError:  # of what it is a part of
        found = None
    if found is None:
        raise ExtraMissing(use, package)
