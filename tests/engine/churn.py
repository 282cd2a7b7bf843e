"""A load of hundreds of short-lived adapters, each of which forces its own token.

The base model is built so that the next token shows which adapter was applied. All positions have
the same hidden state. An adapter writes its code twice: with v_proj into the values that are
cached, which attention averages over all positions, and with o_proj at the position that is
computed. Its token needs both: if a tenth of the cached values, or the tiles of the step, belong to
another adapter, the logits name another token, as a rule the alarm.

    hidden   0: constant   1 .. 255: code of the cached values   256 .. 510: code of this step
    values   0 .. 254: code   255: constant
"""

import hashlib
import io
import random
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import torch
from safetensors.torch import save

from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.cpu.runner import ModelRunner
from engine.journal.journal import Journal
from engine.kv.swap import PreemptionCosts, SwapSpace
from engine.models.config import DecoderConfig
from engine.scheduling.scheduler import Scheduler
from engine.steps.meter import TokenMeter
from engine.wire.messages import AddRequest, RequestOutput, SamplingParams, StepOutputs
from lora.arena import Arena
from lora.layout import Layout
from lora.loader import ThreadLoader
from lora.manager import AdapterManager
from lora.packed import PackedForm
from lora.residency import ResidencyConfig
from registry.formats.peft_format import (
    CanonicalAdapter,
    ModuleScale,
    lora_names,
    read_header,
    write_canonical,
)
from registry.ref import AdapterRef
from registry.storage.storage import LocalStorage
from tests.cpu_decoder import make_decoder
from tests.engine.fakes import FakeReference
from tests.engine.late_runner import LateRunner

NUM_CODES = 255
ALARM = NUM_CODES
_HIDDEN = 512
_VALUES = 256
_ALARM_LOGIT = 1.9  # a code's logit is 1 for this step plus its share of the values
NUM_SWAP_SLOTS = 24
_CONSTANT = _HIDDEN**0.5  # value of the first feature after the norm

CONFIG = DecoderConfig.parse(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": NUM_CODES + 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
)
LAYOUT = Layout.of(CONFIG.shape, itemsize=4)


def make_weights() -> dict[str, torch.Tensor]:
    """Weights with equal attention to all positions and no MLP; the base model names the alarm."""
    layer = "model.layers.0"
    weights = {
        "model.embed_tokens.weight": torch.zeros(NUM_CODES + 1, _HIDDEN),
        "lm_head.weight": torch.zeros(NUM_CODES + 1, _HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN),
        f"{layer}.input_layernorm.weight": torch.ones(_HIDDEN),
        f"{layer}.post_attention_layernorm.weight": torch.ones(_HIDDEN),
        f"{layer}.self_attn.q_proj.weight": torch.zeros(_VALUES, _HIDDEN),
        f"{layer}.self_attn.k_proj.weight": torch.zeros(_VALUES, _HIDDEN),
        f"{layer}.self_attn.v_proj.weight": torch.zeros(_VALUES, _HIDDEN),
        f"{layer}.self_attn.o_proj.weight": torch.zeros(_HIDDEN, _VALUES),
        f"{layer}.mlp.gate_proj.weight": torch.zeros(16, _HIDDEN),
        f"{layer}.mlp.up_proj.weight": torch.zeros(16, _HIDDEN),
        f"{layer}.mlp.down_proj.weight": torch.zeros(_HIDDEN, 16),
    }
    codes = torch.arange(NUM_CODES)
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    weights["lm_head.weight"][codes, 1 + codes] = 1.0
    weights["lm_head.weight"][codes, 1 + NUM_CODES + codes] = 1.0
    weights["lm_head.weight"][ALARM, 0] = _ALARM_LOGIT
    weights[f"{layer}.self_attn.v_proj.weight"][NUM_CODES, 0] = 1 / _CONSTANT
    weights[f"{layer}.self_attn.o_proj.weight"][1 + codes, codes] = 1.0
    return weights


