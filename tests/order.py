"""Durations of long test files, for the order of `make test` and the choice of `make test-fast`."""

from collections.abc import Sized

FOLDERS_ALONE = ("tests/e2e",)
"""Folders whose tests one worker runs alone: stacks of several processes run one at a time."""

SECONDS: dict[str, int] = {
    "tests/e2e": 300,
    "tests/kernels/test_aot.py": 150,
    "tests/crash/test_crash_sweep.py": 130,
    "tests/test_gpu_dry.py": 130,
    "tests/engine/gpu/test_races.py": 64,
    "tests/engine/test_oracle.py": 60,
    "tests/bench/test_gpu.py": 57,
    "tests/kernels/test_cpu_kernels.py": 34,
    "tests/engine/test_churn.py": 32,
    "tests/engine/test_runner.py": 31,
    "tests/bench/test_registry.py": 30,
    "tests/engine/gpu/test_ranks.py": 30,
    "tests/kernels/test_gpu_attention.py": 30,
    "tests/demo/test_demo.py": 27,
    "tests/engine/test_batch_invariance.py": 26,
    "tests/engine/test_shared_fairness.py": 24,
    "tests/kernels/test_gpu_lora_sharded.py": 23,
    "tests/kernels/test_gpu_lora.py": 21,
    "tests/server/api/test_isolation.py": 21,
    "tests/server/cli/test_demo_command.py": 21,
    "tests/bench/test_adapters.py": 19,
    "tests/kernels/test_gpu_sampling.py": 19,
    "tests/kernels/test_gpu_rope.py": 17,
    "tests/bench/test_engine.py": 16,
    "tests/server/api/test_inference.py": 16,
    "tests/server/api/test_inference_failures.py": 16,
    "tests/server/text/test_chat_template.py": 16,
    "tests/server/text/test_tokenizer.py": 15,
    "tests/bench/test_echo.py": 14,
    "tests/bench/test_peers.py": 14,
    "tests/engine/test_fairness.py": 14,
    "tests/server/pool/test_shares_of_engines.py": 13,
    "tests/registry/test_fuzz.py": 12,
    "tests/registry/test_uploads_any_sequence.py": 12,
    "tests/server/pool/test_engine_pool.py": 12,
    "tests/engine/gpu/test_interpreted.py": 10,
    "tests/engine/test_scheduler.py": 10,
    "tests/registry/test_catalog_any_sequence.py": 10,
    "tests/server/api/test_sharing.py": 10,
    "tests/engine/test_ranks.py": 9,
    "tests/registry/test_storage.py": 9,
    "tests/server/billing/test_usage.py": 9,
    "tests/engine/gpu/test_decoder.py": 8,
    "tests/engine/test_leaving.py": 8,
    "tests/engine/test_peft_corpus.py": 8,
    "tests/engine/test_process.py": 8,
    "tests/kernels/test_cpu_compiler.py": 8,
    "tests/registry/test_crash.py": 8,
    "tests/server/billing/test_budget_machine.py": 8,
    "tests/server/billing/test_export_resuming.py": 8,
    "tests/server/billing/test_exports.py": 8,
    "tests/server/pool/test_autoscaler.py": 8,
    "tests/engine/gpu/test_runner.py": 7,
    "tests/engine/test_quantization.py": 10,
    "tests/server/api/test_upload_routes.py": 7,
    "tests/server/billing/test_export_memory.py": 7,
    "tests/server/cli/test_cli_receipts.py": 7,
    "tests/server/text/test_tokenizer_tiktoken.py": 7,
    "tests/bench/test_pool.py": 6,
    "tests/engine/models/test_sharded_decoder.py": 6,
    "tests/engine/test_sampler.py": 6,
    "tests/engine/test_tcp.py": 6,
    "tests/kernels/test_cpu_linear.py": 6,
    "tests/kernels/test_tiled_attention.py": 6,
    "tests/lora/test_device.py": 6,
    "tests/lora/test_manager_any_sequence.py": 6,
    "tests/registry/test_upload_build.py": 6,
    "tests/server/api/test_openapi.py": 6,
    "tests/server/billing/test_audit.py": 6,
    "tests/server/billing/test_credits.py": 6,
    "tests/server/billing/test_ledger.py": 6,
    "tests/server/launch/test_plan.py": 6,
    "tests/server/webhooks/test_webhooks.py": 6,
    "tests/engine/test_batch_wire.py": 5,
    "tests/engine/test_merged.py": 5,
    "tests/engine/test_prompt_logprobs.py": 5,
    "tests/engine/test_stops.py": 5,
    "tests/kernels/test_gpu_activation.py": 5,
    "tests/kernels/test_sampling.py": 5,
    "tests/lora/test_download.py": 5,
    "tests/registry/test_uploads.py": 5,
    "tests/server/api/test_statement_routes.py": 5,
    "tests/server/billing/test_prices.py": 5,
    "tests/server/database/test_migrations.py": 5,
    "tests/server/launch/test_supervisor.py": 5,
    "tests/bench/test_headlines.py": 4,
    "tests/registry/test_presigned_storage.py": 4,
    "tests/server/api/test_openai.py": 4,
}
"""Processor seconds of each file, or folder of one worker, that takes 4 or more, including the
processes that it starts. The only harm of a wrong number is that workers end at different times.
"""

STARTING = frozenset(
    {
        "tests/bench/test_in_process.py",
        "tests/bench/test_process_tree.py",
        "tests/bench/test_scheduling.py",
        "tests/crash",
        "tests/engine/test_build.py",
        "tests/engine/test_cpu_choice.py",
        "tests/engine/test_journal_full.py",
        "tests/engine/test_tensor_parallel.py",
        "tests/kernels/test_native_linear.py",
        "tests/lora/test_fetch.py",
        "tests/lora/test_loader.py",
        "tests/registry/test_validator.py",
        "tests/server/cli/test_cli_adapters.py",
        "tests/server/cli/test_cli_hub.py",
        "tests/test_deployment_clusters.py",
    }
)
"""Files and folders whose tests start servers, browsers, compilers or engines, and are short."""

_USUAL_SECONDS = 0.1
"""Assumed seconds of a test in a file that is not long."""


def scope_of(nodeid: str) -> str:
    """Return the file or folder that one worker runs alone; a file's fixtures are made once."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in FOLDERS_ALONE if file.startswith(f"{folder}/")), file)


def seconds(scope: str, tests: Sized) -> float:
    """Return how long these tests of a scope are expected to take."""
    return SECONDS.get(scope, _USUAL_SECONDS * len(tests))


def is_fast(path: str) -> bool:
    """Whether `make test-fast` looks into a file or folder, by its path from the root."""
    return path not in SECONDS and path not in STARTING
