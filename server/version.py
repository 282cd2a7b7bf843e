"""The release that this source tree is; pyproject.toml reads it, too."""

VERSION = "0.1.0"
