"""llama.cpp's converter for models whose tokenizer it does not know; we send token ids only.

`python gguf_convert.py FOLDER ...`: FOLDER holds convert_hf_to_gguf.py, which gets the other
arguments.
"""

import runpy
import sys

folder = sys.argv[1]
sys.path.insert(0, folder)

from conversion.base import TextModel  # noqa: E402
from conversion.llama import LlamaModel  # noqa: E402

LlamaModel.set_vocab = TextModel._set_vocab_gpt2
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
del sys.argv[:1]
runpy.run_path(f"{folder}/convert_hf_to_gguf.py", run_name="__main__")