def canonical_adapter(code: int, rank: int, salt: int) -> bytes:
    """The object of an adapter that forces token `code`. salt: changes nothing but the digest."""
    scale = 0.5 + salt % 7
    v_a, v_b = torch.zeros(rank, _HIDDEN), torch.zeros(_VALUES, rank)
    o_a, o_b = torch.zeros(rank, _VALUES), torch.zeros(_HIDDEN, rank)
    v_a[:, 0], v_b[code] = 1 / _CONSTANT, 1 / (rank * scale)
    o_a[:, NUM_CODES], o_b[1 + NUM_CODES + code] = 1.0, 1 / (rank * scale)
    # No hidden state has this feature, so the salt has no effect but makes the files differ.
    v_a[:, _HIDDEN - 1] = float(salt)
    modules, tensors = {}, {}
    for name, (a, b) in {"v_proj": (v_a, v_b), "o_proj": (o_a, o_b)}.items():
        module = f"model.layers.0.self_attn.{name}"
        modules[module] = ModuleScale(rank, scale)
        tensors |= dict(zip(lora_names(module), (a, b), strict=True))
    raw = save(tensors)
    header = read_header(io.BytesIO(raw), len(raw))
    written = io.BytesIO()
    write_canonical(written, io.BytesIO(raw), CanonicalAdapter(modules, header.tensors))
    return written.getvalue()


@dataclass
class Wrong:
    """A token that its request's adapter does not force."""

    request_id: str
    expected: int
    found: list[int]


