"""lm-eval: generation and loglikelihoods by its remote tokenizer, over a small task of local data.

Each task is run twice, so that its contexts are in the prefix cache the second time. The samples
are left in samples.json, for the test that compares them with transformers and PEFT.
"""

import json
import os
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

URL, KEY = os.environ["CHORALE_URL"], os.environ["CHORALE_API_KEY"]
os.environ["OPENAI_API_KEY"] = KEY
FACTS = str(Path(__file__).parents[1] / "facts.jsonl")

FACT_TASK = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": FACTS}},
    "test_split": "test",
    "fewshot_split": "test",
    "fewshot_config": {"sampler": "first_n"},
    "num_fewshot": 8,
    "doc_to_text": "Question: {{question}}\nAnswer:",
}
CHOOSE = FACT_TASK | {
    "task": "choose",
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
}
TELL = FACT_TASK | {
    "task": "tell",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
}

samples = []
for model in ("chorale-demo", "json"):
    for prefix_cache in ("cold", "warm"):
        evaluated = simple_evaluate(
            model="local-completions",
            model_args={"model": model, "base_url": f"{URL}/v1/completions", "auth_token": KEY},
            tasks=[CHOOSE, TELL],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
        )
        for task, docs in evaluated["samples"].items():
            samples += [
                {"model": model, "task": task, "cache": prefix_cache, **doc} for doc in docs
            ]
Path("samples.json").write_text(json.dumps(samples, default=str))
print("works: `multiple_choice`")
print("works: `generate_until`")
print("works: the remote tokenizer")
