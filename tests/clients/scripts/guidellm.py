"""GuideLLM: a short benchmark of two-turn chats, streamed, with usage in every chunk."""

import json
import os
import subprocess
import sys
from pathlib import Path

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]
MODEL = os.environ["CHORALE_MODEL"]

options = (
    f"--backend kind=openai_http,target={URL},model=json,api_key={KEY} "
    "--data kind=synthetic_text,prompt_tokens=32,output_tokens=8,turns=2 "
    f"--tokenizer kind=huggingface_auto,model={MODEL} --profile kind=synchronous "
    "--constraint kind=max_requests,count=10 --output kind=json,path=report.json --disable-console"
)
subprocess.run([sys.executable, "-m", "guidellm", "run", *options.split()], check=True)
report = json.loads(Path("report.json").read_text())
totals = report["benchmarks"][0]["metrics"]["request_totals"]
assert totals == {"successful": 10, "errored": 0, "incomplete": 0, "total": 10}, totals
print("works: a benchmark of 10 chat requests in two turns, none failed")