@dataclass
class Churn:
    """Random requests of 16 tenants for their adapters, and the outcomes.

    names: the current version of every adapter, and its code.
    """

    core: EngineCore
    storage: LocalStorage
    folder: object
    seed: int
    num_names: int = 200
    num_tenants: int = 16
    most_open: int = 40
    names: dict[int, tuple[AdapterRef, int]] = field(default_factory=dict)
    open: dict[str, tuple[int, AdapterRef]] = field(default_factory=dict)
    outcomes: Counter = field(default_factory=Counter)
    wrong: list[Wrong] = field(default_factory=list)
    is_rush: bool = True

    def __post_init__(self):
        self.chance = random.Random(self.seed)
        self.num_uploads = self.num_requests = 0
        # Codes that no current version has, those unused for longest first.
        self.codes = deque(range(NUM_CODES))
        self.stems = [self._prompt(70) for _ in range(self.num_tenants)]
        # Zipf's weights, in an order that depends on the seed.
        self.popularity = [1 / (i + 1) for i in range(self.num_names)]
        self.chance.shuffle(self.popularity)

    def run(self, num_requests: int, deadline_s: float) -> None:
        """Step the engine until `num_requests` requests have ended or a token was wrong."""
        for name in range(self.num_names):
            self._upload(name)
        until = time.monotonic() + deadline_s
        num_steps = -1
        while not self.wrong and (self.num_requests < num_requests or self.open):
            assert time.monotonic() < until, f"{len(self.open)} requests are open for ever"
            # Requests come by steps, not by time, so that a busy machine runs the same load.
            has_computed = self.core.num_steps > num_steps
            if self.num_requests < num_requests and (has_computed or not self.open):
                self._disturb()
            num_steps = self.core.num_steps
            for _, message in self.core.step():
                if isinstance(message, StepOutputs):
                    for output in message.outputs:
                        self._check(output)
            self.core.scheduler.check_integrity()
            if self.core.num_steps == num_steps:
                time.sleep(0.0005)  # gives the loader's threads and the fetcher time

    # ---- random events ----

    def _disturb(self) -> None:
        """Make arrivals, prefetches, aborts, uploads under the same name and deletions at random.

        A rush, at the start and rarely later, waits until no request is open and then sends many
        requests for long answers of one adapter: they run together, so KV is short even if
        loads are slow.
        """
        chance = self.chance
        self.is_rush |= chance.random() < 0.005
        if self.is_rush and not self.open:
            self.is_rush, name = False, self._popular()
            for _ in range(self.most_open):
                self._send(name, self._prompt(70), max_tokens=40)
        while not self.is_rush and len(self.open) < self.most_open and chance.random() < 0.8:
            name = self._popular()
            stem = self.stems[name % self.num_tenants][: chance.choice([0, 20, 48, 70])]
            prompt = stem + self._prompt(chance.randint(1, 20))
            self._send(name, prompt, max_tokens=chance.randint(1, 12))
        if chance.random() < 0.03 and self.open:
            self.core.scheduler.abort([chance.choice(sorted(self.open))])
        if chance.random() < 0.05:
            self._upload(chance.randrange(self.num_names))
        if chance.random() < 0.01:
            ref, _ = self.names[chance.randrange(self.num_names)]
            self.storage.delete(ref.object_key)

    def _popular(self) -> int:
        (name,) = self.chance.choices(range(self.num_names), self.popularity)
        return name

    def _send(self, name: int, prompt: list[int], max_tokens: int) -> None:
        chance = self.chance
        ref, code = self.names[name]
        tenant = name % self.num_tenants
        request_id = f"r{self.num_requests}"
        self.num_requests += 1
        if chance.random() < 0.3:
            self.core.adapters.prefetch(ref, f"t{tenant}")
        self.open[request_id] = (code, ref)
        message = AddRequest(
            request_id=request_id,
            tenant_id=f"t{tenant}",
            prompt_token_ids=tuple(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            token_lease=max_tokens,
            deadline_s=300.0,
            first_token_timeout_s=300.0,
            adapter=ref,
            cache_salt=f"salt-{tenant}",
            priority=int(chance.random() < 0.2),
        )
        assert self.core.handle("gw", message) == []

    def _upload(self, name: int) -> None:
        """Upload a new version of an adapter, with another object and another token."""
        if name in self.names:
            self.codes.append(self.names[name][1])
        code = self.codes.popleft()
        self.num_uploads += 1
        rank = self.chance.choice([1, 3, 8, 12])
        data = canonical_adapter(code, rank, salt=self.num_uploads)
        digest = hashlib.sha256(data).hexdigest()
        key = f"tenants/t{name % self.num_tenants}/{digest}"
        upload = self.folder / "upload"
        upload.write_bytes(data)
        self.storage.put(key, upload)
        self.names[name] = (AdapterRef(f"a{name}", 1, digest, key, rank, len(data)), code)

    def _prompt(self, length: int) -> list[int]:
        return [self.chance.randrange(NUM_CODES) for _ in range(length)]

    # ---- outputs ----

    def _check(self, output: RequestOutput) -> None:
        code, ref = self.open[output.request_id]
        if any(token != code for token in output.new_token_ids):
            self.wrong.append(Wrong(output.request_id, code, list(output.new_token_ids)))
        if output.new_token_ids:
            assert output.adapter_digest == ref.digest
        if output.is_last:
            self.outcomes[output.stop_cause] += 1
            del self.open[output.request_id]


def build_core(
    folder,
    cache_dir,
    socket,
    *,
    arena=None,
    num_slabs=84,
    num_host_slabs=40,
    arena_is_host=True,
    backend=None,
) -> EngineCore:
    """An engine on the model above with the real loader and room for 20 adapters beside the KV.

    arena: replaces the Arena.   backend: replaces the CPU's backend.
    """
    form = PackedForm(LAYOUT, "float32", "base-1")
    slabs = torch.zeros(num_slabs, LAYOUT.slab_bytes, dtype=torch.uint8)
    device, host_cache_bytes = None, num_host_slabs * LAYOUT.slab_bytes
    if backend:
        slabs, device = backend.slabs, backend.device
    loader = ThreadLoader(
        cache_dir, socket, form, slabs, device=device, host_cache_bytes=host_cache_bytes
    )
    adapters = AdapterManager(
        arena or Arena(num_slabs),
        loader,
        ResidencyConfig(
            host_cache_bytes=host_cache_bytes, arena_is_host=arena_is_host and not backend
        ),
    )
    limits = SchedulerConfig(max_model_len=256, max_num_seqs=16, max_num_batched_tokens=96)
    costs = PreemptionCosts(copy_bytes_per_s=1e15)
    costs.note_prefill(1, 1.0)
    swap = SwapSpace(NUM_SWAP_SLOTS, LAYOUT.slab_bytes, costs)
    scheduler = Scheduler(limits, LAYOUT, adapters, [b""] * (NUM_CODES + 1), [], swap)
    meter = TokenMeter(folder / "meter")
    if backend:
        runner = backend.make_runner(adapters.tables, meter, NUM_SWAP_SLOTS)
    else:
        model = make_decoder(CONFIG, make_weights(), form, CONFIG.max_position_embeddings)
        runner = LateRunner(adapters)
        runner.runner = ModelRunner(model, slabs, form, runner.tables, meter, NUM_SWAP_SLOTS)
    journal = Journal(folder / "journal", "eng-1", "base-1")
    return EngineCore(scheduler, runner, journal, FakeReference())
