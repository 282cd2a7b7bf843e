"""Builds deploy/Dockerfile without Docker and without a container registry, and tries the image.

The base is a Debian root that mmdebstrap makes; buildah runs the Dockerfile's own steps on it. A
step that this machine refuses is named. The files, 5 GB, are in build/image and may be deleted.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "image"
BASE, IMAGE = "localhost/chorale-base", "localhost/chorale"
# What python:3.12-slim has, as Debian's packages; the version of Python is the release's own.
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
BUILDAH = ("buildah", f"--root={FOLDER}/store", f"--runroot={FOLDER}/run", "--storage-driver=vfs")
# A process of a step has a changed root and this machine's network: that needs the fewest rights.
ISOLATION = "--isolation=chroot"
TRIAL = "chorale serve --help && python -c 'import kernels.cpu.compiler as c; c.build_library()'"

_STEP = re.compile(r"^(?:\[\d+/\d+\] )?STEP \d+/\d+: .*")


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    release, root = platform.freedesktop_os_release()["VERSION_CODENAME"], f"{FOLDER}/root.tar"
    run("root", "mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", release, root)
    # pip's settings of this machine, such as a mirror or a folder of wheels, hold in the build too.
    settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    settings["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    base = run("base", *BUILDAH, "from", "scratch")
    run("base", *BUILDAH, "add", "--quiet", base, root, "/")
    run("base", *BUILDAH, "config", *(f"--env={n}={v}" for n, v in settings.items()), base)
    run("base", *BUILDAH, "commit", "--rm", "--quiet", base, BASE)
    options = [f"--volume={path}:{path}:ro" for path in settings.values() if Path(path).exists()]
    options += [ISOLATION, "--format=docker", "--file=deploy/Dockerfile", f"--tag={IMAGE}"]
    run("build", *BUILDAH, "build", *options, f"--build-arg=BASE={BASE}", ".")
    trial = run("trial", *BUILDAH, "from", IMAGE)
    run("trial", *BUILDAH, "run", ISOLATION, trial, "--", "sh", "-c", TRIAL)
    sys.stderr.write("Every step of deploy/Dockerfile ran, and the image's command starts.\n")


def run(step: str, *command: str) -> str:
    """Run a command, show what it says, and return its last line. A failure ends the program."""
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            sys.stderr.write(line)
            last = line.strip() or last
            step = last if _STEP.match(last) else step
    if process.returncode:
        sys.exit(f"This machine refused the step: {step}")
    return last


if __name__ == "__main__":
    main()
